"""One run of the command line: a stream, some strategies, some seeds. A unit is one strategy with one seed.

OUT/report.md, OUT/report.html        the tables; the page: figures and tables
OUT/fine-tuned/                       each task's fine-tuned model, shared by the strategies
OUT/STRATEGY/seed-S/                  ledger.safetensors or checkpoint.safetensors, predictions.safetensors (the last
                                      row's logits and labels on every task's test rows), seconds-per-task.json
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.core.regions import distribution
from forgetfree.errors import Faults, RunError
from forgetfree.files import write_json
from forgetfree.jobs.config import InMemory, with_precision
from forgetfree.jobs.diagnostics import write_floors
from forgetfree.jobs.job import Job
from forgetfree.jobs.predictions import save_predictions
from forgetfree.jobs.run_config import CheckedRun, RunConfig, RunOptions
from forgetfree.jobs.running.directory import model_and_data
from forgetfree.jobs.running.environment import left_out_of, tell_shared_labels, tell_shared_rows
from forgetfree.jobs.running.unit import Json
from forgetfree.jobs.running.workload import PlannedUnit, Workload
from forgetfree.jobs.stream_learner import Row, StreamLearner
from forgetfree.json_file import read_json
from forgetfree.options import recorded
from forgetfree.results.answers import constant_scores
from forgetfree.results.parameter_kinds import layer_of, parameter_kind
from forgetfree.results.scores import SCORES_FILE, Score, write_scores
from forgetfree.results.unit_folder import MODELS, SECONDS_PER_TASK, size_and_sha256
from forgetfree.serve.source import run_binding
from forgetfree.tasks import GREEDY, seeded
from forgetfree.terminal import tell_note
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.monitor import Monitor, told_seconds

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.core.parameters import ParameterSpace
    from forgetfree.data.rows import TaskRows
    from forgetfree.ledger import Ledger
    from forgetfree.models.loading import LoadedModel
    from forgetfree.results.answers import Answers

#: Settings that say nothing of the outcome, or that results.json says elsewhere.
_OF_THE_PLACE = ("cache", "threads", "evaluate_on", "scenario")


_REMEDY = "Restore it from a copy, or start again with another --out."


class RunJob(Job[RunConfig]):
    """A run. Its strategies with one seed learn one stream, one after the other, on one model.

    Args:
        config: what was asked for.
        in_memory: objects in the place of names.
    """

    growing = ("strategy", "seed")
    learns_stream = True

    def __init__(self, config: RunConfig, in_memory: InMemory | None = None) -> None:
        in_memory = in_memory or InMemory()
        config = with_precision(config, in_memory)
        checked = config.checked(in_memory.strategies)
        self.common = checked.run
        precisions = [name for each in checked.options.values() for name in each.precisions]
        super().__init__(config, checked, self.common, precisions, in_memory)
        self.learner = StreamLearner(config, checked, self.in_memory, self.cache)

    @classmethod
    def workload(cls, config: RunConfig, checked: CheckedRun | None, faults: Faults) -> Workload:
        """Return every strategy with every seed."""
        common = checked.run if checked else RunOptions()
        workload = Workload(config.model, config.readout, config.names, common)
        workload.held_aside = config.held_aside
        if checked is not None:
            every = product(config.seeds, checked.classes)
            workload.units = [_planned(name, config.names, checked, config.shots, seed) for seed, name in every]
        return workload

    def keys(self) -> Json:
        """Return every strategy, seed after seed."""
        return {
            f"{name}/seed-{seed}": {"strategy": name, "seed": seed}
            for seed in self.config.seeds
            for name in self.config.strategy_names
        }

    def describe(self) -> Json:
        """Describe tasks, model and data, and check the options against the stream."""
        from forgetfree.continual.construction import check_options  # with Avalanche

        tell_shared_rows(self.learner.tasks, self.common.evaluate_on)
        if self.common.scenario == "domain":
            tell_shared_labels(self.learner.tasks)
        stream = self.learner.stream(self.config.seeds[0])
        if self.common.decoding != GREEDY and all(task.definition.decoding == GREEDY for task in stream.tasks):
            tell_note(
                "num_beams, sampling_temperature and top_p have no effect: no task of the stream is answered by texts "
                "that are free."
            )
        for name, strategy in self.checked.classes.items():
            check_options(strategy, self.checked.options[name], stream)
        model, unanswered = self.config.model, [task.unanswered for task in stream.tasks]
        metric, task_known = [task.definition.metric for task in stream.tasks], stream.scenario == "task"
        description, about = model_and_data(model, self.request()["model"], stream.loaded, stream.tasks)
        if self.common.sampling_seed is None:  # what is written for all seeds names none of them
            description["tasks"] = [seeded(task.definition, 0, None).fields for task in stream.tasks]
        aside = self.learner.texts_aside(self.config.seeds[0])
        apart = aside.notes(self.learner.tasks) if aside else []
        tuned = self.learner.fine_tuned
        for note in (stream.loaded.note, tuned.note if tuned else "", *(task.note for task in stream.tasks), *apart):
            tell_note(note)
        return {
            **description,
            **({"held_aside": aside.rows.digest} if aside else {}),
            **({"fine_tuned": {"architecture": tuned.architecture, "fingerprint": tuned.fingerprint}} if tuned else {}),
            "scenario": stream.scenario,
            "options": {name: recorded(options) for name, options in self.checked.options.items()},
            "about": {
                "stream": self.config.stream.rstrip(","),
                "tasks": [task.name for task in stream.tasks],
                "scenario": stream.scenario,
                "evaluated_on": self.common.evaluate_on,
                "model": about,
                "data": {
                    "shots": self.config.shots,
                    "steps": shared_value(options.steps for options in self.checked.options.values()),
                    "fingerprints": {task.name: task.fingerprint for task in stream.tasks},
                    "test_rows": {task.name: len(task.test) for task in stream.tasks},
                    **left_out_of(self.learner.tasks),
                },
                "floors": {"constant": constant_scores(unanswered, metric, task_known=task_known)},
                "set": {key: value for key, value in self.config.settings.items() if key not in _OF_THE_PLACE},
                "shared_rows": {rows.task.name: rows.shared for rows in self.learner.tasks},
            },
        }

    def space(self) -> ParameterSpace:
        """Return that of the stream's model."""
        return self.learner.stream(self.config.seeds[0]).model.space()

    # -- A unit ----------------------------------------------------------------------------------------------

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Learn the stream, and write scores, predictions, and what the strategy keeps."""
        tasks, scores = self.learner.stream(key["seed"]).tasks, self.scored(key)

        known: dict[int, list[tuple[str, float]]] = {}  # most answers stay the same objects from row to row

        def measured(answers: Answers, metric: str) -> list[tuple[str, float]]:
            if id(answers) not in known:
                known[id(answers)] = [(metric, answers.score(metric)), *answers.more_scores().items()]
            return known[id(answers)]

        def write(rows: Sequence[Row]) -> None:
            more = [
                Score(key, task.name, len(rows) - 1, metric, value, len(task.test))
                for task in tasks
                if task.name in rows[-1]
                for metric, value in measured(rows[-1][task.name], task.definition.metric)
            ]
            scores.extend(more)
            scores.sort(key=lambda score: score.after)
            write_scores(directory / SCORES_FILE, scores)
            monitor.scored(more)

        from forgetfree.jobs.diagnostics import loss_before, losses_after, readouts_again, right_rows, temperatures

        bound, texts = self._bound(key), self.learner.texts_aside(key["seed"])
        stream, options = self.learner.stream(key["seed"]), self.checked.options[key["strategy"]]
        before = texts and loss_before(stream, texts, options, self.device)
        try:
            learned = self.learner.learn(key["strategy"], key["seed"], monitor, directory, write)
        except Exception:
            self._write_floors(key, directory)
            raise
        self._write_floors(key, directory)  # after learning, whose losses are awaited
        strategy = learned.strategy
        by_task: Json = {"updates": {task.name: strategy.updates[task.name] for task in tasks}}
        by_task |= right_rows(tasks, learned.rows[-1])
        by_task |= temperatures(strategy, learned.rows[-1]) if self.common.temperature_scaling else {}
        by_task |= {"readout_again": readouts_again(strategy)} if self.common.readout_again else {}
        aside = texts and {"before": before, **losses_after(strategy, texts), **texts.counts}
        save_predictions(directory, learned.rows[-1], self.learner.texts_before(key, learned))
        write_json(directory / SECONDS_PER_TASK, learned.seconds)
        return {
            "options": recorded(strategy.options),
            "ledger": ledger_summary(strategy.ledger),
            "kept_bytes": learned.kept_bytes,
            "by_task": by_task,
            **({"held_aside": aside} if aside else {}),
            "bound": bound,
            **models_of(directory, self.cache),
            "extra": strategy.extra_results() | ({"broken_claims": learned.broken} if learned.broken else {}),
            "seconds": told_seconds(strategy.seconds),
        }

    def _bound(self, key: Mapping[str, Any]) -> Json:
        """Return what the answers of a unit depend on besides what its strategy keeps."""
        from forgetfree.continual.task_inference import inference_of

        stream, options = self.learner.stream(key["seed"]), self.checked.options[key["strategy"]]
        binding, inference = stream.loaded.binding(options.answering["precision"]), inference_of(options, stream)
        return run_binding((task.definition for task in stream.tasks), binding, stream.scenario == "class", inference)

    def _write_floors(self, key: Mapping[str, Any], directory: Path) -> None:
        """Measure the floors of a seed, which are the same for all strategies: the first one does."""
        if key["strategy"] == self.config.strategy_names[0]:
            write_floors(directory, self.floors(key["seed"]))

    def floors(self, seed: int) -> Json:
        """Return the scores that take no fine-tuning, beside those of a constant answer."""
        from forgetfree.jobs.diagnostics import floors

        common, learner = self.common, self.learner
        if common.floors == "constant":
            return {}
        probe = self.device if common.floors == "probe" else None
        return floors(learner.stream(seed), learner.tasks, self.config.shots, common.or_fewer, common.test_limit, probe)

    def scored(self, key: Mapping[str, Any]) -> list[Score]:
        """Return the scores of a unit from before where it begins."""
        return []


def _planned(name: str, tasks: tuple[str, ...], checked: CheckedRun, shots: int | None, seed: int) -> PlannedUnit:
    """Return the unit of a strategy and a seed, before it begins."""
    strategy, options = checked.classes[name], checked.options[name]
    return PlannedUnit(
        f"{name}/seed-{seed}",
        name,
        tasks,
        options,
        partial(_learn_first, strategy, checked.run, shots, seed),
        shots,
        seed,
        sparsities=(options.sparsity,) if isinstance(options, LocalizationOptions) else (),
        check=strategy.check,
    )


def _learn_first(
    strategy: type[ContinualStrategy],
    run: RunOptions,
    shots: int | None,
    seed: int,
    loaded: LoadedModel,
    rows: TaskRows,
    options: Any,
    device: str,
    monitor: Monitor,
) -> None:
    """Let a strategy learn one task, and keep nothing."""
    from forgetfree.continual.streams import make_stream

    drawn: Json = {"shots": shots, "or_fewer": run.or_fewer, "seed": seed, "test_limit": 1}
    stream = make_stream(rows.task.name, [rows], loaded, **drawn)
    learner = strategy(stream=stream, options=options, seed=seed, device=device, monitor=monitor)
    learner.train(stream.benchmark.train_stream[0])


def shared_value(values: Iterable[Any]) -> Any:
    """Return the value that all have; ``None`` where they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def models_of(directory: Path, store: Path) -> Json:
    """Return under `MODELS` size and SHA-256 of the fine-tuned models that a unit's fine-tuned.json names in the store."""
    try:
        keys = read_json(directory / "fine-tuned.json", RunError, "")
    except RunError:
        return {}
    files = [store / f"{key}.safetensors" for key in keys.values()]
    return {MODELS: {path.name: size_and_sha256(path) for path in files if path.is_file()}}


def ledger_summary(ledger: Ledger | None) -> dict[str, Any] | None:
    """Return what results.json says of a ledger."""
    if ledger is None:
        return None
    return {
        "tasks": ledger.tasks,
        "composition": ledger.composition,
        **({"alone": [record.alone for record in ledger.records]} if ledger.composition == "auto" else {}),
        "region_size": [len(record.region) for record in ledger.records],
        "owned_size": [len(record.owned.region) for record in ledger.records],
        "bytes": ledger.size_in_bytes,
        "overlap": ledger.overlap(),
        "places": _places(ledger),
    }


def _places(ledger: Ledger) -> list[Json]:
    """Return how many entries of each layer and kind the space has, and how many of them each task owns."""
    regions = [record.owned.region for record in ledger.records]
    owned = [distribution(region, ledger.space, _place) for region in regions]
    sizes = Counter[tuple[str, str]]()
    for tensor in ledger.space.tensors:
        sizes[_place(tensor.name)] += tensor.size
    return [
        {"layer": layer, "kind": kind, "entries": size, "owned": [counts[layer, kind] for counts in owned]}
        for (layer, kind), size in sizes.items()
    ]


def _place(name: str) -> tuple[str, str]:
    return layer_of(name), parameter_kind(name)
