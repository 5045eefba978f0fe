"""``forgetfree push``: put a graft or a ledger on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from forgetfree.cli.usage import Debug
from forgetfree.display import escaped
from forgetfree.jobs.running.environment import quiet_libraries


def command(
    source: Annotated[
        Path, Parameter(name="FILE|DIR", help="a graft or a ledger, or what forgetfree run or graft wrote")
    ],
    repository: Annotated[str, Parameter(name="OWNER/NAME", help="the repository; it is made if there is none")],
    /,
    *,
    private: Annotated[bool, Parameter(help="make the repository so that only its owner sees it")] = False,
    revision: Annotated[str | None, Parameter(metavar="BRANCH", help="(default: main)")] = None,
    license: Annotated[
        str | None, Parameter(metavar="ID", help="the licence that the card names, such as apache-2.0 (default: none)")
    ] = None,
    debug: Debug = False,
) -> None:
    """Upload the file and a card."""
    quiet_libraries()
    from forgetfree.serve.hub import push

    print(escaped(push(source, repository, private=private, revision=revision, license=license)))
