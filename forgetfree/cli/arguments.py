"""Arguments that several commands share, and the predictor of commands that use a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from forgetfree.cli.hub import reach_hub
from forgetfree.display import tell
from forgetfree.errors import UsageError
from forgetfree.jobs.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.serve.inference import Predictor
    from forgetfree.serve.source import Source

#: A flag of every command.
Debug = Annotated[bool, Parameter(name="--debug", help="Show tracebacks.", group=Group("Help", sort_key=10**6))]
#: A flag of commands with output for programs.
AsJson = Annotated[bool, Parameter(name="--json", help="print JSON and nothing else on stdout")]


def check_there(_: Any, path: Path | None) -> None:
    """Raise ``UsageError`` if a file or directory that the command line names does not exist."""
    if path is not None and not os.path.exists(path):  # a Path raises an error if a name is too long
        raise UsageError(f"{path} does not exist. Check the name and the current directory.")


Run = Annotated[
    Path,
    Parameter(
        name="DIR",
        validator=check_there,
        help="directory that forgetfree run wrote, or a ledger file together with --model",
    ),
]
Seed = Annotated[int | None, Parameter(metavar="S", help="seed of the run to use (default: the first)")]
Strategy = Annotated[
    str | None,
    Parameter(
        metavar="NAME", help="strategy of the run to use (default: grafting-continual, else the first with a ledger)"
    ),
]
BaseModel = Annotated[
    str | None, Parameter(metavar="NAME|DIR", help="base model, for a ledger file or if the run's model has moved")
]
Device = Annotated[
    str, Parameter(metavar="NAME", help="device for predictions: auto (a CUDA GPU, else the CPU), cpu, cuda:1, mps, …")
]
Deterministic = Annotated[
    bool,
    Parameter(
        help="return the same bits for a text, whatever other texts are in the batch; slower (default: as in the run)"
    ),
]


def predictor_of(
    run: Path, seed: int | None, strategy: str | None, model: str | None, device: str, deterministic: bool = False
) -> tuple[Predictor, Source]:
    """Return the predictor and the source that it is loaded from; print the source, if there are several to choose from."""
    quiet_libraries()
    from forgetfree.device import find_device
    from forgetfree.serve.source import Source

    find_device(device)  # before anything is read

    source = Source.of(run, seed, strategy, model)
    reach_hub(source.model)
    from forgetfree.serve.inference import Predictor

    if run.is_dir() and strategy is None and len({each.parent for each in run.glob("*/seed-*")}) > 1:
        tell(f"Using {source.file}; --strategy and --seed select another.")
    return Predictor.of_source(source, device, deterministic), source
