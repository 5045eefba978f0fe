"""The tables of runs: their columns, the formats of numbers, and the meanings of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress

import numpy as np

from forgetfree.display import NULL, PERCENT, PLAIN
from forgetfree.results.evidence import Evidence
from forgetfree.results.metrics import Floats, limits_of, title_of
from forgetfree.results.report.page import WIDE, Table, cell, known_columns, percent, titled, transposed
from forgetfree.results.runs import CONSTANT, REFERENCE, UNION, UNTRAINED, Run
from forgetfree.results.table import SCORE, Results, mean_of_known

NAIVE = "continual-ft"
#: The metric of text answers besides their score.
LOSS = "loss"
#: The number of rows shown for a text task, and of characters per text.
_SHOWN, _CHARACTERS = 3, 200
#: A column of numbers: its name, and the function that formats them.
Column = tuple[str, Callable[[float], str]]
_SECONDS, _COUNT = "{:,.1f}".format, "{:,.0f}".format
#: One number per column; NaN or ``None`` if it is missing.
Numbers = Sequence[float | None] | Floats


def tables_of(results: Results, evidence: Evidence) -> list[Table]:
    """Return all tables of a report in order; tables without any number are left out."""
    several = any(len(runs) > 1 for runs in results.units.values())
    shares = results.scale == PERCENT and results.sign == 1
    others = [_beside(results), *([_intervals(results, evidence)] if shares and several else [])]
    others += [*(_retention(results, evidence) if shares else ()), *text_tables(results)]
    others += [_held_out(results), _costs(results)]
    if results.strategies and len(results.tasks) <= WIDE:
        others += _matrices(results)
    if len(results.tasks) > 1:  # one task has no transfer
        others.insert(0, _transfer(results))
    known = (table for table in others if any(value != NULL for row in table.rows for value in row[1:]))
    return [_outcome(results), *known]


def words_of(tables: Iterable[Table]) -> tuple[tuple[str, str], ...]:
    """Return the names of columns and rows in these tables, with their meanings."""
    names = " ".join(name for table in tables for name in (table.title, *table.header, *(row[0] for row in table.rows)))
    return tuple((name, meaning) for name, meaning in MEANINGS.items() if name in names)


def _table(
    results: Results,
    title: str,
    corner: str,
    columns: Sequence[Column],
    rows: Iterable[tuple[str, Sequence[Numbers]]],
    *,
    of_tasks: bool = False,
) -> Table:
    """Return a table; each row has a name and, for each seed, one number per column.

    With ``of_tasks``, columns are tasks; many tasks become rows.
    """
    cells = [
        (name, *(cell(values, show) for (_, show), *values in zip(columns, *seeds, strict=True)))
        for name, seeds in rows
    ]
    table = known_columns(Table(title, (corner, *(header for header, _ in columns)), tuple(cells)))
    return transposed(table, "task") if of_tasks and cells and len(results.tasks) > WIDE else table


def _by_strategy(
    results: Results, numbers: Callable[[str, Run], Numbers | None]
) -> Iterator[tuple[str, list[Numbers]]]:
    """Yield the numbers of each strategy whose runs all have them."""
    for label, runs in results.units.items():
        known = [each for run in runs.values() if (each := numbers(label, run)) is not None]
        if len(known) == len(runs):
            yield label, known


# ---- scores ---------------------------------------------------------------------------------------------


def _outcome(results: Results) -> Table:
    """Return table 4 of the paper: the score of each strategy on each task at the end."""
    scale, several, measured = results.scale, len(results.tasks) > 1, {*results.scores["metric"]}
    title = titled(
        "After the last task", _unit_of_scores(results), "loss in nats per token" if LOSS in measured else ""
    )
    beside = [
        *([("average", scale.text)] if several else []),
        *([(LOSS, PLAIN.text)] if LOSS in measured else []),
        *([("forgetting", scale.text), ("BWT", scale.text)] if several else []),
        *([("ECE", percent)] if "ece" in measured or not results.strategies else []),
        *([("updates", _COUNT)] if "updates" in measured else []),
    ]

    def numbers(scores: Numbers, **more: float | None) -> Numbers:
        return [*scores, *(more.get(header) for header, _ in beside)]

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
    return _table(results, title, "strategy", [*_of_tasks(results), *beside], rows, of_tasks=True)


def _at_end(results: Results, label: str, seed: int, metric: str) -> Floats:
    """Return the values of a run after the last task, shape (T,), NaN if not measured."""
    last: Floats = results.values(label, seed, metric)[-1]
    return last


def _known_mean(values: Floats) -> float | None:
    """Return the mean over the tasks that have a value; ``None`` if none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _transfer(results: Results) -> Table:
    names = {"FWT": "fwt", "zero-shot gain": "zero_shot_gain"}

    def numbers(label: str, run: Run) -> Numbers:
        summary = results.summary_of(label, run.seed)
        return [summary[name] for name in names.values()]

    columns = [(header, results.scale.text) for header in names]
    title = titled("Transfer", _unit_of_scores(results, "in percentage points"))
    return _table(results, title, "strategy", columns, _by_strategy(results, numbers))


