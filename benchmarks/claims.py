"""Judge the claims of claims.md: ``python -m benchmarks.claims [--figures] [NAME [RUN ...]]``.

The thresholds are defined in claims.md, the measurements of quantities here.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forgetfree.display import NULL
from forgetfree.errors import RunError
from forgetfree.options import typed
from forgetfree.results.evidence import ALPHA, Evidence, Interval, RowScore, interval
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import Page, Table, render_page
from forgetfree.results.runs import UNION, Run, read_run
from forgetfree.results.table import SCORE, Results

CLAIMS = Path(__file__).resolve().with_name("claims.md")
#: The published runs.
RESULTS = CLAIMS.with_name("results")


@dataclass(frozen=True)
class Claim:
    """A line of claims.md.

    Attributes:
        name: the claim in words.
        compared: ``>``, ``<`` or ``=``.
        threshold: the threshold as a fraction: 98 % and 98 points are 0.98.
    """

    name: str
    compared: str
    threshold: float

    def verdict(self, found: Interval) -> str:
        """Return ``holds``, ``does not``, or ``undecided`` because the interval contains the threshold."""
        if math.isnan(found.low):
            return "undecided"
        if self.compared == "=":
            return "holds" if found.low == found.high == self.threshold else "does not"
        if found.low <= self.threshold <= found.high:
            return "undecided"
        return "holds" if (found.low > self.threshold) == (self.compared == ">") else "does not"


def claims(name: str) -> list[Claim]:
    """Return the claims of one table of claims.md.

    Raises:
        RunError: there is no such table.
    """
    lines = re.findall(r"^\| (.+?) \| .+ \| ([<>=]) (\S+) (?:%|points) \|$", _section(name), re.MULTILINE)
    return [Claim(claim, compared, float(number) / 100) for claim, compared, number in lines]


def tables() -> list[str]:
    """Return the names of the tables of claims.md with published runs."""
    names = re.findall(r"^## (\S+)$", CLAIMS.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for name in names if "files" in set_up(name)]


def published(name: str) -> list[str]:
    """Return the files with the runs that judge the claims of a table.

    Raises:
        RunError: there are none yet.
    """
    files = set_up(name).get("files")
    if files is None:
        raise RunError(f"No runs of {name} are published yet. Name run directories or CSV files after it.")
    return [str(RESULTS / f"{file}.csv") for file in files.split(",")]


def set_up(name: str) -> dict[str, str]:
    """Return the settings of the runs that judge a table, from claims.md: ``shots``, ``seeds``, ``files`` and so on."""
    (line,) = re.findall(r"^`(stream=.*)`$", _section(name), re.MULTILINE)
    return dict(pair.split("=") for pair in line.split())


def _section(name: str) -> str:
    text = CLAIMS.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(name)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        known = ", ".join(re.findall(r"^## (\S+)$", text, re.MULTILINE))
        raise RunError(f"{CLAIMS.name} has no claims of {name!r}. It has those of: {known}.")
    return found[1]


class Runs:
    """The runs that judge claims: scores, answers on the test rows if they are kept, and costs.

    Args:
        paths: directories or CSV files of `forgetfree run`, on the same rows. The task may be given or withheld
            (``scenario=class``).
        seeds: the seeds of the runs that are used; default: all.

    Raises:
        RunError: as `Results`.
    """

    def __init__(self, paths: Sequence[str], seeds: Collection[str] | None = None) -> None:
        read = [read_run(Path(path)) for path in paths]
        if seeds is not None:
            read = [replace(each, runs=tuple(run for run in each.runs if str(run.seed) in seeds)) for each in read]
        # Runs that know the task of a row are not comparable with runs that do not.
        self._results = {
            hidden: Results([each for each in read if (each.about.scenario != "task") == hidden])
            for hidden in sorted({each.about.scenario != "task" for each in read})
        }
        self.tasks = next(iter(self._results.values())).tasks
        self.test_rows = next(iter(self._results.values())).test_rows
        self.strategies: dict[str, tuple[Results, str]] = {}
        scores: dict[str | None, dict[str, Any]] = {None: {}, "ece": {}}
        for hidden, results in self._results.items():
            at_end = {metric: results.evidence(metric).scores for metric in scores}
            for label, units in results.units.items():
                role = "withheld" if hidden else _role(next(iter(units.values())))
                if role in self.strategies:
                    raise RunError(
                        f"Each strategy is judged in one configuration, got {', '.join(results.strategies)}. Leave some runs "
                        "out."
                    )
                self.strategies[role] = results, label
                for metric, of_roles in scores.items():
                    of_roles[role] = at_end[metric][label]
        self.evidence, self.calibration = (Evidence(of_roles) for of_roles in scores.values())

    def units(self, role: str) -> Mapping[int, Run]:
        """Return the runs of a strategy, with facts besides their scores, by seed."""
        results, label = self.strategies[role]
        return results.units[label]

    def matrices(self, role: str, metric: str = SCORE) -> Floats:
        """Return the values of a strategy by a metric, shape (S, T+1, T)."""
        results, label = self.strategies[role]
        return results.matrices(label, metric)

    def unlike(self, wanted: Mapping[str, str]) -> list[str]:
        """Return the differences from the ``wanted`` set-up, including the seeds of each strategy."""
        found = []
        for results in self._results.values():
            there = {**results.settings, "stream": results.stream}
            found += [
                f"{key} is {typed(there.get(key))} and not {value}"
                for key, value in wanted.items()
                if key not in ("seeds", "files") and typed(there.get(key)) != value
            ]
        for role in self.strategies:
            if (seeds := ",".join(map(str, self.units(role)))) != wanted["seeds"]:
                found.append(f"seeds of {role} are {seeds} and not {wanted['seeds']}")
        return list(dict.fromkeys(found))  # a difference of both kinds of runs, once


def _runs(name: str, paths: Sequence[str]) -> Runs:
    """Return the named runs, or else the published runs with the seeds of a table of claims."""
    return Runs(paths) if paths else Runs(published(name), set_up(name)["seeds"].split(","))


def _role(run: Run) -> str:
    if run.strategy != "grafting-continual":
        return run.strategy
    return "bare" if run.facts.options.get("region_steps") == 0 else str(run.facts.options.get("composition", "union"))


# ---- measurements -------------------------------------------------------------------------------------


def changed(role: str, runs: Runs) -> Interval:
    """Return the most that any score changes after its task was learned, over all tasks and seeds; NaN if one is missing.

    Scores are compared, not answers.
    """
    changes = []
    for matrix in runs.matrices(role)[:, 1:]:  # the first row is before training
        changes += [np.abs(matrix[task:, task] - matrix[task, task]).max() for task in range(len(matrix))]
    most = float(np.max(changes))  # Python's max loses NaN
    return Interval(most, float(np.min(changes)), most)


def share(role: str, other: str, runs: Runs, *, task: str | None = None) -> Interval | None:
    """Return the score on a task, or the average of all, divided by the score of another strategy."""
    return runs.evidence.retention(role, other, 0.0, task)


def above(role: str, other: str, runs: Runs, *, task: str | None = None) -> Interval | None:
    """Return the score on a task, or the average of all, minus the score of another strategy."""
    return runs.evidence.difference(role, other, task)


def final_union(runs: Runs, *, task: str | None = None) -> Interval | None:
    """Return the score under the one final union minus that under the union of each task, on a task or the average of all.

    ``None`` if a run lacks it (option ``final_union``).
    """
    unions, owned = (runs.matrices("union", metric)[:, -1] for metric in (f"{UNION}accuracy", SCORE))
    if np.isnan(unions).all(axis=1).any():
        return None
    # Answers under the final union are not kept: rows count as independent.
    scores: dict[str, dict[int, dict[str, RowScore]]] = {"union": {}, "own": {}}
    results, _ = runs.strategies["union"]
    for name, values in (("union", unions), ("own", owned)):
        for seed, of_tasks in zip(runs.units("union"), values, strict=True):
            scores[name][seed] = {
                each: RowScore.of_value(float(value), metric, runs.test_rows.get(each, 0))
                for each, metric, value in zip(runs.tasks, results.metric, of_tasks, strict=True)
                if task in (None, each)
            }
    return Evidence(scores).difference("union", "own")


def calibration(runs: Runs, role: str = "union") -> Interval | None:
    """Return the mean ECE of ``union``, or of another role, minus the ECE of fine-tuning."""
    return runs.calibration.difference(role, "fine-tune")


def cost(*phases: str, role: str = "union", whole: bool = False) -> Callable[[Runs], Interval | None]:
    """Return a function for the seconds of phases of ``union``, or of another role, divided by those of fine-tuning.

    One run trains a shared fine-tuned model; the others need no time for it. ``whole`` adds its time to each run that localizes
    in it. The function returns ``None`` if no run has the time of fine-tuning.
    """

    def measured(runs: Runs) -> Interval | None:
        tuned, shares = runs.units("fine-tune"), []
        for seed, run in runs.units(role).items():
            if seed not in tuned or not (of_tuned := _fine_tuning(runs, tuned[seed])):
                return None
            seconds = sum(run.facts.seconds[phase] or 0.0 for phase in phases)
            if whole and run.facts.seconds["localize"]:
                seconds += _fine_tuning(runs, run)
            shares.append(seconds / of_tuned)
        return interval(shares)

    return measured


def _fine_tuning(runs: Runs, run: Run) -> float:
    """Return the seconds of the fine-tuned models of a run: those of the run that trained the models which it shares."""

    def shared(each: Run) -> tuple[Any, ...]:
        return each.seed, each.facts.options.get("steps"), each.facts.options.get("learning_rate")

    every = [each for role in runs.strategies for each in runs.units(role).values()]
    # Only older files have the second name.
    return max(
        sum(each.facts.seconds.get(name) or 0.0 for name in ("fine_tune", "fine_tune_elsewhere"))
        for each in every
        if shared(each) == shared(run)
    )


def told_apart(runs: Runs) -> Interval | None:
    """Return the share of rows for which a label of their own task is predicted, mean over tasks.

    ``None`` if the answers are not kept, as in a CSV file.
    """
    scores: dict[int, dict[str, RowScore]] = {}
    for seed, run in runs.units("withheld").items():
        if not run.probabilities:
            return None
        for task, each in run.probabilities.items():
            right = np.isin(each.logits.argmax(axis=1), np.unique(each.labels))
            scores.setdefault(seed, {})[task] = RowScore.of_rows(right, "accuracy")
    return Evidence({"withheld": scores}).average("withheld")


_TASKS = {"QNLI": "qnli", "AG News": "ag_news", "SST-2": "sst2"}
#: The function that measures the quantity of each claim.
MEASURED: dict[str, Callable[[Runs], Interval | None]] = {
    "nothing is forgotten": partial(changed, "union"),
    "nothing is forgotten, alone": partial(changed, "alone"),
    **{f"{title} is kept": partial(share, "union", "fine-tune", task=task) for title, task in _TASKS.items()},
    **{f"{title} is kept, alone": partial(share, "alone", "fine-tune", task=task) for title, task in _TASKS.items()},
    **{f"{title} is kept, bare": partial(share, "bare", "fine-tune", task=task) for title, task in _TASKS.items()},
    "MNLI is kept, bare": partial(share, "bare", "fine-tune", task="mnli"),
    "the average is kept": partial(share, "union", "fine-tune"),
    "the average is kept, alone": partial(share, "alone", "fine-tune"),
    "grafting is near multi-task training": partial(share, "union", "joint"),
    "grafting beats naive fine-tuning": partial(above, "union", "continual-ft"),
    "grafts alone beat naive fine-tuning": partial(above, "alone", "continual-ft"),
    "the union costs the last task": partial(above, "alone", "union", task="sst2"),
    "the union costs something": partial(above, "alone", "union"),
    "the final union mixes": final_union,
    "grafting is better calibrated": calibration,
    "grafting is cheap": cost("localize", "train"),
    "localizing is cheap": cost("localize"),
    "grafting is no worse than LoRA": partial(above, "union", "lora"),
    "the union costs little": partial(above, "alone", "union"),
    "grafting is above replay": partial(above, "union", "replay"),
    "grafting is above PackNet": partial(above, "union", "packnet"),
    "grafting is near joint training": partial(share, "union", "joint"),
    "a larger LoRA gains little": partial(above, "lora", "union"),
    "nothing is forgotten, warm": partial(changed, "warm"),
    "a warm start is above the union": partial(above, "warm", "union"),
    "a warm start is no worse than the union": partial(above, "warm", "union"),
    "a warm start is above fine-tuning": partial(above, "warm", "fine-tune"),
    "a warm start is above independent grafts": partial(above, "warm", "alone"),
    "a warm start costs nothing": partial(above, "warm", "alone"),
    "a warm start is above naive training": partial(above, "warm", "continual-ft"),
    "a warm start is above LoRA with one": partial(above, "warm", "lora-warm"),
    "grafts alone are above LoRA of rank 1": partial(above, "alone", "lora-1"),
    "grafts alone are near LoRA of rank 8": partial(above, "alone", "lora-8"),
    "grafts alone are above PackNet": partial(above, "alone", "packnet"),
    "grafts alone are above replay": partial(above, "alone", "replay"),
    "grafts alone learn the newest task": partial(above, "alone", "continual-ft", task="sst2"),
    "the most moved entries are better than random ones": partial(above, "alone", "random"),
    "the most moved entries are better than those of SNIP": partial(above, "alone", "snip"),
    "the most moved entries are no worse than a short search": partial(above, "alone", "mask"),
    "grafts alone are above LoRA with as many bytes": partial(above, "alone", "lora-2-qv"),
    "800 updates of fine-tuning gain nothing": partial(above, "fine-tune", "fine-tune-400"),
    "joint training has converged": partial(above, "joint-twice", "joint"),
    "a withheld task costs little": partial(above, "withheld", "alone"),
    "tasks are told apart": told_apart,
}


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several claims that are judged together, adjusted by Holm's method (1979).

    Among the claims with an adjusted p-value below 0.05, the probability of one or more wrong ones is at most 5 %.
    """
    adjusted, most = [math.nan] * len(p_values), 0.0
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, i) in enumerate(order):
        most = max(most, min(1.0, (len(order) - rank) * p))
        adjusted[i] = most
    return adjusted


