"""What config.json says of the tasks, the data and the model of a run; what results.json begins with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from forgetfree.display import tell_note
from forgetfree.jobs.environment import left_out_of, tell_shared_labels, tell_shared_rows
from forgetfree.options import recorded
from forgetfree.results.answers import constant_scores

if TYPE_CHECKING:
    from forgetfree.continual.streams import Stream
    from forgetfree.jobs.stream_loading import StreamLoader

Json = dict[str, Any]
#: Settings that say nothing of the outcome, or that results.json says elsewhere.
_OF_THE_PLACE = ("cache", "threads", "evaluate_on", "scenario")


def describe(loader: StreamLoader) -> Json:
    """Load and check what the units need, before anything is trained, and describe it; what is to be known is told on stderr.

    When the run is resumed, ``model``, ``tasks`` and ``data`` are compared; ``about`` begins results.json.
    """
    from forgetfree.continual.construction import check_options  # with Avalanche

    config, common = loader.config, loader.config.common
    tell_shared_rows(loader.tasks, common.evaluate_on)
    if common.scenario == "domain":
        tell_shared_labels(loader.tasks)
    stream, tuned = loader.stream(config.seeds[0]), loader.fine_tuned
    for name, strategy in config.classes.items():
        check_options(strategy, config.options[name], stream)
    aside = loader.held_out_texts(config.seeds[0])
    apart = aside.notes(loader.tasks) if aside else []
    for note in (stream.loaded.note, tuned.note if tuned else "", *(task.note for task in stream.tasks), *apart):
        tell_note(note)
    definitions = [task.definition for task in stream.tasks]
    metric, unanswered = [each.metric for each in definitions], [task.unanswered for task in stream.tasks]
    floor = constant_scores(unanswered, metric, task_known=stream.scenario == "task")
    model, about = _model(loader, stream)
    return {
        "model": model,
        "tasks": [each.fields for each in definitions],
        "data": _data(stream),
        **({"held_aside": aside.rows.digest} if aside else {}),
        **({"fine_tuned": {"architecture": tuned.architecture, "fingerprint": tuned.fingerprint}} if tuned else {}),
        "scenario": stream.scenario,
        "options": {name: recorded(options) for name, options in config.options.items()},
        "about": {
            "stream": config.stream.rstrip(","),
            "tasks": [task.name for task in stream.tasks],
            "scenario": stream.scenario,
            "evaluated_on": common.evaluate_on,
            "model": about,
            "data": {
                "shots": config.shots,
                "steps": _shared_value(options.steps for options in config.options.values()),
                "fingerprints": {task.name: task.fingerprint for task in stream.tasks},
                "test_rows": {task.name: len(task.test) for task in stream.tasks},
                **left_out_of(loader.tasks),
            },
            "floors": {"constant": floor},
            "set": {key: value for key, value in config.settings.items() if key not in _OF_THE_PLACE},
            "shared_rows": {rows.task.name: rows.shared for rows in loader.tasks},
        },
    }


def _model(loader: StreamLoader, stream: Stream) -> tuple[Json, Json]:
    """Return what config.json, and what results.json says of the model."""
    from forgetfree.models.loading import config_of

    loaded, shown = stream.loaded, loader.config.section()["model"]
    same = {"fingerprint": loaded.fingerprint, "readout": loaded.readout}
    backbone = loaded.model.backbone
    model = {"name": shown, **same, "max_length": loaded.max_length, "config": config_of(backbone)}
    size = sum(parameter.numel() for parameter in backbone.parameters())
    about = {"name": loader.config.model, **same, "parameters": size, "graftable": len(loaded.model.space())}
    return model, about


def _data(stream: Stream) -> Json:
    """Return what config.json says of each task's rows."""
    return {
        task.name: {
            "fingerprint": task.fingerprint,
            "encoded": task.test.digest,
            **{split: len(getattr(task, split)) for split in ("train", "validation", "test")},
        }
        for task in stream.tasks
    }


def _shared_value(values: Iterable[Any]) -> Any:
    """Return the value that all have; ``None`` where they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