def _beside(results: Results) -> Table:
    """Return the other final metrics of each task, without those in other tables."""
    apart = {*results.metric, "perplexity", "updates"}
    last = results.scores[results.scores["after"] == len(results.tasks)]
    pairs = [
        (name, task)
        for name in last["metric"].unique()
        for task in results.tasks
        if not (
            name in apart or name.startswith(UNION) or last[(last["metric"] == name) & (last["task"] == task)].empty
        )
    ]

    def numbers(label: str, run: Run) -> Numbers:
        at_end = {name: _at_end(results, label, run.seed, name) for name, _ in pairs}
        return [at_end[name][results.tasks.index(task)] for name, task in pairs]

    columns = [
        (f"{'ECE' if name == 'ece' else name} {task}", percent if limits_of(name) == (0, 1) else PLAIN.text)
        for name, task in pairs
    ]
    losses = "loss in nats per token" if any(name == LOSS for name, _ in pairs) else ""
    title = titled("Other metrics after the last task", "in %", losses)
    return _table(results, title, "strategy", columns, _by_strategy(results, numbers) if columns else (), of_tasks=True)


# ---- intervals and baselines ----------------------------------------------------------------------------


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
    table = Table(
        "Averages with their 95 % intervals (in %, differences in percentage points)",
        ("strategy", "average", *forgets, *(f"minus {label}" for label in compared)),
        tuple(rows),
    )
    return known_columns(table)


def _retention(results: Results, evidence: Evidence) -> Iterator[Table]:
    """Yield, for each task and the average, the kept share of fine-tuning's gain above the best floor."""
    reference, floors = results.first_of(REFERENCE), results.best_floors
    if reference is None or not floors:
        return
    average = float(np.mean([score for _, score in floors]))
    rows = list[tuple[str, ...]]()
    for label in results.strategies:
        shares = [
            evidence.retention(label, reference, floor, task)
            for task, (_, floor) in zip(results.tasks, floors, strict=True)
        ]
        shares.append(evidence.retention(label, reference, average))
        rows.append((label, *(NULL if share is None else share.text for share in shares)))
    if all(each == NULL for row in rows for each in row[1:]):
        return
    best = ("the best baseline", *(f"{percent(score)} ({name})" for name, score in floors), percent(average))
    table = Table(
        f"Kept above the best baseline (in % of the gain of {reference} over it, with 95 % intervals)",
        ("strategy", *results.tasks, "average"),
        (best, *rows),
    )
    yield transposed(table, "task") if len(results.tasks) > WIDE else table


# ---- texts ----------------------------------------------------------------------------------------------


