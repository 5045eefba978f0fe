"""The tables of runs: which numbers stand in which column, how they are written, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from forgetfree.display import NULL, PERCENT, PLAIN
from forgetfree.results.answers import label_scores, shown_rows
from forgetfree.results.evidence import Evidence
from forgetfree.results.metrics import Floats, Reliability, forgetting_per_task, limits_of, reliability, title_of
from forgetfree.results.report.page import WIDE, Table, cell, percent, titled, transposed, with_best
from forgetfree.results.runs import CONSTANT, REFERENCE, UNION, UNTRAINED, LedgerSummary, Run
from forgetfree.results.table import SCORE, Results, mean_of_known

NAIVE = "continual-ft"
#: What answers that are texts have beside their score.
LOSS = "loss"
#: How many characters of a text are shown.
_CHARACTERS = 200
Show = Callable[[float], str]
_SECONDS, _COUNT, _SHARE = "{:,.1f}".format, "{:,.0f}".format, "{:.3f}".format
#: Of each column a number; NaN or none where it is missing.
Numbers = Sequence[float | None] | Floats


def tables_of(results: Results, evidence: Evidence) -> list[Table]:
    """Return all tables of a report in order; those that are made of answers only where these are there."""
    several = any(len(runs) > 1 for runs in results.units.values())
    shares = results.scale == PERCENT and results.sign == 1
    others = [_held_out(results), _costs(results), *(_ledger(results, label) for label in results.strategies)]
    if len(results.tasks) <= WIDE:
        others += [_matrix(results, label) for label in results.strategies]
    return [
        _outcome(results),
        *([_transfer(results)] if len(results.tasks) > 1 else []),  # of one task there is none
        *_calibration(results),
        *_beside(results),
        *([_intervals(results, evidence)] if shares and several else []),
        *(_retention(results, evidence) if shares else ()),
        *_calibration_beside_chance(results),
        *label_tables(results),
        *text_tables(results),
        *(table for table in others if table.rows),
    ]


class Column(NamedTuple):
    """A column of numbers.

    Attributes:
        header: its name.
        show: how they are written.
        better: 1 where more is better, -1 where less is, 0 where neither is.
        legend: under which name `MEANINGS` says what they mean.
    """

    header: str
    show: Show
    better: int = 0
    legend: str = ""


def _table(
    results: Results,
    title: str,
    corner: str,
    columns: Sequence[Column],
    rows: Iterable[tuple[str, Sequence[Numbers]]],
    *,
    of_tasks: bool = False,
    legend: Sequence[str] = (),
) -> Table:
    """Return a table of rows, each with its name and, for each seed, its numbers, one a column.

    Where ``of_tasks``, columns are tasks, which become rows where there are many. ``legend`` has further names of `MEANINGS`.
    """
    cells = [
        (name, *(cell(values, column.show) for column, *values in zip(columns, *seeds, strict=True)))
        for name, seeds in rows
    ]
    names = [*dict.fromkeys(column.legend for column in columns if column.legend), *legend]
    table = Table(title, (corner, *(column.header for column in columns)), tuple(cells), legend=meanings(*names))
    table = with_best(table, [column.better for column in columns])
    return transposed(table, "task") if of_tasks and cells and len(results.tasks) > WIDE else table


def _by_strategy(
    results: Results, numbers: Callable[[str, Run], Numbers | None]
) -> Iterator[tuple[str, list[Numbers]]]:
    """Yield the numbers of the runs of each strategy of which all have them."""
    for label, runs in results.units.items():
        known = [each for run in runs.values() if (each := numbers(label, run)) is not None]
        if len(known) == len(runs):
            yield label, known


# ---- scores ---------------------------------------------------------------------------------------------


def _outcome(results: Results) -> Table:
    """Return table 4 of the paper: what each strategy still knows of each task at the end."""
    scale, several, measured = results.scale, len(results.tasks) > 1, {*results.scores["metric"]}
    title = titled("After the last task", _unit_of_scores(results), "loss in nats a token" if LOSS in measured else "")
    beside = [
        *([Column("average", scale.text, results.sign, "average")] if several else []),
        *([Column(LOSS, PLAIN.text, -1, LOSS)] if LOSS in measured else []),
        *([Column("forgetting", scale.text, -1, "forgetting"), Column("BWT", scale.text, 1, "BWT")] if several else []),
        *([Column("ECE", percent, -1, "ECE")] if "ece" in measured or not results.strategies else []),
        *([Column("updates", _COUNT, 0, "updates")] if "updates" in measured else []),
    ]

    def numbers(scores: Numbers, **more: float | None) -> Numbers:
        return [*scores, *(more.get(column.header) for column in beside)]

    def of_run(label: str, run: Run) -> Numbers:
        six, at_end = results.summary_of(label, run.seed), partial(_at_end, results, label, run.seed)
        known = {"average": six["average"], "forgetting": six["forgetting"], "BWT": six["bwt"], "ECE": six["ece"]}
        return numbers(at_end(SCORE), **known, loss=_known_mean(at_end(LOSS)), updates=at_end("updates").sum())

    def of_union(label: str, run: Run) -> Numbers | None:
        union, ece = (_at_end(results, label, run.seed, f"{UNION}{name}") for name in ("accuracy", "ece"))
        return None if np.isnan(union).all() else numbers(union, average=float(union.mean()), ECE=float(ece.mean()))

    rows, unions = list[tuple[str, Sequence[Numbers]]](), dict(_by_strategy(results, of_union))
    for label, of_seeds in _by_strategy(results, of_run):
        rows.append((label, of_seeds))
        if label in unions:
            rows.append((f"{label} (one final union)", unions[label]))
    floors = ({CONSTANT: results.constant} if results.constant else {}) | dict(results.learned_floors)
    for name, floor in floors.items():
        untrained = results.matrices(results.strategies[0], LOSS)[0, 0] if name == UNTRAINED else np.zeros(0)
        rows.append((name, [numbers(floor, average=mean_of_known(floor), loss=_known_mean(untrained))]))
    columns = [*_of_tasks(results, "a task", results.signs), *beside]
    return _table(results, title, "strategy", columns, rows, of_tasks=True, legend=[*floors, "bold"])


def _at_end(results: Results, label: str, seed: int, metric: str) -> Floats:
    """Return the values of a run after the last task, shape (T,), NaN where nothing was measured."""
    last: Floats = results.values(label, seed, metric)[-1]
    return last


def _known_mean(values: Floats) -> float | None:
    """Return the mean over the tasks that have a value; ``None`` where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _transfer(results: Results) -> Table:
    columns = [Column("FWT", results.scale.text, 1, "FWT")]
    columns += [Column("intransigence", results.scale.text, -1, "intransigence")]
    columns += [
        Column(f"forgetting {task}", scale.text, -1, "forgetting")
        for task, scale in zip(results.tasks, results.scales, strict=True)
    ]
    title = titled("Transfer, and forgetting per task", _unit_of_scores(results, "in percentage points"))

    def numbers(label: str, run: Run) -> Numbers:
        forgotten = forgetting_per_task(results.values(label, run.seed), results.metric)
        six = results.summary_of(label, run.seed)
        return [six["fwt"], six["intransigence"], *forgotten]

    return _table(results, title, "strategy", columns, _by_strategy(results, numbers), of_tasks=True)