def judged(name: str, paths: Sequence[str] = ()) -> Page:
    """Return the claims of a table with measurements and verdicts, and a note if the claims are about other runs.

    A second verdict judges all claims together, with p-values adjusted by `holm`. Claims of equality have no p-value. Claims
    with the same measurement and threshold, such as for the first task's graft in a union and alone, count once.

    Args:
        name: the name of the table.
        paths: paths of runs; default: the `published` ones.

    Raises:
        RunError: there is no such table, or the runs cannot be judged together.
    """
    runs, found = _runs(name, paths), list[tuple[Claim, Interval | None, str]]()
    for claim in claims(name):
        try:
            measured = MEASURED[claim.name](runs)
        except KeyError as missing:  # a strategy that none of the runs has
            found.append((claim, None, f"no {missing.args[0]} among the runs"))
        else:
            found.append((claim, measured, NULL if measured is None else _shown(measured)))
    counted = [each is not None and claim.compared != "=" for claim, each, _ in found]
    p_values = {
        (claim.compared, claim.threshold, each): each.p(claim.threshold)
        for (claim, each, _), counts in zip(found, counted, strict=True)
        if each and counts
    }
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    rows = []
    for (claim, each, told), counts in zip(found, counted, strict=True):
        verdict = claim.verdict(each) if each else NULL
        p = adjusted.get((claim.compared, claim.threshold, each), math.nan) if each else math.nan
        together = verdict if not counts or p < ALPHA else "undecided"
        rows.append((claim.name, f"{claim.compared} {100 * claim.threshold:g}", told, verdict, together))
    table = Table(
        f"Claims of {name}, judged (in % or percentage points, as claims.md says)",
        ("claim", "threshold", "measured", "verdict", "together (Holm)"),
        tuple(rows),
    )
    unlike = runs.unlike(set_up(name)) if paths else []
    notes = (f"These are not the runs that the claims are about: {'; '.join(unlike)}.",) if unlike else ()
    return Page(f"{name}: claims", notes, (table,))