def text_tables(results: Results) -> Iterator[Table]:
    """Yield, for each text task, a few rows with the final texts of each strategy's first seed."""
    first = {label: next(iter(runs.values())) for label, runs in results.units.items()}
    for task in results.tasks:
        written = {label: run.texts[task] for label, run in first.items() if task in run.texts}
        if not written:
            continue
        one, *others = written.values()
        if any(other.right != one.right for other in others):  # on other test rows
            continue
        few = min(_SHOWN, len(one.right))
        places = [row * len(one.right) // few for row in range(few)]
        lines = [("prompt", [one.prompts[place] for place in places])] if one.prompts else []
        lines += [("target", [one.right[place][0] for place in places])]
        lines += [(label, [each.texts[place] for place in places]) for label, each in written.items()]
        yield Table(
            f"Texts generated for {task} after the last task, with the first seed",
            ("", *(f"test example {place + 1}" for place in places)),
            tuple((name, *map(_cut, texts)) for name, texts in lines),
        )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]}…") or "(empty)"


# ---- held-out texts and costs ---------------------------------------------------------------------------


def _held_out(results: Results) -> Table:
    """Return the loss of each strategy on held-out texts, which belong to no task."""

    def numbers(label: str, run: Run) -> Numbers | None:
        if (aside := run.facts.held_out) is None:
            return None
        return [aside.before, aside.after, mean_of_known(aside.by_task or [None])]

    stages = ("before training", "after the last task, no task active", "after the last task, a task active")
    columns = [(stage, PLAIN.text) for stage in stages]
    title = "Loss on held-out texts (nats per token)"
    return _table(results, title, "strategy", columns, _by_strategy(results, numbers))


def _costs(results: Results) -> Table:
    facts, tasks = [run.facts for run in results.runs], len(results.tasks)
    phases = [*dict.fromkeys(phase for each in facts for phase in each.seconds)]
    columns: list[Column] = [(f"{phase.replace('_', '-')} (s)", _SECONDS) for phase in phases]
    kept = any(each.kept_bytes for each in facts)
    columns += [(header, _COUNT) for header in ("stored (bytes)", "stored per task (bytes)") if kept]

    def numbers(label: str, run: Run) -> Numbers:
        most = run.facts.kept_bytes[-1] if run.facts.kept_bytes else np.nan
        return [*(run.facts.seconds.get(phase) for phase in phases), *([most, most / tasks] if kept else [])]

    rows = _by_strategy(results, numbers) if columns else ()
    return _table(results, "Time per phase and stored bytes", "strategy", columns, rows)


# ---- over the stream ------------------------------------------------------------------------------------


def _matrices(results: Results) -> Iterator[Table]:
    """Yield the learning matrix of each strategy, tinted from a constant answer (or the worst score) to the best score."""
    stages, columns = ("before training", *(f"after {task}" for task in results.tasks)), _of_tasks(results)
    means = {label: results.matrices(label).mean(axis=0) for label in results.strategies}
    signs = np.array(results.signs)
    upwards = signs * np.array([*means.values()])  # (strategies, T+1, T): higher is better
    low = np.nanmin(upwards, axis=(0, 1)) if results.constant is None else signs * results.constant
    span = np.maximum(np.nanmax(upwards, axis=(0, 1)) - low, 1e-9)
    for (label, matrix), tints in zip(means.items(), np.clip((upwards - low) / span, 0, 1), strict=True):
        seeds = len(results.units[label])
        unit = (_unit_of_scores(results), "one seed" if seeds == 1 else f"mean over {seeds} seeds")
        known = ~np.isnan(matrix).all(axis=1)
        yield Table(
            f"Learning matrix of {label} ({', '.join(filter(None, unit))})",
            ("stage", *(header for header, _ in columns)),
            tuple(
                (stage, *(show(score) for (_, show), score in zip(columns, row, strict=True)))
                for stage, row in compress(zip(stages, matrix, strict=True), known)
            ),
            tuple(tuple(None if np.isnan(tint) else float(tint) for tint in row) for row in tints[known]),
        )


