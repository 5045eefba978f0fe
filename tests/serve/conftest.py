"""Finished runs on tiny models, made once per session."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from forgetfree import cli

FEW = ("--shots", "4", "--steps", "3", "--set", "learning_rate=0.3")
GRAFTING = ("--sparsity", "0.01", "--set", "mask_steps=1")
MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def finished_run(
    model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeRun:
    """Return a cached run by ``forgetfree run``: ``finished_run(kind, *strategies, stream=…, more=…)``."""
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str, *strategies: str, stream: str = "qnli,ag_news,sst2", more: tuple[str, ...] = ()) -> Path:
        key = (kind, strategies, stream, more)
        if key not in made:
            out = tmp_path_factory.mktemp("run") / kind
            flags = [word for name in strategies for word in ("--strategy", name)]
            places = ["--data", str(data_directory), "--model", str(model_directory(kind)), "--out", str(out)]
            own = GRAFTING if "grafting-continual" in strategies else ()
            with redirect_stdout(io.StringIO()):  # tests do not need the run's output
                assert cli.main(["run", stream, *places, *flags, *FEW, *own, *more]) == 0
            made[key] = out
        return made[key]

    return make
