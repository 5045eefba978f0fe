"""One small sound file of every kind that forgetfree reads back, as its commands write them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from forgetfree.results.stored import load_graft_results, load_run_results, to_csv

from forgetfree import cli, registry
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import Stream, load_stream
from forgetfree.models.state import StateStore
from forgetfree.results.scores import write_scores

TASKS = ("qnli", "ag_news")
STRATEGIES = (
    *("grafting-continual", "packnet", "wsn", "bitfit", "graft-retrain"),
    *("lora", "o-lora", "fine-tune", "continual-ft"),
)


@dataclass
class Samples:
    """What the commands wrote.

    Attributes:
        root: a folder for each command.
        resume: the arguments that go on with the run, but for its directory.
        stream: that of the run, on the run's model.
    """

    root: Path
    resume: list[str]
    stream: Stream
    made: dict[str, ContinualStrategy] = field(default_factory=dict)

    def strategy(self, name: str) -> ContinualStrategy:
        """A strategy on the stream, the same at every call."""
        if name not in self.made:
            cls, store = registry.strategy(name), StateStore(self.root / "run" / "fine-tuned")
            self.made[name] = cls(stream=self.stream, options=cls.Options(steps=1), store=store)
        return self.made[name]


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
    for name in ("config", "results"):  # as they are, to compare with
        for job in commands:
            shutil.copy(root / job / f"{name}.json", root / f"{job}-{name}.json")
    run, graft = load_run_results(root / "run"), load_graft_results(root / "graft")
    for name, held in {"run": run, "graft": graft}.items():
        (root / f"{name}.csv").write_text(to_csv(held), encoding="utf-8")
    write_scores(root / "scores.csv", run.scores()[:12])
    resume = ["run", *commands["run"], "--resume", "--out"]
    return Samples(root, resume, load_stream(",".join(TASKS), data=str(data), model=str(model), readout="linear"))