def _calibration(results: Results) -> Iterator[Table]:
    """Yield for each task ECE, and how often the answers are those of the fine-tuned model."""
    measured, tasks = _measured_at_end(results), results.tasks
    agreed = any(metric == "agreement" for metric, _ in measured)
    calibrated = [task for task in tasks if not results.strategies or ("ece", task) in measured]
    pairs = [*(("ece", task) for task in calibrated), *(("agreement", task) for task in tasks if agreed)]
    columns = [Column(f"ECE {task}", percent, -1, "ECE of a task") for task in calibrated]
    columns += [Column(f"agreement {task}", percent, 0, "agreement") for task in tasks if agreed]
    agree = "agreement with the fine-tuned model"
    title = f"Calibration error per task{f', and {agree}' * agreed}" if calibrated else agree.capitalize()
    yield from _at_end_table(results, titled(title, "in %"), columns, pairs)


def _beside(results: Results) -> Iterator[Table]:
    """Yield what kinds of tasks measure beside their scores, of each task at the end, but for what follows from another."""
    during = results.scores["metric"][results.scores["after"] < len(results.tasks)]
    names = [name for name in during.unique() if name not in (*results.metric, "ece", "perplexity")]
    measured = _measured_at_end(results)
    pairs = [(name, task) for name in names for task in results.tasks if (name, task) in measured]
    columns = [
        Column(f"{name} {task}", percent if limits_of(name) == (0, 1) else PLAIN.text, 0, name) for name, task in pairs
    ]
    title = "Measured beside the scores, at the end (loss in nats a token, shares in %)"
    yield from _at_end_table(results, title, columns, pairs)


