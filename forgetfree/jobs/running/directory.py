"""The directory of a job: how its units stand, and what must be as it was when the job is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import recipes, registry
from forgetfree.device import kind_of_device
from forgetfree.display import counted
from forgetfree.errors import RunError, UsageError
from forgetfree.jobs.running.checkpoints import CHECKPOINT, in_a_phase
from forgetfree.jobs.running.environment import versions
from forgetfree.jobs.running.unit import Json, Unit, named
from forgetfree.jobs.stream_learner import tasks_learned
from forgetfree.json_file import check, check_fields, read_json
from forgetfree.options import flag_of, name_of_function, typed
from forgetfree.results.config_file import load_run

if TYPE_CHECKING:
    from forgetfree.jobs.job import Job
    from forgetfree.models.loading import LoadedModel
    from forgetfree.training.encoded_task import EncodedTask

#: As many units as a message names.
_NAMED = 8


def units_in(out: Path, keys: Mapping[str, Json]) -> list[Unit]:
    """Return the units of a directory, of which config.json has the keys."""
    return [Unit(key, out / folder) for folder, key in keys.items()]


# -- How units stand -------------------------------------------------------------------------------------


#: How a unit stands.
_STANDINGS = (
    "finished",
    "damaged, begins again",
    "goes on",
    "will start again",
    "failed, begins again",
    "not begun",
)


def holdings(job: type[Job[Any]], out: Path) -> str:
    """Say what a job that was cut short has left behind, and how to go on; an empty text where it left nothing."""
    if not (units := _by_standing(job, out)):
        return ""
    parts = [f"finished: {_listed(units['finished'])}"]
    more = ("damaged, begins again", "goes on", "will start again")
    parts += [f"{what}: {_listed(units[what])}" for what in more if units[what]]
    return f"{out} holds what was computed ({'; '.join(parts)}); the same command with --resume --out {out} goes on."


def resumption(job: type[Job[Any]], out: Path) -> str:
    """Say where a job that is resumed goes on; an empty text where nothing was begun."""
    parts = [f"{what}: {_listed(names)}" for what, names in _by_standing(job, out).items() if names]
    return f"Going on in {out}; {'; '.join(parts)}" if parts else ""


def _by_standing(job: type[Job[Any]], out: Path) -> dict[str, list[str]]:
    """Return the names of a directory's units by how they stand; nothing where there is no job."""
    try:
        config = read_job_config(out)
    except RunError:
        return {}
    units: dict[str, list[str]] = {what: [] for what in _STANDINGS}
    for unit in units_in(out, config["units"]):
        record = unit.record()
        if record and record["status"] != "done":
            units["failed, begins again"].append(str(unit))
        elif record and (damaged := unit.damaged(record)):
            units["damaged, begins again"].append(f"{unit} ({', '.join(damaged)})")
        elif record:
            units["finished"].append(str(unit))
        elif unit.is_begun:
            where = _standing(unit, len(config["tasks"]) if job.learns_stream else None)
            units["goes on" if where else "will start again"].append(f"{unit}{where}")
        else:
            units["not begun"].append(str(unit))
    return units


def _standing(unit: Unit, tasks: int | None) -> str:
    """Say from where a unit that was cut short goes on; an empty text where it starts again.

    Args:
        unit: it.
        tasks: of the stream that it learns; ``None``: it is about one task.
    """
    folder, midst = unit.directory / CHECKPOINT, in_a_phase(unit.directory)
    if tasks is None:
        return " in the midst of its training" if midst else ""
    learned = max(map(tasks_learned, folder.iterdir()), default=0) if folder.is_dir() else 0
    if midst:
        return f" in the midst of task {learned + 1} of {tasks}"
    return f" after {learned} of {counted(tasks, 'task')}" if learned else ""