def _of_tasks(results: Results) -> list[Column]:
    """Return a column of scores for each task; its header names the metric unless it is accuracy."""
    each = zip(results.tasks, results.metric, results.scales, strict=True)
    return [
        (task if metric == "accuracy" else f"{task} ({title_of(metric)})", scale.text) for task, metric, scale in each
    ]


def _unit_of_scores(results: Results, percent: str = "in %") -> str:
    """Return the unit of scores for a title: ``percent`` for percentages, nothing for plain numbers."""
    shares = [scale == PERCENT for scale in results.scales]
    return "" if not any(shares) else percent if all(shares) else f"{percent} where scores are shares"


# ---- glossary -------------------------------------------------------------------------------------------

MEANINGS = {
    "F1": "F1 of label 1, or of entities for tagging",
    # On the scoring of learned tasks, see `forgetfree.continual.strategy`.
    "forgetting": "the difference between a task's best score since it was learned and its final score; the mean "
    "over all tasks but the last. If a strategy claims to forget nothing, 32 test rows of each learned task (8 for "
    "generation) are predicted again after each later task, and the task is scored again only if a bit of these "
    "predictions changed",
    "BWT": "backward transfer: a task's final score minus its score right after it was learned; negative if tasks were "
    "forgotten",
    "ECE": "expected calibration error, in %: the mean difference between confidence and accuracy, in 15 bins; the "
    "mean over tasks",
    "updates": "number of updates of the model's or a region's weights, over all tasks. Updates of the fine-tuned "
    "models that the strategy uses are included, even if another strategy or run trained them; updates of mask "
    "scores are not",
    CONSTANT: "the best score of any single answer that is given to every row; a model that has learned the task "
    "scores higher",
    "a bag of words": "logistic regression on TF-IDF features of the same training rows, for pairs also on the "
    "overlap of the two texts; it does not use the model. The mean over seeds",
    "a linear probe": "logistic regression on features of the frozen pre-trained model, on the same training rows; "
    "the mean over seeds",
    "a linear probe at the mean": "the same, on the mean of the features of all tokens",
    "the most similar training row": "the target of the training row whose prompt is most similar (cosine of "
    "TF-IDF); the mean over seeds",
    UNTRAINED: "the pre-trained model without any training",
    "FWT": "forward transfer: a task's score right after it was learned minus that of a model fine-tuned on the task "
    "alone; the mean of all tasks but the first",
    "zero-shot gain": "a task's score just before it is learned minus its score before training; the mean of all tasks but "
    "the first",
    "agreement": "the share of test rows with the same prediction as the model fine-tuned on the task alone",
    "(s)": "seconds over all tasks; the time for a fine-tuned model that several strategies share is counted for the "
    "strategy that trained it",
    "stored (bytes)": "stored besides the pre-trained model, to predict for all tasks and to learn the next one",
    "95 % intervals": "in brackets: 95 % confidence intervals over seeds and test rows. The variance between seeds "
    "is estimated with n - 1; the variance between rows comes from the part that all seeds share (Cochran and Cox). "
    "Without predictions for single rows, an upper bound is used, which is mostly wider. Intervals are clipped to "
    "the range of the score",
    "minus": "the difference of the averages on the same rows and seeds; undecided: the interval contains 0",
    "Kept above the best baseline": "(score − baseline) / (score of fine-tune − baseline): the share of what "
    "fine-tuning learned. A task's baseline is the best one in the table of scores; that of the average is their "
    "mean. Baselines are treated as exact. — if fine-tune is not significantly above the baseline, or by fewer than "
    "3 points, because such a share is noise",
    "Learning matrix": "the scores of all tasks after each task. In HTML, a stronger tint means closer to the task's "
    "best score; no tint means no better than a constant answer",
    LOSS: "the mean cross-entropy per token of the targets, including the token that ends them; its exponential is "
    "the perplexity",
    "no task active": "empty if each task has its own model. With a task active: the mean over the models that "
    "predict for the tasks",
    "word_accuracy": "the share of words with the correct tag",
}