def _measured_at_end(results: Results) -> set[tuple[str, str]]:
    """Return the metrics and tasks of which some run has a value after the last task."""
    last = results.scores[results.scores["after"] == len(results.tasks)]
    return {*last[["metric", "task"]].itertuples(index=False, name=None)}


def _at_end_table(
    results: Results, title: str, columns: Sequence[Column], pairs: Sequence[tuple[str, str]]
) -> Iterator[Table]:
    """Yield a table whose columns are metrics of tasks after the last one, if there are any."""

    def numbers(label: str, run: Run) -> Numbers:
        at_end = {name: _at_end(results, label, run.seed, name) for name, _ in pairs}
        return [at_end[name][results.tasks.index(task)] for name, task in pairs]

    if columns:
        yield _table(results, title, "strategy", columns, _by_strategy(results, numbers), of_tasks=True)


# ---- what they are worth --------------------------------------------------------------------------------


def _intervals(results: Results, evidence: Evidence) -> Table:
    compared = [label for name in (REFERENCE, NAIVE) if (label := results.first_of(name))]
    forgets = ["forgetting"] if len(results.tasks) > 1 else []
    rows = []
    for label in results.strategies:
        row = [label, evidence.average(label).text]
        row += [results.forgetting(label).text for _ in forgets]
        for other in compared:
            difference = None if other == label else evidence.difference(label, other)
            row.append(NULL if difference is None else f"{difference.text} {difference.verdict}")
        rows.append(tuple(row))
    return Table(
        "Averages with their 95 % intervals (in %, differences in percentage points)",
        ("strategy", "average", *forgets, *(f"minus {label}" for label in compared)),
        tuple(rows),
        legend=meanings("average", *forgets, "interval", *(["minus another"] if compared else [])),
    )


def _retention(results: Results, evidence: Evidence) -> Iterator[Table]:
    """Yield for each task, and for the average, which share is kept of what fine-tuning learned above the best floor."""
    reference, floors = results.first_of(REFERENCE), results.best_floors
    if reference is None or not floors:
        return
    average = float(np.mean([score for _, score in floors]))
    rows = [("the floor", *(f"{percent(score)} ({name})" for name, score in floors), percent(average))]
    for label in results.strategies:
        shares = [
            evidence.retention(label, reference, floor, task)
            for task, (_, floor) in zip(results.tasks, floors, strict=True)
        ]
        shares.append(evidence.retention(label, reference, average))
        rows.append((label, *(NULL if share is None else share.text for share in shares)))
    table = Table(
        f"Kept above the floor (in % of what {reference} has above it, with 95 % intervals)",
        ("strategy", *results.tasks, "average"),
        tuple(rows),
        legend=meanings("kept above the floor", "interval"),
    )
    yield transposed(table, "task") if len(results.tasks) > WIDE else table


def _calibration_beside_chance(results: Results) -> Iterator[Table]:
    """Yield ECE, what chance shows, and what is left without it: means over the tasks with probabilities."""
    measures: dict[str, Callable[[Reliability], float]] = {
        "ECE": lambda each: each.ece,
        "noise floor": lambda each: each.noise_floor,
        "ECE without noise": lambda each: each.debiased_ece,
    }

    def numbers(label: str, run: Run) -> Numbers | None:
        diagrams = [reliability(each.logits, each.labels) for each in run.probabilities.values()]
        if not diagrams:
            return None
        return [float(np.mean([measure(each) for each in diagrams])) for measure in measures.values()]

    title = "Calibration beside chance (in percentage points; means over tasks)"
    columns = [Column(name, percent, 0, name) for name in measures]
    table = _table(results, title, "strategy", columns, _by_strategy(results, numbers))
    if table.rows:
        yield table


# ---- labels and texts -----------------------------------------------------------------------------------


def label_tables(results: Results) -> Iterator[Table]:
    """Yield a table for each task whose answers are labels, of all seeds at the end of the stream; of long streams none."""
    order = ["rows", "precision", "recall", "f1"]
    columns = [Column("rows", _COUNT), *(Column(name, percent, 0, name) for name in ("precision", "recall", "F1"))]
    for task in results.tasks if len(results.tasks) <= WIDE else ():
        rows = list[tuple[str, Sequence[Numbers]]]()
        for strategy, runs in results.units.items():
            if all(task in run.probabilities and task in run.labels for run in runs.values()):
                of_seeds = [label_scores(run.probabilities[task], run.labels[task]) for run in runs.values()]
                for label in of_seeds[0].index:
                    rows.append((f"{strategy}: {label}", [each.loc[label, order].tolist() for each in of_seeds]))
        if rows:
            title = f"Labels of {task} at the end (in %; numbers of rows)"
            yield _table(results, title, "strategy: label", columns, rows, legend=["macro average"])