def figures(name: str, paths: Sequence[str] = ()) -> Table:
    """Return further measurements of the runs that judge a table, for each strategy but fine-tuning.

    Args:
        name: the name of the table.
        paths: paths of runs; default: the `published` ones.

    Raises:
        RunError: as `judged`.
    """
    runs = _runs(name, paths)
    roles = [role for role in runs.strategies if role != "fine-tune"]
    scored: list[tuple[str, str | None]] = [*((task, task) for task in runs.tasks), ("average", None)]
    quantities: dict[str, Callable[[str], Interval | None]] = {
        f"share of fine-tune, {title}": partial(share, other="fine-tune", runs=runs, task=task)
        for title, task in scored
    }
    quantities |= {
        f"minus {other}, average": partial(_beside, runs, other, None) for other in ("union", "lora", "continual-ft")
    }
    quantities["share of joint, average"] = lambda role: None if role == "joint" else share(role, "joint", runs)
    quantities[f"minus union, {runs.tasks[-1]}"] = partial(_beside, runs, "union", runs.tasks[-1])
    quantities |= {
        "forgetting": lambda role: Results.forgetting(*runs.strategies[role]),
        **{f"final union, {title}": partial(_final_union, runs, task) for title, task in (scored[0], scored[-1])},
        "ECE minus fine-tune": lambda role: calibration(runs, role),
        "seconds of localizing, share of fine-tune": lambda role: cost("localize", role=role)(runs),
        "seconds of all training, share of fine-tune": lambda role: cost("localize", "train", role=role, whole=True)(
            runs
        ),
    }
    rows = []
    for quantity, measure in quantities.items():
        cells = []
        for role in roles:
            try:
                found = measure(role)
            except KeyError:  # a strategy that none of the runs has
                found = None
            cells.append(NULL if found is None else found.text)
        if {*cells} != {NULL}:
            rows.append((quantity, *cells))
    return Table(f"Figures of {name} (in %, differences in percentage points)", ("", *roles), tuple(rows))


