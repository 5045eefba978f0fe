"""Grafts and ledgers on the Hugging Face hub: one file and a card a repository, checked before it is used."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forgetfree.display import brief
from forgetfree.errors import HubError, UsageError, first_line
from forgetfree.files import StrPath, new_directory
from forgetfree.ledger import Ledger
from forgetfree.ledger.file import FORMAT as LEDGER_FORMAT
from forgetfree.ledger.graft import FORMAT as GRAFT_FORMAT
from forgetfree.ledger.graft import Graft, find_graft
from forgetfree.results.config_file import check_whole
from forgetfree.results.unit_folder import check_own
from forgetfree.serve.cards import hub_card
from forgetfree.serve.source import saved_file
from forgetfree.tensor_file import OpenFile

#: What names a repository where a path may also stand.
SCHEME = "hf://"
#: The files of a repository, by what they hold.
FILES = {"graft": "graft.safetensors", "ledger": "ledger.safetensors"}
CARD = "README.md"


def push(
    source: StrPath,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str | None = None,
) -> str:
    """Put a graft or a ledger into a repository on the hub, with a card, and return the address of the commit.

    The repository is made if there is none. The file is checked first.

    Args:
        source: the file, or a directory of ``forgetfree run`` or ``forgetfree graft`` that holds one.
        repository: ``OWNER/NAME``.
        private: make the repository so that only its owner sees it.
        revision: the branch, which is made if there is none; default: ``main``.
        license: the licence by its identifier on the hub; default: none is named.

    Raises:
        UsageError: there is no such file, or the name is none.
        GraftError, LedgerError: the file is damaged.
        HubError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    name = repository_of(repository)
    content = _load(file := _file_of(Path(source)))
    kind = "graft" if isinstance(content, Graft) else "ledger"
    with tempfile.TemporaryDirectory() as directory, _explained(name, revision):
        shutil.copyfile(file, Path(directory, FILES[kind]))
        Path(directory, CARD).write_text(hub_card(content, file, name, license), encoding="utf-8")
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        if revision:
            api.create_branch(name, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=directory, revision=revision, commit_message=f"Put a {kind} here with forgetfree"
        )
    return str(done.commit_url)


def pull(repository: str, out: StrPath, revision: str | None = None) -> Path:
    """Put what `push` put into a repository into a new directory, after every check, and return its file's path.

    Args:
        repository: ``OWNER/NAME``.
        out: a directory that does not exist or is empty; it is written whole or not at all.
        revision: a branch, a tag or a commit; default: ``main``.

    Raises:
        HubError: the hub cannot be reached, refuses, or the repository holds no graft and no ledger.
        GraftError, LedgerError: the file is damaged.
    """
    file = fetch(repository, revision)
    with new_directory(Path(out)) as directory:
        for each in (file, file.with_name(CARD)):
            if each.is_file():
                shutil.copyfile(each, directory / each.name)
        _load(directory / file.name)
    return Path(out) / file.name


def fetch(repository: str, revision: str | None = None) -> Path:
    """Return the path of a repository's graft or ledger in the hub's cache, after every check.

    Raises:
        HubError: see `pull`.
        GraftError, LedgerError: the file is damaged.
    """
    from huggingface_hub import snapshot_download

    name = repository_of(repository)
    with _explained(name, revision):
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=[*FILES.values(), CARD]))
    files = [directory / name for name in FILES.values() if (directory / name).is_file()]
    if len(files) != 1:
        raise HubError(
            f"{name} holds {'both' if files else 'neither'} a {' and a ' if files else ' nor a '.join(FILES.values())}. Give a "
            "repository that `forgetfree push` made."
        )
    _load(files[0])
    return files[0]


def repository_of(name: str) -> str:
    """Return ``OWNER/NAME``, which may stand after ``hf://``.

    Raises:
        UsageError: it is no such name.
    """
    plain = name.removeprefix(SCHEME)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", plain, flags=re.ASCII):
        raise UsageError(f"A repository on the hub is named OWNER/NAME, got {brief(name)}. Give one so.")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(plain)
    except HFValidationError as error:
        raise UsageError(
            f"{brief(name)} is no name of a repository on the hub: {first_line(error)}. Give OWNER/NAME."
        ) from error
    return plain


def _file_of(source: Path) -> Path:
    """Return the file of a graft or a ledger: itself, or the one in a directory."""
    if not source.exists():
        raise UsageError(
            f"There is no {str(source)!r}. Give a graft.safetensors, a ledger.safetensors or what a run wrote."
        )
    check_whole(source)
    is_graft = any(source.glob("*/seed-*/graft.safetensors"))
    if source.is_dir() and not is_graft and any(source.glob("*/seed-*/ledger.safetensors")):
        return saved_file(source)
    file = find_graft(source)
    check_own(file)
    return file


def _load(file: Path) -> Graft | Ledger:
    """Return what a file holds, after every check."""
    from safetensors import SafetensorError

    try:
        format = OpenFile(file).metadata.get("format")
    except (SafetensorError, OSError) as error:
        raise HubError(
            f"{file} cannot be read: {first_line(error)}. Restore it from a copy, or make it again."
        ) from error
    if format == GRAFT_FORMAT:
        return Graft.load(file)
    if format == LEDGER_FORMAT:
        return Ledger.load(file)
    raise UsageError(
        f"{file} is neither a graft nor a ledger of forgetfree: expected the format {GRAFT_FORMAT!r} or {LEDGER_FORMAT!r}, got "
        f"{brief(format or 'none')}. For a whole model, use push_to_hub of transformers."
    )


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Say what the hub's client met, with the remedy."""
    from huggingface_hub import errors

    login = "Log in by `hf auth login`, or set HF_TOKEN to a token"
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name} has no revision {revision!r} on the hub. Give a branch, a tag or a commit of it."
        ) from error
    except errors.GatedRepoError as error:
        raise HubError(f"{name} asks for its terms to be accepted first: on its page on the hub. {login}.") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"There is no repository {name} on the hub, or you may not see it. Check the name. {login}, if it is private."
        ) from error
    except errors.LocalTokenNotFoundError as error:
        raise HubError(f"The hub does not know who you are. {login} that may write to {name}.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            who = "does not know who you are" if status == 401 else f"does not let you write to {name}"
            raise HubError(f"The hub {who} ({first_line(error)}). {login} that may.") from error
        raise HubError(f"The hub refuses ({first_line(error)}). Try again later, or check {name}.") from error
    except Exception as error:  # of whichever HTTP library the client uses
        offline = isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError)
        remedy = "HF_HUB_OFFLINE=0 lets its client try." if offline else "Check the network, the proxy and HF_ENDPOINT."
        raise HubError(f"The hub cannot be reached for {name}: {first_line(error).rstrip('.')}. {remedy}") from error