def text_tables(results: Results) -> Iterator[Table]:
    """Yield for each task that is answered by texts a few rows, by the first seed of each strategy at the end of the stream."""
    first = {label: next(iter(runs.values())) for label, runs in results.units.items()}
    for task in results.tasks:
        written = {label: run.texts[task] for label, run in first.items() if task in run.texts}
        if not written:
            continue
        one, *others = written.values()
        if any(other.right != one.right for other in others):  # on other test rows
            continue
        places = shown_rows(len(one.right))
        lines = [("prompt", [one.prompts[place] for place in places])] if one.prompts else []
        lines += [("right text", [one.right[place][0] for place in places])]
        lines += [(UNTRAINED, list(run.before[task])) for run in first.values() if task in run.before][:1]
        lines += [(label, [each.texts[place] for place in places]) for label, each in written.items()]
        yield Table(
            f"Texts of {task} at the end, by the first seed",
            ("", *(f"test row {place + 1}" for place in places)),
            tuple((name, *map(_cut, texts)) for name, texts in lines),
        )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]}…") or "(empty)"


# ---- what was measured beside them, and what they cost --------------------------------------------------


def _held_out(results: Results) -> Table:
    """Return the loss on texts that no task trains, of each strategy."""

    def numbers(label: str, run: Run) -> Numbers | None:
        if (aside := run.facts.held_out) is None:
            return None
        return [aside.before, aside.after, mean_of_known(aside.by_task or [None])]

    stages = {"before training": 0, "at the end, without a task": -1, "at the end, as tasks are answered": 0}
    columns = [Column(stage, PLAIN.text, better, "held out") for stage, better in stages.items()]
    title = "Loss on texts that no task trains (nats a token)"
    return _table(results, title, "strategy", columns, _by_strategy(results, numbers))


def _costs(results: Results) -> Table:
    facts, tasks = [run.facts for run in results.runs], len(results.tasks)
    phases = [*dict.fromkeys(phase for each in facts for phase in each.seconds)]
    columns = [Column(f"{phase.replace('_', '-')} (s)", _SECONDS, 0, "(s)") for phase in phases]
    kept = any(each.memory for each in facts)
    columns += [Column(header, _COUNT, -1, "kept") for header in ("kept (bytes)", "kept per task (bytes)") if kept]

    def numbers(label: str, run: Run) -> Numbers:
        most = run.facts.memory[-1] if run.facts.memory else np.nan
        return [*(run.facts.seconds.get(phase) for phase in phases), *([most, most / tasks] if kept else [])]

    rows = _by_strategy(results, numbers) if columns else ()
    return _table(results, "Time per phase, and memory kept", "strategy", columns, rows)


def _ledger(results: Results, label: str) -> Table:
    columns = [Column(name, show, 0, name) for name, show in (("region", _COUNT), ("owned", _COUNT))]
    columns.append(Column("largest overlap", _SHARE, 0, "largest overlap"))

    def numbers(ledger: LedgerSummary, row: int) -> Numbers:
        overlaps = [ledger.overlap[earlier][row] for earlier in range(row)]
        return [ledger.region_size[row], ledger.owned_size[row], max(overlaps, default=0.0)]

    runs = results.units[label].values()
    ledgers = [run.facts.ledger for run in runs if run.facts.ledger]
    tasks = enumerate(results.tasks) if len(ledgers) == len(runs) else ()
    rows = ((task, [numbers(ledger, row) for ledger in ledgers]) for row, task in tasks)
    return _table(results, f"Ledger of {label} (entries of the model)", "task", columns, rows)


# ---- over the stream ------------------------------------------------------------------------------------


def _matrix(results: Results, label: str) -> Table:
    stages, matrices = ("before training", *(f"after {task}" for task in results.tasks)), results.matrices(label)
    seeds = "one seed" if len(matrices) == 1 else f"mean over {len(matrices)} seeds"
    title = ", ".join(filter(None, [_unit_of_scores(results), seeds]))
    rows = ((stage, [row]) for stage, row in zip(stages, matrices.mean(axis=0), strict=True))
    return _table(results, f"Learning matrix of {label} ({title})", "stage", _of_tasks(results), rows)


def _of_tasks(results: Results, legend: str = "", better: Sequence[int] | None = None) -> list[Column]:
    """Return a column of scores for each task; its header has the metric where that is not accuracy."""
    each = zip(results.tasks, results.metric, results.scales, better or [0] * len(results.tasks), strict=True)
    return [
        Column(task if metric == "accuracy" else f"{task} ({title_of(metric)})", scale.text, sign, legend)
        for task, metric, scale, sign in each
    ]


