"""Judge the claims of claims.md: ``python -m forgetfree.benchmarks.claims NAME RUN...``.

The thresholds stand in claims.md alone; here stands how each quantity is measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forgetfree.display import NULL
from forgetfree.errors import ReportError
from forgetfree.results.calibration import reliability
from forgetfree.results.comparison import StrategyRuns, merge
from forgetfree.results.evidence import Answers, Evidence, Interval
from forgetfree.results.report.page import Page, Table, render_page
from forgetfree.results.stored import load_run_results
from forgetfree.results.unit_folder import read_unit_files

CLAIMS = Path(__file__).resolve().with_name("claims.md")
#: Draws of rows and seeds for calibration, which is slower to compute than accuracy.
_CALIBRATION_DRAWS = 200


@dataclass(frozen=True)
class Claim:
    """A line of claims.md.

    Attributes:
        name: the claim in words.
        compared: ``>``, ``<`` or ``=``.
        threshold: as a fraction: 98 % and 98 points are 0.98.
    """

    name: str
    compared: str
    threshold: float

    def verdict(self, found: Interval) -> str:
        """Return ``holds``, ``does not``, or ``undecided`` because the interval holds the threshold."""
        if self.compared == "=":
            return "holds" if found.low == found.high == self.threshold else "does not"
        if not (found.low > self.threshold or found.high < self.threshold):  # nor where one is not a number
            return "undecided"
        return "holds" if (found.low > self.threshold) == (self.compared == ">") else "does not"


def claims(name: str) -> list[Claim]:
    """Return the claims of one table of claims.md.

    Raises:
        ReportError: there is no such table.
    """
    lines = re.findall(r"^\| (.+?) \| .+ \| ([<>=]) (\S+) (?:%|points) \|$", _section(name), re.MULTILINE)
    return [Claim(claim, compared, float(number) / 100) for claim, compared, number in lines]


def set_up(name: str) -> dict[str, str]:
    """Return what claims.md says of the runs that judge the claims of a table: ``shots``, ``steps``, ``seeds`` and so on."""
    (line,) = re.findall(r"^`(stream=.*)`$", _section(name), re.MULTILINE)
    return dict(pair.split("=") for pair in line.split())


def _section(name: str) -> str:
    text = CLAIMS.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(name)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        known = ", ".join(re.findall(r"^## (\S+)$", text, re.MULTILINE))
        raise ReportError(f"{CLAIMS.name} has no claims of {name!r}. It has those of: {known}.")
    return found[1]


class Runs:
    """The runs that judge: their answers on the test rows, and what they cost.

    Args:
        directories: of `forgetfree run`, on the same rows. The task may be given or withheld (``scenario=class``).

    Raises:
        ReportError: as `merge`; or the answers of a run are missing.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        read = [load_run_results(directory) for directory in directories]
        withheld = [result.content.get("scenario", "task") != "task" for result in read]
        # Runs that know the task of a row are not merged with runs that do not.
        self._comparisons = {
            hidden: merge([result for result, its in zip(read, withheld, strict=True) if its == hidden])
            for hidden in sorted(set(withheld))
        }
        comparison = next(iter(self._comparisons.values()))
        self.metrics = dict(zip(comparison.tasks, comparison.metric, strict=True))
        entries = [(hidden, entry) for hidden, each in self._comparisons.items() for entry in each.strategies]
        self.entries = {"withheld" if hidden else _role(entry): entry for hidden, entry in entries}
        if len(self.entries) < len(entries):
            labels = ", ".join(entry.label for _, entry in entries)
            raise ReportError(f"Each strategy is judged in one configuration, got {labels}. Leave some runs out.")
        self.answers: dict[str, Answers] = {
            role: {run.seed: read_unit_files(run, comparison.tasks).answers for run in entry.runs}
            for role, entry in self.entries.items()
        }
        self._evidence: dict[tuple[str, ...], Evidence] = {}
        for role, found in self.answers.items():
            if not all(found.values()):
                raise ReportError(f"The answers of {role} are missing. Give directories with predictions.safetensors.")

    def unlike(self, wanted: Mapping[str, str]) -> list[str]:
        """Return what of the set-up is not as it is ``wanted``, for each strategy its seeds."""
        found = []
        for comparison in self._comparisons.values():
            there = {**comparison.settings, "stream": comparison.stream}
            found += [
                f"{key} is {there.get(key)} and not {value}"
                for key, value in wanted.items()
                if key != "seeds" and str(there.get(key)) != value
            ]
        for role, answers in self.answers.items():
            if (seeds := ",".join(map(str, sorted(answers)))) != wanted["seeds"]:
                found.append(f"seeds of {role} are {seeds} and not {wanted['seeds']}")
        return list(dict.fromkeys(found))  # what both kinds of runs have otherwise, once

    def evidence(self, task: str | None = None) -> Evidence:
        """Return the evidence on one task, or on all."""
        chosen = (task,) if task else tuple(self.metrics)
        if chosen not in self._evidence:
            self._evidence[chosen] = Evidence(self.answers, {task: self.metrics[task] for task in chosen})
        return self._evidence[chosen]


