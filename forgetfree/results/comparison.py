"""Runs side by side: which may be compared, and what each strategy scored in all of them.

>>> merge([load_run_results(Path("runs/a")), load_run_results(Path("runs/b"))])  # doctest: +SKIP
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np

from forgetfree.display import Scale, brief
from forgetfree.errors import ReportError
from forgetfree.options import typed
from forgetfree.results.configurations import labels_of
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.metrics import scale_of, sign
from forgetfree.results.records import CONSTANT, Record
from forgetfree.results.run_results import LEARNED_FLOORS, REFERENCE, UNTRAINED, Failed, Run, RunResults, Unfinished
from forgetfree.results.stored import to_csv
from forgetfree.results.unit_folder import UnitFiles, made_of, read_unit_files

Json = dict[str, Any]
#: What files that do not say it mean, and reports pass over.
USUAL: Json = {"scenario": "task", "evaluated_on": "test"}
#: What of the set-up may differ between runs that stand side by side; their rows say it.
_MAY_DIFFER = ("shots", "steps", "max_length", "graftable")
#: Why a table by task cannot be made, and what is to be done.
_APART = (
    "{ours} and {theirs} cannot be compared task by task: {difference}. Report on them separately, or on all of them by "
    "`forgetfree report`, which then makes a leaderboard (not as csv)."
)


@dataclass(frozen=True)
class StrategyRuns:
    """One row of the comparison: the runs of one strategy in one configuration, one per seed.

    Attributes:
        label: the strategy's name, with the options in which it differs from its other rows.
        runs: its runs, by rising seed; each says where it was read.
        options: what makes the configuration: its options, and what else differs between directories.
        files: what the folder of each run shows beside its scores; empty where they were not read, see `with_files`.
    """

    label: str
    runs: tuple[Run, ...]
    options: Json = field(default_factory=dict)
    files: tuple[UnitFiles, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Comparison:
    """Runs that may stand side by side: same tasks, model, readout, shots and data.

    Attributes:
        stream: name of the stream.
        tasks: task names in the order of learning.
        metric: what is measured on each task, e.g. `accuracy` or `f1`.
        settings: what the results say of the set-up, for display, e.g. `{"model": "minilm", "shots": 16}`.
        constant: per task, the best score of a constant answer; None where the results do not say it.
        learned_floors: by their names in tables, what is scored without fine-tuning, per task, as means over seeds: by a
            classifier, by the most similar training row, by a language model as it is; None where there is none.
        test_rows: per task, how many rows are scored; empty where the results do not say it.
        strategies: one entry per row, in the order first seen.
        unfinished: runs cut short.
        failed: runs that could not go on.
        sources: the directories read.
    """

    stream: str
    tasks: tuple[str, ...]
    metric: tuple[str, ...]
    settings: Json
    constant: tuple[float, ...] | None
    learned_floors: Mapping[str, tuple[float | None, ...]]
    test_rows: Mapping[str, int]
    strategies: tuple[StrategyRuns, ...]
    unfinished: tuple[Unfinished, ...]
    failed: tuple[Failed, ...]
    sources: tuple[str, ...]

    @property
    def content(self) -> Json:
        """All of it as JSON: every run in full, with where it was read."""
        strategies = [{"label": entry.label, "runs": _with_sources(entry.runs)} for entry in self.strategies]
        parts = {name: _with_sources(getattr(self, name)) for name in ("unfinished", "failed")}
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"strategies": strategies} | parts

    @property
    def runs(self) -> list[Run]:
        """The runs of all strategies."""
        return [run for entry in self.strategies for run in entry.runs]

    @property
    def by_strategy(self) -> Mapping[str, StrategyRuns]:
        """The first row of each strategy, by its name; where it has several, their labels say which is which."""
        return {entry.runs[0].strategy: entry for entry in reversed(self.strategies)}

    @property
    def signs(self) -> list[int]:
        """Of each task, 1 where higher scores are better, else -1."""
        return [sign(metric) for metric in self.metric]

    @property
    def sign(self) -> int:
        """That of averages over tasks; 0 where tasks differ in it."""
        return sign(*self.metric)

    @property
    def scales(self) -> list[Scale]:
        """How the scores of each task are shown."""
        return [scale_of(metric) for metric in self.metric]

    @property
    def scale(self) -> Scale:
        """How averages over tasks are shown."""
        return scale_of(*self.metric)

    @property
    def best_floors(self) -> list[tuple[str, float]]:
        """Return of each task the name of its best floor, and its score; nothing where results do not say them."""
        if self.constant is None:
            return []
        named = {CONSTANT: self.constant, **self.learned_floors}
        floors = []
        for i, better in enumerate(self.signs):
            known = [(name, score) for name, scores in named.items() if (score := scores[i]) is not None]
            floors.append((max if better == 1 else min)(known, key=itemgetter(1)))
        return floors


def _with_sources(parts: Iterable[Record]) -> list[Json]:
    return [part.content | {"source": part.source} for part in parts]


def merge(results: Sequence[RunResults]) -> Comparison:
    """Bring the runs of several directories and seeds together.

    Runs of one strategy stand in one row, unless their `options` differ: then each configuration has its own. Where directories
    differ in shots or steps, every row says which it has.

    Args:
        results: what `load_run_results` returned, at least one.

    Raises:
        ReportError: the results must not be compared, or hold one strategy and seed twice with different
            outcomes; the message names both directories.
    """
    if not results:
        raise ReportError("There are no results to report on. Give at least one run directory.")
    several = len(results) > 1
    sources = tuple(
        result.source or (f"results {number}" if several else "") for number, result in enumerate(results, start=1)
    )
    first = results[0]
    for result, source in zip(results, sources, strict=True):
        if difference := next(_differences(first, result), None):
            raise ReportError(_APART.format(ours=sources[0], theirs=source, difference=difference[1]))
    telling = _telling(results)
    results = [result.from_source(source) for result, source in zip(results, sources, strict=True)]
    # strategy → its options as JSON → seed → run
    runs_of: dict[str, dict[str, dict[int, Run]]] = {}
    metric: tuple[list[str], str] | None = None
    for result in results:
        for run in result.runs:
            metric = metric or (run.metric, run.source)
            if run.metric != metric[0]:
                metrics = f"metrics are {', '.join(metric[0])} in one and {', '.join(run.metric)} in the other"
                raise ReportError(_APART.format(ours=metric[1], theirs=run.source, difference=metrics))
            own = {key: _stated(result, key) for key in telling} | run.options
            options = json.dumps(own, sort_keys=True)
            earlier = runs_of.setdefault(run.strategy, {}).setdefault(options, {}).setdefault(run.seed, run)
            if run.outcome != earlier.outcome:
                raise ReportError(
                    f"{run.strategy} with seed {run.seed} is in {earlier.source} and in {run.source}, with "
                    "different outcomes. Leave one of them out, or run with another seed."
                )
    return Comparison(
        stream=first.stream,
        tasks=tuple(first.tasks),
        metric=tuple(metric[0]) if metric else ("accuracy",) * len(first.tasks),
        settings=_shared_settings(results),
        constant=next((tuple(result.floors.constant) for result in results if result.floors), None),
        learned_floors={} if telling else _learned_floors(results) | _untrained(results),
        test_rows=first.test_rows,
        strategies=_with_intransigence(
            entry for strategy, variants in runs_of.items() for entry in _entries(strategy, variants, telling)
        ),
        unfinished=tuple(run for result in results for run in result.unfinished),
        failed=tuple(run for result in results for run in result.failed),
        sources=sources,
    )


def _entries(
    strategy: str, variants: Mapping[str, Mapping[int, Run]], telling: Sequence[str]
) -> Iterator[StrategyRuns]:
    """Yield a row for each configuration of a strategy."""
    options = [json.loads(variant) for variant in variants]
    for label, own, seeds in zip(labels_of(strategy, options, telling), options, variants.values(), strict=True):
        yield StrategyRuns(label, tuple(seeds[seed] for seed in sorted(seeds)), own)


def one_file(results: Sequence[RunResults]) -> str:
    """Return all runs of several directories as the text of one CSV file, with the settings of the first.

    Raises:
        ReportError: as `merge`, or there are two configurations of one strategy.
    """
    merged = merge(results)
    strategies = merged.strategies
    if len({entry.runs[0].strategy for entry in strategies}) < len(strategies) or _telling(results):
        raise ReportError(
            f"One CSV file holds one set-up and one configuration of a strategy, got "
            f"{', '.join(entry.label for entry in strategies)}. Write a file for each."
        )
    whole = results[0].with_runs([run.with_facts(**made_of(run)) for run in merged.runs])
    if whole.floors:
        whole = whole.with_facts(floors=whole.floors.with_facts(**_floors_by_seed(results)))
    return to_csv(whole)


def _learned_floors(results: Sequence[RunResults]) -> dict[str, tuple[float | None, ...]]:
    """Return the means over seeds of the floors that were fitted to training rows."""
    floors = {}
    for name, of_seeds in _floors_by_seed(results).items():
        columns = zip(*of_seeds.values(), strict=True)
        floors[LEARNED_FLOORS[name]] = tuple(
            None if None in scores else fmean(score for score in scores if score is not None) for scores in columns
        )
    return {name: scores for name, scores in floors.items() if any(score is not None for score in scores)}


def _untrained(results: Sequence[RunResults]) -> dict[str, tuple[float | None, ...]]:
    """Return what a model that writes texts scores before training, as means over runs: it may know the tasks already."""
    rows = [run.matrix[0] for result in results if result.model.get("readout") == "generate" for run in result.runs]
    if not rows or any(None in row for row in rows):
        return {}
    return {
        UNTRAINED: tuple(fmean(score for score in scores if score is not None) for scores in zip(*rows, strict=True))
    }


def _floors_by_seed(results: Sequence[RunResults]) -> dict[str, dict[str, list[float | None]]]:
    """Return the floors that were fitted to training rows: by name and seed, those of each task."""
    floors: dict[str, dict[str, list[float | None]]] = {}
    for name in LEARNED_FLOORS:
        for result in results:
            if result.floors and (of_seeds := getattr(result.floors, name)):
                floors[name] = floors.get(name, {}) | of_seeds
    return floors


# ---- what unit folders and other directories add --------------------------------------------------------


def reference_of(entry: StrategyRuns, run: Run, entries: Iterable[StrategyRuns]) -> tuple[StrategyRuns, Run] | None:
    """Return the fine-tuned models that a run is compared with, and their row, if they stand in another directory alone."""
    those = [each for each in entries if each.runs[0].strategy == REFERENCE]
    found = [(each, its) for each in those for its in each.runs if its.seed == run.seed]
    if run.strategy == REFERENCE or any(its.source == run.source for _, its in found):
        return None
    return next(((each, its) for each, its in found if _agree(entry, each)), None)


def _agree(entry: StrategyRuns, other: StrategyRuns) -> bool:
    both = entry.options.keys() & other.options.keys()
    return all(entry.options[key] == other.options[key] for key in both)


def _with_intransigence(entries: Iterable[StrategyRuns]) -> tuple[StrategyRuns, ...]:
    """Return the runs of strategies; those without intransigence have it, if a reference stands beside them."""
    entries = tuple(entries)

    def filled(entry: StrategyRuns, run: Run) -> Run:
        found = None if run.summary.intransigence is not None else reference_of(entry, run, entries)
        if found is None:
            return run
        _, its = found
        learned = np.diagonal(its.learning_matrix, offset=-1)
        summary: Any = summarize(run.matrix, np.array(run.ece, dtype=np.float64), learned, run.metric)  # type: ignore[arg-type]
        return run.with_facts(summary=run.summary.with_facts(intransigence=summary["intransigence"]))

    return tuple(replace(entry, runs=tuple(filled(entry, run) for run in entry.runs)) for entry in entries)


def with_files(comparison: Comparison) -> Comparison:
    """Return the comparison with the files of its units; runs without agreement have it, if these and a reference tell it."""
    tasks, read = comparison.tasks, dict[tuple[str, int], UnitFiles]()
    for entry in comparison.strategies:
        read |= {(entry.label, run.seed): read_unit_files(run, tasks) for run in entry.runs}

    def filled(entry: StrategyRuns, run: Run) -> Run:
        found = None if run.agreement else reference_of(entry, run, comparison.strategies)
        if found is None:
            return run
        own, others = (read[each.label, run.seed].answers for each in (entry, found[0]))
        pairs = [(own[task], others[task]) for task in tasks if task in own and task in others]
        if len(pairs) < len(tasks) or not all(np.array_equal(a.labels, b.labels) for a, b in pairs):
            return run
        return run.with_facts(agreement=[a.agreement(b) for a, b in pairs])

    entries = (
        replace(
            entry,
            runs=tuple(filled(entry, run) for run in entry.runs),
            files=tuple(read[entry.label, run.seed] for run in entry.runs),
        )
        for entry in comparison.strategies
    )
    return replace(comparison, strategies=tuple(entries))


# ---- merging --------------------------------------------------------------------------------------------


def same_rows(ours: RunResults, theirs: RunResults) -> bool:
    """Say whether two runs were scored on the same rows of the same tasks, whatever model learned them."""
    return not {"tasks", "scenario", "evaluated_on", "data", "metric"}.intersection(differing([ours, theirs]))


def differing(results: Sequence[RunResults]) -> list[str]:
    """List what keeps runs from being compared task by task; nothing where all of them can be."""
    first, metrics = results[0], {tuple(run.metric) for result in results for run in result.runs}
    keys = dict.fromkeys(key for result in results for key, _ in _differences(first, result))
    return [*keys, *(["metric"] if len(metrics) > 1 else [])]


def _differences(ours: RunResults, theirs: RunResults) -> Iterator[tuple[str, str]]:
    """Yield in which respects two runs differ so that they cannot be compared, and how, in the user's words."""
    both = [ours.content, theirs.content]
    for key in ("tasks", "scenario", "evaluated_on"):
        a, b = (each.get(key, USUAL.get(key)) for each in both)
        if a != b:
            yield key, f"{key.replace('_', ' ')}: {typed(a)} in one and {typed(b)} in the other"
    models = [ours.model, theirs.model]
    weights = [model.get("fingerprint") for model in models]
    parts = [_without(model, *_MAY_DIFFER, *(["name"] if all(weights) else [])) for model in models]
    if weights[0] != weights[1]:
        names = " and ".join(str(model.get("name")) for model in models)
        yield "model", f"the weights of their models, {names}, are not the same"
    elif parts[0] != parts[1]:
        yield "model", f"of their models, {_unlike(*parts)}"
    readouts = [{"readout": each.get("readout")} for each in both]
    if readouts[0] != readouts[1]:
        yield "readout", _unlike(*readouts)
    data = [_without(each.data, *_MAY_DIFFER) for each in (ours, theirs)]
    rows = [each.get("fingerprints") or {} for each in data]
    if rows[0] != rows[1] and all(isinstance(each, dict) for each in rows):
        tasks = [task for task in {**rows[0], **rows[1]} if rows[0].get(task) != rows[1].get(task)]
        yield "data", f"the rows of {', '.join(tasks)} are not the same"
    elif data[0] != data[1]:
        yield "data", f"of their data, {_unlike(*data)}"