def failures(results: Json) -> list[str]:
    """Return a message for each unit that failed."""
    return [
        f"{named({key: value for key, value in unit.items() if key not in ('error', 'after')}, ', ')}: {unit['error']}"
        for unit in results["failed"]
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing" if len(names) <= _NAMED else f"{len(names)} units"


# -- config.json, and what must be as it was when the job is resumed --------------------------------------

_CONFIG: dict[str, type] = {
    **{"machine": dict, "model": dict, "tasks": list, "data": dict, "about": dict, "units": dict},
}
#: Whose versions decide bits.
_PACKAGES = ("forgetfree", "torch", "transformers")
#: What may be there beside model, tasks and data.
_BESIDE = {"fine_tuned": "the fine-tuned model", "held_aside": "the texts of --held-aside"}
_REMEDY = "Start again with another --out."


def read_job_config(out: Path, kind: str | None = None, allow_changed: bool = False) -> Json:
    """Read the config.json of a job, and check it.

    Args:
        out: its directory.
        kind: the kind of job that is to go on with it; default: it is only read.
        allow_changed: go on with other versions, too.

    Raises:
        RunError: it is missing or damaged, or another version or kind of job wrote it.
    """

    def check_config(config: Any) -> None:
        check_fields("", config, {kind: dict} if kind else {})
        if kind:
            check_fields("", {"versions": {}} | config, {"versions": dict})
            refuse_changes(out, [], [] if allow_changed else _changed_versions(config))
        check_fields("", config, _CONFIG)
        for key in ("data", "units"):
            right = all(isinstance(value, dict) for value in config[key].values())
            check(key, config[key], right, "an object of objects")
        check("the content", sorted(config), "run" in config, "a run")

    config: Json = read_json(out / "config.json", RunError, _REMEDY, check_config, signed=True)
    return load_run(out, _REMEDY) if kind == "run" else config


def model_and_data(name: str, shown: str, loaded: LoadedModel, tasks: Sequence[EncodedTask]) -> tuple[Json, Json]:
    """Describe a model and encoded tasks.

    Args:
        name: of the model, as it is given.
        shown: its name in a file of the job's directory.
        loaded: the model.
        tasks: the tasks.

    Returns:
        ``model``, ``tasks`` and ``data`` of config.json; ``model`` of results.json.
    """
    from forgetfree.models.loading import config_of

    same = {"fingerprint": loaded.fingerprint, "readout": loaded.readout}
    backbone = loaded.model.backbone
    model = {"name": shown, **same, "max_length": loaded.max_length, "config": config_of(backbone)}
    data = {
        task.name: {
            "fingerprint": task.fingerprint,
            "encoded": task.test.digest,
            **{split: len(getattr(task, split)) for split in ("train", "validation", "test")},
        }
        for task in tasks
    }
    size = sum(parameter.numel() for parameter in backbone.parameters())
    about = {"name": name, **same, "parameters": size, "graftable": len(loaded.model.space())}
    return {"model": model, "tasks": [task.definition.fields for task in tasks], "data": data}, about


def as_json(value: Any) -> Any:
    """Return the value as a JSON file gives it back, functions as their names."""
    return json.loads(json.dumps(value, default=name_of_function))


def merged_request(out: Path, before: Json, now: Json, growing: Collection[str], keys: Mapping[str, str]) -> Json:
    """Return what was asked for in a directory, now and before.

    Args:
        out: the directory.
        before: what was asked for when it was begun.
        now: what is asked for.
        growing: lists that may be longer now.
        keys: the names of options as they are typed, by the names of their fields.

    Raises:
        UsageError: something else is asked for.
    """

    def name(key: str) -> str:
        return key if key == "stream" else f"--{keys.get(key, key).replace('_', '-')}"

    differ = _differing(before, _without_new_strategies(before, now, growing), growing, name)
    lists = {}
    classes = {registry.strategy_name(each): each for each in before.get("strategy", ()) if isinstance(each, str)}
    for each in now.get("strategy", ()) if "strategy" in growing else ():
        if (was := classes.get(registry.strategy_name(each), each)) != each:
            differ.append(f"--strategy {each} (was {was})")
    for key in growing:
        earlier = before[key] if isinstance(before.get(key), list) else []
        lists[key] = [*earlier, *(each for each in now[key] if each not in earlier)]
    if differ:
        raise UsageError(
            f"--resume needs the configuration that {out} was begun with; these differ: {', '.join(differ)}. Start again with "
            f"another --out, or give the old options, which {out / 'config.json'} has."
        )
    return now | lists


def _without_new_strategies(before: Json, now: Json, growing: Collection[str]) -> Json:
    """Return what is asked for without the options of strategies that join now: nothing there was made with others."""
    if "strategy" not in growing:
        return now
    earlier = before["strategy"] if isinstance(before.get("strategy"), list) else []
    new = [registry.strategy_name(each) for each in now["strategy"] if each not in earlier]
    return now | {"set": {key: value for key, value in now["set"].items() if key.rpartition(".")[0] not in new}}


def _differing(before: Json, now: Json, growing: Collection[str], name: Callable[[str], str]) -> list[str]:
    """List the options that differ, as they are typed. Where data and models lie does not count: what they hold is compared."""
    differences = []
    for key in dict.fromkeys((*before, *now)):
        was, is_now = before.get(key), now.get(key)
        recipe = bool({str(was), str(is_now)} & recipes.MODELS.keys())  # a registered model may bring one
        if isinstance(was, dict) and isinstance(is_now, dict):
            differences += _differing(was, is_now, growing, flag_of)
        elif was != is_now and key not in growing and key != "data" and (key != "model" or recipe):
            both = ("not given" if each is None else typed(each) for each in (was, is_now))
            differences.append("{} (was {}, now {})".format(name(key), *both))
    return differences


def merged_config(out: Path, before: Json, now: Json, allow_changed: bool = False) -> Json:
    """Return the config.json of a job that goes on, with the earlier units.

    Args:
        out: its directory.
        before: its config.json.
        now: what that would be if it began now.
        allow_changed: go on with other versions and on another device, too, and say so under ``changed``.

    Raises:
        RunError: data, model, versions or device are not those that it was begun with.
    """
    circumstances = _changed_circumstances(before, now)
    refuse_changes(out, _changed(before, now), [] if allow_changed else circumstances)
    if changes := [*before.get("changed", []), *circumstances]:
        now["changed"] = changes
    model, begun = now["about"].get("model"), before["about"].get("model")
    if isinstance(model, dict) and isinstance(begun, dict):
        model["name"] = begun.get("name")  # the weights identify it, not where they lie
    if "run" in now:  # whose strategies may be others than before
        options = before.get("options", {}) | now["options"]
        steps = {each.get("steps") for each in options.values()}
        now["options"], now["about"]["data"]["steps"] = options, steps.pop() if len(steps) == 1 else None
    if before["units"].keys() <= now["units"].keys():
        return now
    return now | {"units": before["units"] | now["units"]}


def refuse_changes(out: Path, changed: Collection[str], circumstances: Collection[str]) -> None:
    """Raise ``RunError`` if anything has changed since a directory was begun.

    Args:
        out: the directory.
        changed: what cannot be gone on with.
        circumstances: what can, by a flag.
    """
    both = [*changed, *circumstances]
    if both:
        remedy = "put the old files back" if changed else "give --allow-changed: then config.json names the change"
        raise RunError(
            f"{out} cannot be resumed: {' and '.join(both)} changed since it was begun. {_REMEDY[:-1]}, or {remedy}."
        )


def _changed_circumstances(before: Json, now: Json) -> list[str]:
    changes, was, is_now = _changed_versions(before), before["machine"], now["machine"]
    if kind_of_device(str(was.get("device"))) != kind_of_device(is_now["device"]):  # which of several does not count
        return [*changes, f"the device (was {was.get('device')}, is {is_now['device']})"]
    if was.get("processor", is_now["processor"]) != is_now["processor"]:
        changes.append(f"the processor (was {was['processor']}, is {is_now['processor']})")
    return changes


def _changed(before: Json, now: Json) -> list[str]:
    changes = [what for key, what in _BESIDE.items() if before.get(key) != now.get(key)]
    model, model_now = before["model"], now["model"]
    same_weights = model.get("fingerprint") == model_now["fingerprint"]
    if not same_weights:
        changes.append("the weights of the model")
    elif any(model.get(key) != model_now[key] for key in ("config", "max_length")):
        changes.append("the model's config.json")
    was, is_now = (_by_name(each["tasks"]) for each in (before, now))
    for task, rows in before["data"].items():
        rows_now = now["data"].get(task, {})
        if rows.get("fingerprint") != rows_now.get("fingerprint"):
            changes.append(f"data of {task!r}")
        elif was.get(task) != is_now.get(task):
            changes.append(f"labels, label words, templates or metrics of {task!r}")
        elif same_weights and rows.get("encoded") != rows_now.get("encoded"):
            changes.append(f"the tokenizer or the prompt of {task!r}")
    return changes


def _by_name(tasks: list[Any]) -> Mapping[str, Any]:
    return {str(task.get("name")): task for task in tasks if isinstance(task, dict)}


def _changed_versions(config: Json) -> list[str]:
    was, is_now = config.get("versions", {}), versions()
    return [
        f"the version of {package} (was {was.get(package, 'none')}, is {is_now.get(package)})"
        for package in _PACKAGES
        if was.get(package) != is_now.get(package)
    ]
