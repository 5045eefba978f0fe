"""One small run and one graft, and the files of them that are read alone."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from forgetfree import cli
from forgetfree.results.runs import read_run, to_csv
from forgetfree.results.scores import SCORES_FILE, read_scores, write_scores

TASKS = ("qnli", "ag_news")
STRATEGIES = ("grafting-continual", "packnet", "bitfit", "fine-tune")


@dataclass
class Samples:
    """What the commands wrote.

    Attributes:
        root: a folder for each command.
        resume: the arguments that go on with the run, but for its directory.
    """

    root: Path
    resume: list[str]


def make_samples(root: Path, data: Path, model: Path) -> Samples:
    """Run every command that writes what is read back."""
    common = ["--model", str(model), "--shots", "2", "--set", "mask_steps=1"]
    shutil.copytree(data, root / "data")
    of_data = ["--data", str(root / "data")]
    strategies = [word for name in STRATEGIES for word in ("--strategy", name)]
    one = ["--steps", "1", "--sparsity", "0.01"]
    commands = {
        "run": [",".join(TASKS), *common, *of_data, *one, *strategies],
        "graft": ["sst2", *common, *of_data, *one],
    }
    for name, arguments in commands.items():
        assert cli.main([name, *arguments, "--out", str(root / name)]) == 0
    run = read_run(root / "run")
    (root / "run.csv").write_text(to_csv(run), encoding="utf-8")
    write_scores(root / "scores.csv", read_scores(root / "run" / STRATEGIES[0] / "seed-0" / SCORES_FILE)[:12])
    resume = ["run", *commands["run"], "--resume", "--out"]
    return Samples(root, resume)
