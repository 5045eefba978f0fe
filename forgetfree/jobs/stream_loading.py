"""The stream of a run: its tasks, read once per process, and its model; the description of both for config.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.data.encoding import drop_bad_rows
from forgetfree.device import find_device
from forgetfree.display import listed, tell_note
from forgetfree.kinds.kind import kind_of, readout_for
from forgetfree.options import recorded
from forgetfree.results.answers import Answers, constant_scores
from forgetfree.tasks import TaskDefinition

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy, StreamAnswers
    from forgetfree.continual.stream import Stream
    from forgetfree.core.readout_model import ReadoutModel
    from forgetfree.data.bad_rows import DataFaults
    from forgetfree.data.rows import TaskRows
    from forgetfree.jobs.config import RunConfig, RunOptions
    from forgetfree.models.fine_tuned_directory import FineTunedModel
    from forgetfree.models.loading import LoadedModel
    from forgetfree.training.held_out_loss import HeldOutTexts
    from forgetfree.training.monitor import Monitor

Json = dict[str, Any]
#: Settings that do not affect the results, or that results.json has elsewhere.
_OF_THE_PLACE = ("cache", "threads", "evaluate_on", "scenario", "steps")


class StreamLoader:
    """Loads the tasks of a run, the stream of a seed, and its strategies, which learn one after the other on one model.

    Args:
        config: the requested configuration.

    Attributes:
        fine_tuned: the model of ``--fine-tuned``, once the stream is loaded.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.fine_tuned: FineTunedModel | None = None
        self._stream: Stream | None = None
        self._fresh: LoadedModel | None = None  # the model that checked the rows, for the first stream
        # The answers before training, by the batch size they are computed in.
        self._first_rows: dict[int, dict[str, Answers]] = {}

    def unload(self) -> None:
        """Release all loaded objects, because worker processes load their own."""
        self._stream, self._fresh = None, None
        self._first_rows.clear()
        for name in ("read", "tasks"):
            vars(self).pop(name, None)

    @property
    def device(self) -> str:
        """The device on which this process computes."""
        return find_device(self.config.device)

    @property
    def store(self) -> Path:
        """The directory of fine-tuned models that strategies share."""
        return Path(self.config.common.cache or Path(self.config.out) / "fine-tuned")

    @cached_property
    def read(self) -> tuple[list[TaskRows], DataFaults]:
        """The tasks that can be read, with all their rows, and the faults of the others; the data are read only once."""
        from forgetfree.data.sources import read_tasks

        config = self.config
        return read_tasks(config.stream, config.rows, config.common.evaluate_on, config.read_options)

    @cached_property
    def tasks(self) -> list[TaskRows]:
        """The tasks of the stream with all their rows."""
        tasks, faults = self.read
        faults.report()
        if any(kind_of(rows.task).answer == "text" for rows in tasks):  # prompts may be too long for a model
            self._fresh = fresh = self.load([rows.task for rows in tasks])
            tasks = [drop_bad_rows(rows, fresh.encoder(rows.task), self.config.skip_bad_rows) for rows in tasks]
        return tasks

    def load(self, tasks: Sequence[TaskDefinition]) -> LoadedModel:
        """Load the model for tasks, or the model of ``--fine-tuned`` with its readout."""
        config, common = self.config, self.config.common
        arguments: dict[str, Any] = {"graftable": common.graftable, "max_length": common.max_length}
        if config.fine_tuned is not None:
            from forgetfree.models.fine_tuned_directory import load_fine_tuned

            arguments |= {"readout": config.readout}
            self.fine_tuned = load_fine_tuned(config.fine_tuned, config.model, tasks[0], **arguments)
            return self.fine_tuned.loaded
        from forgetfree.models.loading import load_model

        arguments |= {"dtype": common.dtype, "tokenizer": config.objects.tokenizer}
        return load_model(config.network, readout_for(config.readout, tasks), tasks=tasks, **arguments)

    def stream(self, seed: int) -> Stream:
        """Return the stream of a seed, on its own model; the last stream is kept."""
        from forgetfree.continual.stream import make_stream

        if self._stream is None or self._stream.seed != seed:
            self._stream = None
            self._first_rows.clear()
            config, common = self.config, self.config.common
            drawn: dict[str, Any] = {
                "shots": config.shots,
                "seed": seed,
                "test_limit": common.test_limit,
                "scenario": common.scenario,
            }
            model, self._fresh = self._fresh or self.load([rows.task for rows in self.tasks]), None
            self._stream = make_stream(config.stream, self.tasks, model, **drawn)
        return self._stream

    def held_out_texts(self, seed: int) -> HeldOutTexts | None:
        """Return the held-out texts, encoded for the stream of a seed; ``None`` if none are given."""
        config = self.config
        if config.held_out is None:
            return None
        from forgetfree.training.held_out_loss import HeldOutTexts

        loaded = self.stream(seed).loaded
        return HeldOutTexts.of(config.held_out, config.rows, loaded, config.common.test_limit, config.read_options)

    def strategy(self, name: str, seed: int, monitor: Monitor) -> ContinualStrategy:
        """Return a new strategy on the stream of a seed."""
        from forgetfree.models.state import StateStore

        stream, options = self.stream(seed), self.config.options[name]
        strategy: ContinualStrategy = self.config.classes[name](
            stream=stream,
            options=options,
            seed=seed,
            device=self.device,
            monitor=monitor,
            store=StateStore(self.store),
        )
        if self.fine_tuned is not None:  # stored in place of a model that would be trained here
            key = strategy.bench(stream.tasks[0]).key(strategy.options)
            self.fine_tuned.put_into(strategy.store, key, stream.pre_trained)
        return strategy

    def answers_unlearned(self, model: ReadoutModel) -> bool:
        """Return whether tasks are answered before they are learned; default: if no readout has to be learned first."""
        upper = self.config.common.upper_triangle
        return not model.learned_readouts() if upper is None else upper

    def before_training(self, name: str, answers: StreamAnswers) -> dict[str, Answers]:
        """Return the answers before training. Built-in strategies all answer with θ_pre then, so one evaluation serves them."""
        if name not in registry.STRATEGIES:
            return answers.before()
        rows = self.config.options[name].evaluation_batch_size
        self._first_rows[rows] = answers.before(self._first_rows.get(rows))
        return dict(self._first_rows[rows])