def _without(table: Json, *keys: str) -> Json:
    return {key: value for key, value in table.items() if key not in keys}


def _unlike(ours: Json, theirs: Json) -> str:
    """Name the first key at which two objects differ, and both values."""
    key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
    return f"{key.replace('_', ' ')} is {brief(ours.get(key))} in one and {brief(theirs.get(key))} in the other"


def _stated(results: RunResults, key: str) -> Any:
    """Return what results say of the set-up, wherever they say it."""
    places = (results.content, results.data, results.model, results.content.get("set") or {})
    return next((place[key] for place in places if place.get(key) is not None), None)


def _telling(results: Sequence[RunResults]) -> list[str]:
    """Return what differs between the set-ups of several directories."""
    return [key for key in _MAY_DIFFER if any(_stated(each, key) != _stated(results[0], key) for each in results)]


def _shared_settings(results: Sequence[RunResults]) -> Json:
    """Return what all results say alike of the set-up."""
    first, *others = map(_settings, results)
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _settings(results: RunResults) -> Json:
    """Return what results say of the set-up, for display."""
    settings = {"model": results.model.get("name")}
    stated = ("scenario", "evaluated_on", "readout", "shots", "steps", "sparsity")
    for key in (*stated, *(results.content.get("set") or ())):
        settings[key] = _stated(results, key)
    return {
        key: value
        for key, value in settings.items()
        if isinstance(value, str | int | float) and value != USUAL.get(key)
    }