def _role(entry: StrategyRuns) -> str:
    run = entry.runs[0]
    return str(run.options.get("composition", "union") if run.strategy == "grafting-continual" else run.strategy)


# ---- what is measured ---------------------------------------------------------------------------------


def changed(role: str, runs: Runs) -> Interval:
    """Return the most that any score changes after its task was learned, over all tasks and seeds."""
    changes = []
    for run in runs.entries[role].runs:
        matrix = run.learning_matrix[1:]  # the first row is that before training
        changes += [np.abs(matrix[task:, task] - matrix[task, task]).max() for task in range(len(matrix))]
    return Interval(max(changes), min(changes), max(changes))


def share(role: str, other: str, runs: Runs, *, task: str | None = None) -> Interval | None:
    """Return the score on a task, or the average of all, divided by that of another strategy."""
    return runs.evidence(task).retention(role, other, 0.0)


def above(role: str, other: str, runs: Runs, *, task: str | None = None) -> Interval | None:
    """Return how far the score on a task, or the average of all, is above that of another strategy."""
    return runs.evidence(task).difference(role, other)


def final_union(runs: Runs) -> Interval | None:
    """Return the average under the one final union minus that under the union of each task; the range over seeds.

    ``None`` where a run did not ask for it (``final_union``).
    """
    those = runs.entries["union"].runs
    unions = [run.union.accuracy for run in those if run.union]
    if len(unions) < len(those):
        return None
    own = [run.learning_matrix[-1] for run in those]
    return _range(float(np.mean(a) - np.mean(b)) for a, b in zip(unions, own, strict=True))