# -- The description for config.json ---------------------------------------------------------------------


def describe(loader: StreamLoader) -> Json:
    """Load, check and describe the inputs of the units, before anything is trained; print notes about them on stderr.

    When the run is resumed, ``model``, ``tasks`` and ``data`` are compared; ``about`` begins results.json.
    """
    from forgetfree.continual.strategy import check_options  # with Avalanche
    from forgetfree.models.loading import config_of

    config, common = loader.config, loader.config.common
    steps = {options.steps for options in config.options.values()}
    _tell_of_rows(loader.tasks, common)
    stream, tuned = loader.stream(config.seed[0]), loader.fine_tuned
    for name, strategy in config.classes.items():
        check_options(strategy, config.options[name], stream)
    aside = loader.held_out_texts(config.seed[0])
    apart = aside.notes(loader.tasks) if aside else []
    for note in (
        stream.loaded.note,
        tuned.note if tuned else "",
        *(note for task in stream.tasks for note in (task.note, task.few_rows)),
        *apart,
        _precision_note(loader),
    ):
        tell_note(note)
    definitions = [task.definition for task in stream.tasks]
    metric, unanswered = [each.metric for each in definitions], [task.unanswered for task in stream.tasks]
    floor = constant_scores(unanswered, metric, task_known=stream.scenario == "task")
    loaded, left_out = stream.loaded, {rows.task.name: rows.left_out for rows in loader.tasks if rows.left_out}
    backbone, same = loaded.model.backbone, {"fingerprint": loaded.fingerprint, "readout": loaded.readout}
    size = sum(parameter.numel() for parameter in backbone.parameters())
    return {
        "model": {
            "name": config.section()["model"],
            **same,
            "max_length": loaded.max_length,
            "config": config_of(backbone),
        },
        "tasks": [each.fields for each in definitions],
        "data": {
            task.name: {
                "fingerprint": task.fingerprint,
                "encoded": task.test.digest,
                **{split: len(getattr(task, split)) for split in ("train", "validation", "test")},
                **({"mapped": list(rows.mapped)} if rows.mapped else {}),
            }
            for task, rows in zip(stream.tasks, loader.tasks, strict=True)
        },
        **({"held_out": aside.rows.digest} if aside else {}),
        **({"fine_tuned": {"architecture": tuned.architecture, "fingerprint": tuned.fingerprint}} if tuned else {}),
        "scenario": stream.scenario,
        "options": {name: recorded(options) for name, options in config.options.items()},
        "about": {
            "stream": config.stream.rstrip(","),
            "tasks": [task.name for task in stream.tasks],
            "scenario": stream.scenario,
            "evaluated_on": common.evaluate_on,
            "model": {"name": config.model, **same, "parameters": size, "graftable": len(loaded.model.space())},
            "data": {
                "shots": config.shots,
                "steps": steps.pop() if len(steps) == 1 else None,
                "fingerprints": {task.name: task.fingerprint for task in stream.tasks},
                "test_rows": {task.name: len(task.test) for task in stream.tasks},
                **({"left_out": left_out} if left_out else {}),
            },
            "floors": {"constant": floor},
            "set": {key: value for key, value in config.set.items() if key not in _OF_THE_PLACE},
            "shared_rows": {rows.task.name: rows.shared for rows in loader.tasks},
        },
    }


def _precision_note(loader: StreamLoader) -> str:
    """Return a note that another precision may be faster, if training computes in float32 on a GPU; else an empty text."""
    plain = [name for name, options in loader.config.options.items() if options.precision == "fp32"]
    weights = loader.stream(loader.config.seed[0]).loaded.model.space().dtype
    if not plain or not loader.device.startswith("cuda") or weights.itemsize < 4:
        return ""
    return (
        f"{listed(plain)}: training computes in float32. --precision auto measures whether bf16 is faster on this GPU."
    )


def _tell_of_rows(tasks: Sequence[TaskRows], common: RunOptions) -> None:
    """Print notes about the rows and labels of the tasks, such as that test rows are also training rows."""
    for rows in tasks:
        for note in filter(None, (*rows.notes, rows.shared_note(common.evaluate_on))):
            tell_note(note)
    labels = {rows.task.labels: rows.task.name for rows in tasks}
    if common.scenario == "domain" and len(labels) > 1:
        named = "; ".join(f"{name}: {shorten(', '.join(each), 60)}" for each, name in labels.items())
        note = (
            "with scenario=domain, all tasks share one readout, whose first output is the first label of each task "
            f"({named})."
        )
        tell_note(f"{note} If these labels mean different things, use scenario=class.")
