"""``forgetfree pull``: get a graft or a ledger from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from forgetfree.cli.hub import go_offline_if_cut_off
from forgetfree.cli.usage import Debug
from forgetfree.display import escaped
from forgetfree.jobs.running.environment import quiet_libraries


def command(
    repository: Annotated[str, Parameter(name="OWNER/NAME", help="the repository")],
    /,
    *,
    out: Annotated[Path, Parameter(metavar="DIR", help="where to put it; must be new or empty")],
    revision: Annotated[
        str | None, Parameter(metavar="NAME", help="a branch, a tag or a commit (default: main)")
    ] = None,
    debug: Debug = False,
) -> None:
    """Download the file and its card, and check the file."""
    quiet_libraries()
    from forgetfree.serve.apply import check_free
    from forgetfree.serve.hub import pull, repository_of

    check_free(out)
    repository_of(repository)
    go_offline_if_cut_off()
    file = pull(repository, out, revision)
    print(escaped(f"{file}: sound, {file.stat().st_size:,} bytes."))