def _unit_of_scores(results: Results, percent: str = "in %") -> str:
    """Return what a title says of the unit of scores: of percentages these words, nothing of plain numbers."""
    shares = [scale == PERCENT for scale in results.scales]
    return "" if not any(shares) else percent if all(shares) else f"{percent} where scores are shares"


# ---- what columns mean ----------------------------------------------------------------------------------

MEANINGS = {
    "a task": "the score on its test rows after the last task, by the metric that it says; accuracy where it says none. F1 "
    "is of label 1, or of entities where a task labels words",
    "average": "the mean of the tasks' scores: each counts the same",
    # How learned tasks are scored, see `forgetfree.continual.strategy`.
    "forgetting": "how much worse a task is than its best score since it was learned; the mean over all tasks but the last. Of "
    "a strategy that claims to forget nothing, 32 rows of a learned task (8 of texts) are answered again after each later "
    "task; the task is scored anew only where a bit of these answers changed",
    "BWT": "backward transfer: how much better the score at the end is than that right after learning; below 0 where tasks "
    "were forgotten",
    "ECE": "expected calibration error, in %: how far confidence is from accuracy, in 15 bins; the mean over tasks",
    "updates": "of the model's weights or of a region's, over all tasks; those of the fine-tuned models that it stands on "
    "count, too, whoever made them, and those of a search for a mask do not",
    CONSTANT: "the best score that the same answer to every row has: what knows a task is better",
    "a bag of words": "logistic regression on the words (TF-IDF) of the same training rows, and of pairs on how far both texts "
    "overlap, without the model; the mean over seeds",
    "a linear probe": "logistic regression on the features of the pre-trained model, of the same training rows; the mean over "
    "seeds. Nothing of the model is trained",
    "a linear probe at the mean": "the same on the mean of the tokens' features",
    "the most similar training row": "the right text of the row whose prompt has the largest cosine of TF-IDF; the mean "
    "over seeds",
    UNTRAINED: "the pre-trained model, asked as it is",
    "bold": "the best of a column of strategies",
    "FWT": "forward transfer: how much better the score of a task is just before it is learned than before training",
    "intransigence": "how much worse a task is than the model fine-tuned on it alone, right after learning",
    "ECE of a task": "its expected calibration error after the last task",
    "agreement": "on how many test rows the answer is that of the model fine-tuned on the task alone",
    "(s)": "seconds of all tasks; a fine-tuned model that strategies share counts for the first that made it",
    "kept": "bytes beside the pre-trained model that answer for all tasks and let the next be learned",
    "region": "entries of the model that hold the task's skill",
    "owned": "those that no earlier task owns: the ones that this task trained",
    "largest overlap": "the largest share of the region that lies in the region of one earlier task",
    "interval": "in brackets: of 100 such intervals 95 hold what other seeds and test rows would give. Seeds count with n - 1, "
    "rows by what all seeds share of them (Cochran and Cox); without the answers to single rows, by a bound, which is mostly "
    "wider. No end goes beyond what a score can be",
    "minus another": "the difference of the averages on equal rows and seeds; undecided: the interval holds 0",
    "kept above the floor": "(score − floor) / (score of fine-tune − floor): the share of what fine-tuning learned. The floor "
    "of a task is the best of those in the table of scores, that of the average is their mean; floors count as exact. — where "
    "fine-tune is not above the floor for certain",
    "noise floor": "the ECE that chance alone shows: that of a perfectly calibrated model with the same confidences, on as "
    "many rows",
    "ECE without noise": "ECE less what chance adds to it, estimated (Kumar et al., 2019)",
    "precision": "of the rows answered with the label, the share that have it",
    "recall": "of the rows that have the label, the share answered with it",
    "F1": "the harmonic mean of both",
    "macro average": "the mean over labels, each counting the same; under F1 it is the metric macro_f1",
    LOSS: "the mean cross-entropy of a token of the right texts, and of that which ends them; its exponential "
    "is the perplexity",
    "held out": "where each task has a model of its own, there is none without a task; the last column is the mean over the "
    "models that answer for the tasks",
    "word_accuracy": "the share of words that are labelled rightly",
}


def meanings(*names: str) -> tuple[tuple[str, str], ...]:
    """Return the legend of columns by their names, of those that have one."""
    return tuple((name, MEANINGS[name]) for name in names if name in MEANINGS)
