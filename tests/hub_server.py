"""A Hugging Face hub on this machine, for the requests of `huggingface_hub`, `transformers` and `datasets`."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import huggingface_hub.hf_api
import pytest
from huggingface_hub import HfApi, constants

_NAME = r"([\w.-]+/[\w.-]+)"


class Hub(http.server.ThreadingHTTPServer):
    """Repositories in memory, each one branch of files under ``models/OWNER/NAME`` or ``datasets/OWNER/NAME``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def create(self, api: Any, repo_id: str, **_: Any) -> Any:
        """Stand in for `HfApi.create_repo`."""
        return SimpleNamespace(repo_id=repo_id)

    def upload(self, api: Any, repo_id: str, folder_path: Path, **_: Any) -> str:
        """Stand in for `HfApi.upload_folder`."""
        self.put(f"models/{repo_id}", Path(folder_path))
        return f"{self.endpoint}/{repo_id}/commit/{commit_of(self.repositories[f'models/{repo_id}'])}"

    def put(self, repository: str, directory: Path) -> None:
        """Put the files of a directory into a repository."""
        files = [path for path in directory.rglob("*") if path.is_file()]
        self.repositories[repository] = {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def answer(self, status: int, content: Any = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """Return the files of a repository; if there are none, send a 404 response and return None."""
        files = self.server.repositories.get(repository)
        if files is None:
            return self.refuse(404, "RepoNotFound")
        return files if revision in ("main", commit_of(files)) else self.refuse(404, "RevisionNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/":
            return self.answer(200)
        if match := re.fullmatch(rf"/api/(models|datasets)/{_NAME}(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path):
            kind, name, what, revision, below = match.groups()
            if (files := self.files(f"{kind}/{name}", revision or "main")) is None:
                return None
            if what == "tree":
                inside, deep = f"{below}/" if below else "", "recursive=true" in self.path.lower()
                found = [each for each in (*folders(files), *files) if each.startswith(inside)]
                listed = [each for each in found if deep or "/" not in each.removeprefix(inside)]
                return self.answer(200, [described(each, files) for each in listed])
            siblings = [{"rfilename": file} for file in files]
            return self.answer(200, {"id": name, "sha": commit_of(files), "siblings": siblings, "private": False})
        if match := re.fullmatch(rf"/(datasets/)?{_NAME}/resolve/([^/]+)/(.+)", path):
            data, name, revision, file = match.groups()
            if (files := self.files(f"{'datasets' if data else 'models'}/{name}", revision)) is None:
                return None
            if file not in files:
                return self.refuse(404, "EntryNotFound")
            etag = hashlib.sha256(files[file]).hexdigest()
            return self.answer(200, files[file], X_Repo_Commit=commit_of(files), ETag=f'"{etag}"')
        return self.answer(404)

    def do_POST(self) -> None:
        path, body = unquote(self.path.partition("?")[0]), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if match := re.fullmatch(rf"/api/(models|datasets)/{_NAME}/paths-info/([^/]+)", path):
            kind, name, revision = match.groups()
            if (files := self.files(f"{kind}/{name}", revision)) is None:
                return None
            asked = (
                json.loads(body)["paths"] if body[:1] == b"{" else re.findall(r"paths=([^&]*)", unquote(body.decode()))
            )
            return self.answer(200, [described(each, files) for each in asked if each in (*folders(files), *files)])
        return self.answer(404)


def folders(files: Iterable[str]) -> list[str]:
    return sorted({str(folder) for file in files for folder in list(PurePosixPath(file).parents)[:-1]})


def described(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    if path not in files:
        return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
    return {"type": "file", "path": path, "size": len(files[path]), "oid": hashlib.sha1(files[path]).hexdigest()}


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub client of this process, which is already loaded, at an endpoint."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Yield a hub on this machine that the client connects to, with an empty cache."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        point_at(server.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "")  # monkeypatch restores it, even if a command sets it
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(HfApi, "create_repo", lambda api, **how: server.create(api, **how))
        monkeypatch.setattr(HfApi, "upload_folder", lambda api, **how: server.upload(api, **how))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()