def calibration(runs: Runs) -> Interval:
    """Return the mean ECE of ``union`` minus the fine-tuned one, over rows and seeds drawn together."""
    ours, theirs = runs.answers["union"], runs.answers["fine-tune"]
    seeds = sorted(set(ours) & set(theirs))
    random = np.random.default_rng(len(seeds))

    def gap(task: str, chosen: Sequence[int], rows: Any) -> float:
        return float(
            np.mean(
                [
                    reliability(a.logits[rows], a.labels[rows]).ece - reliability(b.logits[rows], b.labels[rows]).ece
                    for a, b in ((ours[seed][task], theirs[seed][task]) for seed in chosen)
                ]
            )
        )

    everything = slice(None)
    drawn = []
    for _ in range(_CALIBRATION_DRAWS):
        chosen = random.choice(seeds, len(seeds)).tolist()
        sizes = {task: len(ours[seeds[0]][task].labels) for task in runs.metrics}
        drawn.append(np.mean([gap(task, chosen, random.integers(n, size=n)) for task, n in sizes.items()]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(float(np.mean([gap(task, seeds, everything) for task in runs.metrics])), float(low), float(high))


def cost(runs: Runs) -> Interval:
    """Return the seconds of localizing and training a region, divided by those of fine-tuning; the range over seeds.

    A fine-tuned model that runs share is made by one of them: the others took no time for it.
    """
    fine_tuning: dict[int, float] = {}
    for entry in runs.entries.values():
        for run in entry.runs:
            fine_tuning[run.seed] = max(fine_tuning.get(run.seed, 0.0), run.seconds["fine_tune"])
    return _range(
        (run.seconds["localize"] + run.seconds["train"]) / fine_tuning[run.seed] for run in runs.entries["union"].runs
    )


def told_apart(runs: Runs) -> Interval:
    """Return the share of rows whose answer is a label of their own task, the mean of the tasks; the range over seeds."""
    return _range(
        np.mean([np.isin(each.logits.argmax(axis=1), np.unique(each.labels)).mean() for each in of_task.values()])
        for of_task in runs.answers["withheld"].values()
    )


def _range(values: Any) -> Interval:
    found = list(values)
    return Interval(float(np.median(found)), min(found), max(found))


_TASKS = {"QNLI": "qnli", "AG News": "ag_news", "SST-2": "sst2"}
#: How the quantity of each claim is measured.
MEASURED: dict[str, Callable[[Runs], Interval | None]] = {
    "nothing is forgotten": partial(changed, "union"),
    "nothing is forgotten, alone": partial(changed, "alone"),
    "nothing is forgotten, chosen": partial(changed, "auto"),
    **{f"{title} is kept": partial(share, "union", "fine-tune", task=task) for title, task in _TASKS.items()},
    **{f"{title} is kept, alone": partial(share, "alone", "fine-tune", task=task) for title, task in _TASKS.items()},
    "the average is kept": partial(share, "union", "fine-tune"),
    "the average is kept, alone": partial(share, "alone", "fine-tune"),
    "the average is kept, chosen": partial(share, "auto", "fine-tune"),
    "grafting is near multi-task training": partial(share, "union", "joint"),
    "grafting beats naive fine-tuning": partial(above, "union", "continual-ft"),
    "the union costs the last task": partial(above, "alone", "union", task="sst2"),
    "the union costs something": partial(above, "alone", "union"),
    "validation rows choose well": partial(above, "auto", "union"),
    "the final union mixes": final_union,
    "grafting is better calibrated": calibration,
    "grafting is cheap": cost,
    "a withheld task costs little": partial(above, "withheld", "alone"),
    "tasks are told apart": told_apart,
}


def judged(name: str, directories: Sequence[str]) -> Page:
    """Return the claims of a table with what the runs say of each, and with a note where these are other runs.

    Raises:
        ReportError: there is no such table, or the runs cannot be judged together.
    """
    runs, rows = Runs(directories), []
    for claim in claims(name):
        try:
            found = MEASURED[claim.name](runs)
        except KeyError as missing:  # a strategy that none of the runs has
            measured, verdict = f"no {missing.args[0]} among the runs", NULL
        else:
            measured, verdict = (NULL, NULL) if found is None else (_shown(found), claim.verdict(found))
        rows.append((claim.name, f"{claim.compared} {100 * claim.threshold:g}", measured, verdict))
    table = Table(
        f"Claims of {name}, judged (in % or percentage points, as claims.md says)",
        ("claim", "threshold", "measured", "verdict"),
        tuple(rows),
    )
    unlike = runs.unlike(set_up(name))
    notes = (f"These are not the runs that the claims are about: {'; '.join(unlike)}.",) if unlike else ()
    return Page(f"{name}: claims", notes, (table,))


def _shown(found: Interval) -> str:
    return f"{100 * found.value:.2f} [{100 * found.low:.2f}, {100 * found.high:.2f}]"


def main() -> None:
    """Print the verdicts as markdown."""
    parser = argparse.ArgumentParser(prog="python -m forgetfree.benchmarks.claims", description=__doc__)
    parser.add_argument("name", help="a table of claims.md, such as main-job")
    parser.add_argument("runs", nargs="+", help="run directories")
    arguments = parser.parse_args()
    try:
        page = judged(arguments.name, arguments.runs)
    except ReportError as error:
        parser.exit(2, f"forgetfree: error: {error}\n")
    print(render_page(page, "markdown"))


if __name__ == "__main__":
    main()
