"""What a report says in words: the outcome in a few sentences, notes above the tables, and what the columns mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from forgetfree.display import PERCENT, Scale, counted
from forgetfree.options import FLAGGED, typed
from forgetfree.results.evidence import Evidence, Interval, forgetting
from forgetfree.results.report.page import WIDE, size
from forgetfree.results.runs import REFERENCE
from forgetfree.results.table import Results, StrategyRuns, evidence_of
from forgetfree.results.unit_folder import ELSEWHERE

NAIVE, OURS = "continual-ft", "grafting-continual"
#: They see the data of other tasks at once, or keep a model for each task: nothing to be forgotten, or no stream.
_REFERENCES = (REFERENCE, "joint", "cumulative")
#: What is told of the set-up in words; what else was set stands as it was typed.
_SETUP = ("model", "scenario", "evaluated_on", "readout", "shots", "steps", "sparsity", *FLAGGED)


# ---- the outcome ----------------------------------------------------------------------------------------


def headline(results: Results, evidence: Evidence | None = None) -> str:
    """Return what results say of forgetting, of scores at the end, and of what is not known.

    Args:
        results: any.
        evidence: of them, if it is there already.
    """
    if not results.entries:
        return "No strategy has finished, so there is nothing to compare."
    return " ".join(_sentences(results, evidence or evidence_of(results)))


def _sentences(results: Results, evidence: Evidence) -> Iterator[str]:
    naive = results.by_strategy.get(NAIVE)
    ours = results.by_strategy.get(OURS) or _best_of_the_others(results)
    told = [entry for entry in (naive, ours) if entry]
    if len(results.tasks) == 1:
        yield "The stream has one task, so nothing can be forgotten."
    elif not any(_learned(entry, results) for entry in results.entries):
        yield "No strategy learned a task above a constant answer, so nothing could be forgotten."
    else:
        text = ", ".join(_lost(entry, results) for entry in told)
        yield f"{text[:1].upper() + text[1:] if naive else text}{_price(ours, len(results.tasks))}."
    if naive and ours:
        yield _difference(ours, naive, results.scale, evidence)


def _best_of_the_others(results: Results) -> StrategyRuns | None:
    others = [entry for entry in results.entries if entry.strategy != NAIVE]
    # Where the sign is 0, the first: such averages have no best.
    return max(
        others, key=lambda entry: (entry.strategy not in _REFERENCES, results.sign * _average(entry)), default=None
    )


def _learned(entry: StrategyRuns, results: Results) -> bool:
    """Say whether any task was above the constant answer right after it was learned; yes where no such answer is known."""
    scores = np.mean([np.diagonal(run.learning_matrix, -1) for run in entry.runs], axis=0)
    floors, signs = results.constant, np.array(results.signs)
    return floors is None or bool(np.any((signs * (scores - floors) > 0) | (signs == 0)))


def _lost(entry: StrategyRuns, results: Results) -> str:
    """Say how much of its score a strategy lost on average, and how sure that is."""
    scale, seeds = results.scale, len(entry.runs)
    name = f"naive fine-tuning ({entry.label})" if entry.strategy == NAIVE else entry.label
    if not _learned(entry, results):
        return f"{name} learned no task above a constant answer"
    loss = forgetting(entry.runs, results.test_rows)
    gained = scale.text(loss.value).startswith("-")
    lost = f"{name} {'gained' if gained else 'lost'} {_points(abs(loss.value), scale)} on average"
    if not any(run.forgetting for run in entry.runs):
        return f"{lost}{', with every seed' if seeds > 1 else ''}"
    return f"{lost} ({_certainty(loss, 'loss', seeds, scale)})"


def _price(entry: StrategyRuns | None, tasks: int) -> str:
    """Say what the strategy named last keeps per task."""
    kept = [run.facts.memory for run in entry.runs] if entry else []
    return f", at {size(float(np.mean([each[-1] for each in kept])) / tasks)} a task" if kept and all(kept) else ""


def _difference(ours: StrategyRuns, naive: StrategyRuns, scale: Scale, evidence: Evidence) -> str:
    """Compare the averages at the end, in pairs of the same seed."""
    scores = f"At the end {ours.label} scores {scale.with_unit(_average(ours))} on average, {naive.label} "
    scores += scale.with_unit(_average(naive))
    difference = evidence.difference(ours.label, naive.label)
    if difference is None:
        return f"{scores} (no seed in common)."
    seeds = len({run.seed for run in ours.runs} & {run.seed for run in naive.runs})
    return f"{scores}: {difference.verdict} ({_certainty(difference, 'difference', seeds, scale)})."


def _certainty(found: Interval, what: str, seeds: int, scale: Scale) -> str:
    """Say how sure a loss or a difference is."""
    if math.isnan(found.low):
        return "one seed" if seeds == 1 else f"the same for each of {seeds} seeds"
    unit = " points" if scale == PERCENT else ""
    return f"95 % interval of the {what} {scale.text(found.low)} to {scale.text(found.high)}{unit} over {seeds} seeds"


def _average(entry: StrategyRuns) -> float:
    return float(np.mean([run.average for run in entry.runs]))


def _points(difference: float, scale: Scale) -> str:
    """Return a difference of scores; one of percentages in points."""
    text = scale.text(difference)
    return f"{text} point{'' if text == '1.0' else 's'}" if scale == PERCENT else scale.with_unit(difference)


# ---- notes ----------------------------------------------------------------------------------------------


def stream_name(results: Results) -> str:
    """Return the name of the stream; where it lists many tasks, how many."""
    tasks = results.tasks
    listed = len(tasks) > WIDE and "," in results.stream
    return f"{len(tasks)} tasks, {tasks[0]} to {tasks[-1]}" if listed else results.stream


def notes(results: Results) -> Iterable[str]:
    """Yield the sentences above the tables: the set-up, rows and seeds, and what is left out."""
    settings = {key: typed(value) for key, value in results.settings.items()}
    if settings.get("precision") == "fp32" and settings.get("dtype") == "bfloat16":  # passes compute in that
        settings["precision"] = f"that of the weights ({settings.pop('dtype')})"
    if setup := [f"{key.replace('_', ' ')} {settings.pop(key)}" for key in _SETUP if key in settings]:
        yield f"Set-up: {', '.join(setup)}."
    if settings:
        yield f"Also set: {' '.join(f'{key}={value}' for key, value in settings.items())}."
    if rows := _test_rows(results.test_rows):
        yield rows
    seeds = [(entry.label, [run.seed for run in entry.runs]) for entry in results.entries]
    if any(len(numbers) > 1 for _, numbers in seeds):
        yield "Cells are mean (standard deviation, n - 1) over seeds."
    if seeds and all(numbers == seeds[0][1] for _, numbers in seeds):
        yield f"Every strategy: {_count_seeds(seeds[0][1])}."
    elif seeds:
        yield "; ".join(f"{label}: {_count_seeds(numbers)}" for label, numbers in seeds) + "."
    for entry in results.entries:
        for run in entry.runs:
            for claim in run.facts.broken_claims:
                yield f"Broken claim of {entry.label}, seed {run.seed}: {claim}."
    several = len(results.records) > 1  # where one run is told of, its place is clear
    for record in results.records:
        place = f" ({record.source})" if several else ""
        for cut in record.about.unfinished:
            yield (
                f"Unfinished and left out: {cut['strategy']}, seed {cut['seed']}, "
                f"after {cut['after']} of {counted(len(results.tasks), 'task')}{place}."
            )
        for failed in record.about.failed:
            yield f"Failed and left out: {failed['strategy']}, seed {failed['seed']}{place}: {failed['error']}"
    yield from uncounted(results)


def uncounted(results: Results) -> Iterable[str]:
    """Yield for each strategy that its seconds lack those of fine-tuned models which a cache gave, if they do."""
    for entry in results.entries:
        if any(run.facts.seconds.get(ELSEWHERE, 0.0) is None for run in entry.runs):
            yield (
                f"Seconds of {entry.label} do not count fine-tuning: its fine-tuned models came from a cache that does not say "
                "how long they took."
            )


def _test_rows(rows: Mapping[str, int]) -> str:
    """Say how many rows each task is scored on."""
    counts = sorted(set(rows.values()))
    if not counts:
        return ""
    if len(counts) == 1:
        return f"Each task is scored on {counted(counts[0], 'row')}."
    if len(rows) > WIDE:
        return f"Tasks are scored on {counts[0]:,} to {counts[-1]:,} rows each."
    return f"Scored on rows: {', '.join(f'{task} {count:,}' for task, count in rows.items())}."


def _count_seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"


# ---- what columns mean ----------------------------------------------------------------------------------

#: How learned tasks are scored, see `forgetfree.continual.evaluation`.
_CHECKED = (
    "Of a strategy that claims to forget nothing, 32 rows of a learned task (8 of texts) are answered again after each later "
    "task; the task is scored anew only where a bit of these answers changed"
)
MEANINGS = {
    "a task": "the score on its test rows after the last task; accuracy, or F1 where it says so: of label 1, or of entities "
    "where a task labels words",
    "average": "the mean of the tasks' scores: each counts the same",
    "forgetting": "how far a task is below its best score since it was learned; the mean over all tasks but the last. "
    + _CHECKED,
    "BWT": "backward transfer: the score at the end minus the score right after learning; below 0 where tasks were forgotten",
    "ECE": "expected calibration error: how far confidence is from accuracy, in 15 bins; the mean over tasks",
    "updates": "of the model's weights or of a region's, over all tasks; those of the fine-tuned models that it stands on "
    "count, too, whoever made them, and those of a search for a mask do not",
    "a constant answer": "the best score that the same answer to every row has: what knows a task is above it",
    "a bag of words": "logistic regression on the words (TF-IDF) of the same training rows, and of pairs on how far both texts "
    "overlap, without the model; the mean over seeds",
    "a linear probe": "logistic regression on the features of the pre-trained model, of the same training rows; the mean over "
    "seeds. Nothing of the model is trained",
    "a linear probe at the mean": "the same on the mean of the tokens' features",
    "the most similar training row": "the right text of the row whose prompt has the largest cosine of TF-IDF; the mean "
    "over seeds",
    "the model before training": "the pre-trained model, asked as it is",
    "best floor": "the mean over tasks of the best score without fine-tuning: of all floors above",
    "bold": "the best of a column of strategies",
    "FWT": "forward transfer: the score of a task just before it is learned, minus that before training",
    "intransigence": "how far a task is below the model fine-tuned on it alone, right after learning",
    "forgetting of a task": "its best score since it was learned, minus its score at the end",
    "ECE of a task": "its expected calibration error after the last task",
    "agreement": "on how many test rows the answer is that of the model fine-tuned on the task alone",
    "(s)": "seconds of all tasks; a fine-tuned model that strategies share counts for the first that made it",
    "seconds": "of all phases; those of a fine-tuned model that another strategy or run made count, too, where they are known",
    "fine-tune-elsewhere (s)": "seconds of the fine-tuned models that it stands on and another strategy or run made",
    "kept": "bytes beside the pre-trained model that answer for all tasks and let the next be learned",
    "of its region not owned before": "the share of the region that no earlier task owns",
    "region": "entries of the model that hold the task's skill",
    "owned": "those that no earlier task owns: the ones that this task trained",
    "overlap": "the share of the column's region that lies in the row's",
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
    "macro average": "the mean over labels, each counting the same; under F1 it is the metric macro_f1",
    "as a label": "how many rows of the line's label are answered so",
    "most often taken for": "the wrong label that most of its rows are answered with, and how many are",
    "once learned": "the score right after the task was learned",
    "loss": "the mean cross-entropy of a token of the right texts, and of that which ends them; its exponential "
    "is the perplexity",
    "held aside": "where each task has a model of its own, there is none without a task; the last column is the mean over the "
    "models that answer for the tasks",
    "word_accuracy": "the share of words that are labelled rightly",
}

#: What is told in another way where a task has a metric of a plug-in, of which lower may be better.
OF_OTHER_METRICS = {
    "a task": "the score on its test rows after the last task, by the metric that it says; accuracy where it says none",
    "forgetting": "how much worse a task is than its best score since it was learned; the mean over all tasks but the last. "
    + _CHECKED,
    "BWT": "backward transfer: how much better the score at the end is than that right after learning; below 0 where tasks "
    "were forgotten",
    "a constant answer": "the best score that the same answer to every row has: what knows a task is better",
    "FWT": "forward transfer: how much better the score of a task is just before it is learned than before training",
    "intransigence": "how much worse a task is than the model fine-tuned on it alone, right after learning",
    "forgetting of a task": "how much worse its score is at the end than its best since it was learned",
}


def meanings(*names: str, metrics: Iterable[str] = ()) -> tuple[tuple[str, str], ...]:
    """Return the legend of columns.

    Args:
        names: of the columns.
        metrics: of the tasks; beside accuracy and F1, some things are told in another way.
    """
    other = {} if {*metrics} <= {"accuracy", "f1", "macro_f1"} else OF_OTHER_METRICS
    return tuple((name, other.get(name, MEANINGS[name])) for name in names)
