"""The tables of runs: which numbers stand in which column, how they are written, and what they mean."""

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
#: What answers that are texts have beside their score.
LOSS = "loss"
#: How many rows of a task that is answered by texts are shown, and how many characters of a text.
_SHOWN, _CHARACTERS = 3, 200
#: A column of numbers: its name, and how they are written.
Column = tuple[str, Callable[[float], str]]
_SECONDS, _COUNT = "{:,.1f}".format, "{:,.0f}".format
#: Of each column a number; NaN or none where it is missing.
Numbers = Sequence[float | None] | Floats


def tables_of(results: Results, evidence: Evidence) -> list[Table]:
    """Return all tables of a report in order; those that are made of answers only where these are there."""
    several = any(len(runs) > 1 for runs in results.units.values())
    shares = results.scale == PERCENT and results.sign == 1
    others = [_beside(results), *([_intervals(results, evidence)] if shares and several else [])]
    others += [*(_retention(results, evidence) if shares else ()), *text_tables(results)]
    others += [_held_out(results), _costs(results)]
    if results.strategies and len(results.tasks) <= WIDE:
        others += _matrices(results)
    if len(results.tasks) > 1:  # of one task there is no transfer
        others.insert(0, _transfer(results))
    known = (table for table in others if any(value != NULL for row in table.rows for value in row[1:]))
    return [_outcome(results), *known]


def words_of(tables: Iterable[Table]) -> tuple[tuple[str, str], ...]:
    """Return what is meant by the names of columns and rows that stand in tables."""
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
    """Return a table of rows, each with its name and, for each seed, its numbers, one a column.

    Where ``of_tasks``, columns are tasks, which become rows where there are many.
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
    """Return the values of a run after the last task, shape (T,), NaN where nothing was measured."""
    last: Floats = results.values(label, seed, metric)[-1]
    return last


def _known_mean(values: Floats) -> float | None:
    """Return the mean over the tasks that have a value; ``None`` where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _transfer(results: Results) -> Table:
    names = {"FWT": "fwt", "intransigence": "intransigence"}

    def numbers(label: str, run: Run) -> Numbers:
        six = results.summary_of(label, run.seed)
        return [six[name] for name in names.values()]

    columns = [(header, results.scale.text) for header in names]
    title = titled("Transfer", _unit_of_scores(results, "in percentage points"))
    return _table(results, title, "strategy", columns, _by_strategy(results, numbers))


def _beside(results: Results) -> Table:
    """Return what was measured beside the scores of each task at the end, but for what another table has."""
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
    losses = "loss in nats a token" if any(name == LOSS for name, _ in pairs) else ""
    title = titled("Beside the scores, after the last task", "in %", losses)
    return _table(results, title, "strategy", columns, _by_strategy(results, numbers) if columns else (), of_tasks=True)


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
    table = Table(
        "Averages with their 95 % intervals (in %, differences in percentage points)",
        ("strategy", "average", *forgets, *(f"minus {label}" for label in compared)),
        tuple(rows),
    )
    return known_columns(table)


def _retention(results: Results, evidence: Evidence) -> Iterator[Table]:
    """Yield for each task, and for the average, which share is kept of what fine-tuning learned above the best floor."""
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
    best = ("the floor", *(f"{percent(score)} ({name})" for name, score in floors), percent(average))
    table = Table(
        f"Kept above the floor (in % of what {reference} has above it, with 95 % intervals)",
        ("strategy", *results.tasks, "average"),
        (best, *rows),
    )
    yield transposed(table, "task") if len(results.tasks) > WIDE else table


# ---- texts ----------------------------------------------------------------------------------------------


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
        few = min(_SHOWN, len(one.right))
        places = [row * len(one.right) // few for row in range(few)]
        lines = [("prompt", [one.prompts[place] for place in places])] if one.prompts else []
        lines += [("right text", [one.right[place][0] for place in places])]
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

    stages = ("before training", "at the end, without a task", "at the end, as tasks are answered")
    columns = [(stage, PLAIN.text) for stage in stages]
    title = "Loss on texts that no task trains (nats a token)"
    return _table(results, title, "strategy", columns, _by_strategy(results, numbers))


def _costs(results: Results) -> Table:
    facts, tasks = [run.facts for run in results.runs], len(results.tasks)
    phases = [*dict.fromkeys(phase for each in facts for phase in each.seconds)]
    columns: list[Column] = [(f"{phase.replace('_', '-')} (s)", _SECONDS) for phase in phases]
    kept = any(each.kept_bytes for each in facts)
    columns += [(header, _COUNT) for header in ("kept (bytes)", "kept per task (bytes)") if kept]

    def numbers(label: str, run: Run) -> Numbers:
        most = run.facts.kept_bytes[-1] if run.facts.kept_bytes else np.nan
        return [*(run.facts.seconds.get(phase) for phase in phases), *([most, most / tasks] if kept else [])]

    rows = _by_strategy(results, numbers) if columns else ()
    return _table(results, "Time per phase, and memory kept", "strategy", columns, rows)


# ---- over the stream ------------------------------------------------------------------------------------


def _matrices(results: Results) -> Iterator[Table]:
    """Yield the learning matrix of each strategy, tinted from a constant answer (or the worst score) to the best of all."""
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
    """Return a column of scores for each task; its header has the metric where that is not accuracy."""
    each = zip(results.tasks, results.metric, results.scales, strict=True)
    return [
        (task if metric == "accuracy" else f"{task} ({title_of(metric)})", scale.text) for task, metric, scale in each
    ]


def _unit_of_scores(results: Results, percent: str = "in %") -> str:
    """Return what a title says of the unit of scores: of percentages these words, nothing of plain numbers."""
    shares = [scale == PERCENT for scale in results.scales]
    return "" if not any(shares) else percent if all(shares) else f"{percent} where scores are shares"


# ---- what names mean ------------------------------------------------------------------------------------

MEANINGS = {
    "F1": "of label 1, or of entities where a task labels words",
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
    "FWT": "forward transfer: how much better the score of a task is just before it is learned than before training",
    "intransigence": "how much worse a task is than the model fine-tuned on it alone, right after learning",
    "agreement": "on how many test rows the answer is that of the model fine-tuned on the task alone",
    "(s)": "seconds of all tasks; a fine-tuned model that strategies share counts for the first that made it",
    "kept (bytes)": "beside the pre-trained model, to answer for all tasks and learn the next",
    "95 % intervals": "in brackets: of 100 such intervals 95 hold what other seeds and test rows would give. Seeds count with "
    "n - 1, rows by what all seeds share of them (Cochran and Cox); without the answers to single rows, by a bound, which is "
    "mostly wider. No end goes beyond what a score can be",
    "minus": "the difference of the averages on equal rows and seeds; undecided: the interval holds 0",
    "Kept above the floor": "(score − floor) / (score of fine-tune − floor): the share of what fine-tuning learned. The floor "
    "of a task is the best of those in the table of scores, that of the average is their mean; floors count as exact. — where "
    "fine-tune is not above the floor for certain, or by fewer than 3 points: a share of so little is noise",
    "Learning matrix": "the scores of all tasks after each. In HTML, the stronger the tint of a cell, the nearer it is to the "
    "best score of its task; without a tint, it is no better than a constant answer",
    LOSS: "the mean cross-entropy of a token of the right texts, and of that which ends them; its exponential "
    "is the perplexity",
    "without a task": "where each task has a model of its own, there is none; the column beside it is the mean over the "
    "models that answer for the tasks",
    "word_accuracy": "the share of words that are labelled rightly",
}
