"""Grafts and ledgers on the hub, against a server on this machine that answers the calls of `huggingface_hub`."""

from __future__ import annotations

import ast
import base64
import hashlib
import http.server
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.hf_api
import prompted
import pytest
import torch
import yaml
from huggingface_hub import constants

from forgetfree import Ledger, Predictor, cli
from forgetfree.data.sources import load_tasks
from forgetfree.errors import ForgetfreeError
from forgetfree.ledger import Record
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.serve.cards import hub_card
from forgetfree.serve.hub import repository_of
from forgetfree.tensor_file import TensorFile

#: Tensors and metadata of any format, with their checksum.
ANY_FILE = TensorFile(ForgetfreeError, "")

TOKEN = "hf_of_the_test"


class Hub(http.server.ThreadingHTTPServer):
    """Repositories in memory: branches of files, and what was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.asked: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    """The calls that `create_repo`, `create_branch`, `upload_folder` and `snapshot_download` make."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self, status: int, content: Any = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fails(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        if path == "/":
            return self.answer(200)
        if match := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(?:/(revision|tree)/([^/]+))?(/.*)?", path):
            name, what, revision, _ = match.groups()
            if (files := self.files(name, revision or "main")) is None:
                return None
            if what == "tree":
                listed = [self.described(file, data) for file, data in files.items()]
                return self.answer(200, listed)
            siblings = [{"rfilename": file} for file in files]
            return self.answer(200, {"id": name, "sha": self.commit(name, revision or "main"), "siblings": siblings})
        if match := re.fullmatch(r"/([\w-]+/[\w-]+)/resolve/([^/]+)/(.+)", path):
            name, revision, file = match.groups()
            if (files := self.files(name, revision)) is None:
                return None
            if file not in files:
                return self.fails(404, "EntryNotFound")
            commit, etag = self.commit(name, revision), hashlib.sha256(files[file]).hexdigest()
            return self.answer(200, files[file], X_Repo_Commit=commit, ETag=f'"{etag}"')
        return self.answer(404)

    def described(self, file: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def commit(self, name: str, revision: str) -> str:
        files = self.server.repositories[name].get(revision) or {}
        return revision if re.fullmatch("[0-9a-f]{40}", revision) else self.digest(files)

    @staticmethod
    def digest(files: dict[str, bytes]) -> str:
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or commit; an answer is given where there are none."""
        known = self.server.repositories.get(name)
        allowed = name not in self.server.private or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if known is None or not allowed:
            return self.fails(401 if not allowed else 404, "RepoNotFound")
        found = next((files for branch, files in known.items() if revision in (branch, self.digest(files))), None)
        return found if found is not None else self.fails(404, "RevisionNotFound")

    def do_POST(self) -> None:
        path, body = self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"POST {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] != "me":
                return self.answer(403, {"error": "You don't have the rights"})
            if name in self.server.repositories:
                return self.answer(409, {"error": "exists", "url": f"{self.server.endpoint}/{name}"})
            self.server.repositories[name] = {"main": {".gitattributes": b""}}
            if asked.get("private") or asked.get("visibility") == "private":
                self.server.private.add(name)
            return self.answer(200, {"url": f"{self.server.endpoint}/{name}", "name": name})
        if match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            name, branch = match.groups()
            self.server.repositories[name].setdefault(branch, {})
            return self.answer(201)
        if path == "/api/validate-yaml":
            assert "forgetfree" in json.loads(body)["content"]
            return self.answer(200, {"warnings": [], "errors": []})
        if match := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            files = json.loads(body)["files"]
            return self.answer(
                200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        if match := re.fullmatch(r"/api/models/(.+)/commit/([^?]+).*", path):
            name, branch = match.groups()
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repositories[name][branch][line["value"]["path"]] = content
            url = f"{self.server.endpoint}/{name}/commit/{self.commit(name, branch)}"
            return self.answer(200, {"success": True, "commitOid": self.commit(name, branch), "commitUrl": url})
        return self.answer(404)


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client of this process, which is loaded already, talk to an endpoint."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub on this machine, and a token for it."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        point_at(server.endpoint, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back, whatever the command sets
        monkeypatch.delenv("HF_HUB_OFFLINE")
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def run(model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `forgetfree graft` and `forgetfree run` write, side by side."""
    root = tmp_path_factory.mktemp("made")
    how = [
        "--data",
        str(data_directory),
        "--model",
        str(model_directory("bert-pooler")),
        "--shots",
        "4",
        "--steps",
        "2",
    ]
    assert cli.main(["graft", "sst2", *how, "--sparsity", "0.05", "--out", str(root / "graft")]) == 0
    strategy = ["--strategy", "grafting-continual", "--sparsity", "0.05"]
    assert cli.main(["run", "qnli,sst2", *how, *strategy, "--out", str(root / "run")]) == 0
    return root


def test_a_graft_goes_there_and_back(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_directory: Callable[[str], Path]
) -> None:
    assert cli.main(["push", str(run / "graft"), "me/films", "--license", "apache-2.0"]) == 0
    assert "/me/films/commit/" in capsys.readouterr().out
    files = hub.repositories["me/films"]["main"]
    assert files["graft.safetensors"] == (run / "graft" / "bare-graft/seed-0/graft.safetensors").read_bytes()
    assert "me/films" not in hub.private
    card = files["README.md"].decode()
    graft = Graft.load(run / "graft" / "bare-graft/seed-0/graft.safetensors")
    assert graft.origin is not None
    results = json.loads((run / "graft" / "results.json").read_text())
    score = results["runs"][1]["matrix"][1][0]
    assert card.startswith("---\nlibrary_name: forgetfree\ntags: [forgetfree, graft]\nlicense: apache-2.0\n---\n")
    for held in (
        graft.origin.fingerprint,
        "negative, positive",
        f"| `sst2` | accuracy | {score:.3f} | ",
        "hf://me/films",
    ):
        assert held in card, held
    assert cli.main(["pull", "me/films", "--out", str(tmp_path / "films")]) == 0
    assert {path.name for path in (tmp_path / "films").iterdir()} == {"graft.safetensors", "README.md"}
    assert (tmp_path / "films" / "graft.safetensors").read_bytes() == files["graft.safetensors"]
    model = str(model_directory("bert-pooler"))
    for source, out in ((str(tmp_path / "films"), "one"), ("hf://me/films", "two")):
        assert cli.main(["apply", source, "--model", model, "--out", str(tmp_path / out)]) == 0
    one, two = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two


def test_a_ledger_goes_there_and_back_on_a_branch_of_its_own(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["push", str(run / "run"), "me/two-tasks", "--private", "--revision", "v1"]) == 0
    assert hub.private == {"me/two-tasks"} and "ledger.safetensors" not in hub.repositories["me/two-tasks"]["main"]
    files = hub.repositories["me/two-tasks"]["v1"]
    ledger = run / "run" / "grafting-continual" / "seed-0" / "ledger.safetensors"
    assert files["ledger.safetensors"] == ledger.read_bytes()
    card = files["README.md"].decode()
    assert "`qnli` (two texts)" in card and "`sst2` (one text)" in card and "licence | not stated" in card
    assert len(re.findall(r"\| `(qnli|sst2)` \| accuracy \| 0\.\d{3} \| \d+ \|", card)) == 2
    assert cli.main(["pull", "hf://me/two-tasks", "--revision", "v1", "--out", str(tmp_path / "pulled")]) == 0
    assert Ledger.load(tmp_path / "pulled" / "ledger.safetensors").tasks == ["qnli", "sst2"]
    assert cli.main(["pull", "me/two-tasks", "--revision", "v2", "--out", str(tmp_path / "other")]) == 1
    assert "me/two-tasks has no revision 'v2'" in capsys.readouterr().err
    assert cli.main(["pull", "me/two-tasks", "--out", str(tmp_path / "other")]) == 1
    assert "neither a graft.safetensors nor a ledger.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_what_was_learned_of_texts_goes_there_and_back(hub: Hub, tmp_path: Path) -> None:
    """A ledger, which writes the run's texts, and a graft; their cards say what a row is."""
    model, data = prompted.write_model("Llama", tmp_path / "model", chats=True), prompted.write_data(tmp_path / "data")
    run = prompted.run(data, model, tmp_path / "run", "grafting-continual", steps=2, upper_triangle=False)
    assert cli.main(["push", str(run), "me/texts"]) == 0
    card = hub.repositories["me/texts"]["main"]["README.md"].decode()
    assert "`first` (a text after a prompt)" in card and "`chat` (a text after a chat)" in card
    assert len(re.findall(r"\| `(first|chat|last)` \| rouge\\_l \| \d\.\d{3} \| 11 \|", card)) == 3
    assert cli.main(["pull", "me/texts", "--out", str(tmp_path / "pulled")]) == 0
    predictor = Predictor.of_run(tmp_path / "pulled" / "ledger.safetensors", model=str(model))
    expected = prompted.answers_of_run(run, "grafting-continual")
    for task in ("first", "last"):
        prompts = load_tasks(task, str(data))[0].test.first
        assert [each.text for each in predictor.answer(task, prompts)] == list(expected[task].texts)
    how = ["--data", str(data), "--model", str(model), "--steps", "2", "--sparsity", "0.1", "--set", "max_length=128"]
    assert cli.main(["graft", "last", *how, "--out", str(tmp_path / "graft")]) == 0
    assert cli.main(["push", str(tmp_path / "graft"), "me/graft"]) == 0
    for source, out in ((str(tmp_path / "graft"), "one"), ("hf://me/graft", "two")):
        assert cli.main(["apply", source, "--model", str(model), "--out", str(tmp_path / out)]) == 0
    one, two = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two


def test_a_damaged_file_is_not_put_in_place(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (run / "graft" / "bare-graft/seed-0/graft.safetensors").read_bytes()
    changed = bytearray(whole)
    changed[-1] ^= 1
    for content, message in (
        (bytes(changed), "not a sound graft"),
        (whole[:-9], "cannot be read"),
        (ANY_FILE.content({"weight": torch.zeros(2)}, {"format": "pt"}), "neither a graft nor a ledger of forgetfree"),
    ):
        hub.repositories["me/odd"] = {"main": {"graft.safetensors": content}}
        assert cli.main(["pull", "me/odd", "--out", str(tmp_path / "odd")]) in (1, 2)
        assert message in capsys.readouterr().err
        assert not (tmp_path / "odd").exists()


def test_what_cannot_be_pushed_never_reaches_the_hub(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_directory: Callable[[str], Path]
) -> None:
    graft = Graft.load(run / "graft" / "bare-graft/seed-0/graft.safetensors")
    assert graft.space is not None
    Graft(graft.region, graft.values, graft.space).save(tmp_path / "bare.safetensors")
    model = model_directory("bert-pooler")
    for source, code, message in (
        (tmp_path / "none", 2, "There is no"),
        (model / "model.safetensors", 2, "neither a graft nor a ledger of forgetfree"),
        (model, 2, "must hold one graft file"),
        (model / "config.json", 1, "cannot be read"),
        (tmp_path / "bare.safetensors", 1, "does not say for which task"),
    ):
        assert cli.main(["push", str(source), "me/it"]) == code, source
        assert message in capsys.readouterr().err
    for name in ("films", "me/films/more", "me/fi lms", "/films"):
        assert cli.main(["push", str(run / "graft"), name]) == 2
        assert "is named OWNER/NAME" in capsys.readouterr().err
    assert hub.asked == []


def test_the_hub_s_refusals_are_explained(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*words: str) -> str:
        assert cli.main(list(words)) == 1
        error = capsys.readouterr().err
        assert error.startswith("forgetfree: error: ") and error.count("\n") == 1
        return error

    out = ["--out", str(tmp_path / "out")]
    assert "There is no repository me/none on the hub, or you may not see it" in refusal("pull", "me/none", *out)
    assert "does not let you write to you/films" in refusal("push", str(run / "graft"), "you/films")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not know who you are" in (said := refusal("push", str(run / "graft"), "me/films"))
    assert "hf auth login" in said and "HF_TOKEN" in said
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "does not know who you are" in refusal("push", str(run / "graft"), "me/films")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        point_at(f"http://127.0.0.1:{closed.getsockname()[1]}", monkeypatch)
    assert "cannot be reached for me/films" in refusal("push", str(run / "graft"), "me/films")
    assert cli.main(["pull", "me/films", *out]) == 1
    assert "The hub cannot be reached for me/films" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_ledger_without_a_run_says_what_is_not_known(run: Path, tmp_path: Path) -> None:
    ledger = Ledger.load(run / "run" / "grafting-continual" / "seed-0" / "ledger.safetensors")
    ledger.save(tmp_path / "ledger.safetensors")
    card = hub_card(ledger, tmp_path / "ledger.safetensors", "me/two")
    assert "known by its fingerprint only" in card and "No scores came with the file" in card
    assert ledger.fingerprint in card
    hostile = ledger.records[0].definition
    assert hostile is not None
    named = Ledger(ledger.space, ledger.fingerprint, "alone", ledger.binding)
    bad = replace(hostile, name="a`b|c\nd<img src=x>[e](http://f)", labels=("<b>", "![x](http://f)"))
    first = ledger.records[0]
    named.append(Record(bad.name, first.region, first.owned, 0.1, first.readout, definition=bad, classes=(0, 1)))
    card = hub_card(named, tmp_path / "ledger.safetensors", "me/two")
    assert "a`b" not in card and "b|c" not in card and "!\\[x\\](" in card and " <b>" not in card
    assert "# a\\`b\\|c\\\\nd\\<img src=x\\>" in card, "a heading that shows it"
    model = 'a/b", __import__("os"), "'
    origin = GraftOrigin(bad, "linear", model, "f" * 64, 0.1)
    graft = Graft(first.region, first.owned.values, space=ledger.space, readout=first.readout, origin=origin)
    card = hub_card(graft, tmp_path / "graft.safetensors", "me/two")
    (code,) = [part.partition("```")[0] for part in card.split("```python")[1:]]
    (call,) = [
        each for each in ast.walk(ast.parse(code)) if getattr(getattr(each, "func", None), "id", "") == "apply_graft"
    ]
    assert [each.value for each in call.args[1:]] == [model, "model"], "a name that stays a name"
    assert yaml.safe_load(card.split("---")[1])["base_model"] == model
    assert repository_of("hf://me/two") == "me/two"