def _beside(runs: Runs, other: str, task: str | None, role: str) -> Interval | None:
    return None if role == other else above(role, other, runs, task=task)


def _final_union(runs: Runs, task: str | None, role: str) -> Interval | None:
    return final_union(runs, task=task) if role == "union" else None


def _shown(found: Interval) -> str:
    value = f"{100 * found.value:.2f}"
    return value if math.isnan(found.low) else f"{value} [{100 * found.low:.2f}, {100 * found.high:.2f}]"


def main() -> None:
    """Print the verdicts as markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument(
        "name", nargs="?", help="a table of claims.md, such as main-job; default: all whose runs are published"
    )
    parser.add_argument("runs", nargs="*", help="run directories or CSV files; default: those that are published")
    parser.add_argument("--figures", action="store_true", help="also what the runs say beside the claims")
    arguments = parser.parse_args()
    try:
        names = [arguments.name] if arguments.name else tables()
        pages = [judged(name, arguments.runs) for name in names]
        if arguments.figures:
            more = [figures(name, arguments.runs) for name in names]
            pages = [replace(page, tables=(*page.tables, each)) for page, each in zip(pages, more, strict=True)]
    except RunError as error:
        parser.exit(2, f"forgetfree: error: {error}\n")
    print("\n".join(render_page(page, "markdown") for page in pages))


if __name__ == "__main__":
    main()
