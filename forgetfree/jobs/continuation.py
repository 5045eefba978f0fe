"""Checks before a run is resumed or extended: its config.json against the request, the data and the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forgetfree import recipes, registry
from forgetfree.device import device_type
from forgetfree.display import tell_note
from forgetfree.errors import RunError, UsageError
from forgetfree.jobs.config import flag_of
from forgetfree.options import name_of_function, typed

Json = dict[str, Any]
#: Lists that may be longer when the run is resumed.
_GROWING = ("strategy", "seed")
#: Optional inputs besides model, tasks and data, by their keys in config.json.
_BESIDE = {"fine_tuned": "the fine-tuned model", "held_out": "the texts of --held-out"}
#: The advice for a run that cannot be resumed.
REMEDY = "Start a new run with another --out."


def as_json(value: Any) -> Any:
    """Return the value as it comes back from a JSON file, with functions replaced by their names."""
    return json.loads(json.dumps(value, default=name_of_function))


def merged_config(out: Path, before: Json, now: Json) -> Json:
    """Compare the previous config.json of a run with a new one, and return both merged.

    Keys that ``now`` lacks are not compared, so that the request can be compared before anything is loaded.

    Args:
        out: the directory.
        before: the previous config.json.
        now: the config.json of a run that would start now, or a part of it.

    Returns:
        ``now`` with the strategies, seeds and units of ``before``, and ``changed``: the versions or device that differ.

    Raises:
        UsageError: the request differs.
        RunError: data or model have changed.
    """
    request = _merged_request(out, before["run"], now["run"])
    if changed := changed_inputs(before, now):
        raise RunError(
            f"{out} cannot be resumed: {' and '.join(changed)} changed since it was started. {REMEDY[:-1]}, or "
            "restore the old files."
        )
    now = now | {"run": request}
    if "units" not in now:
        return now
    if changes := [*before.get("changed", []), *told_circumstances(before, now, out)]:
        now["changed"] = changes
    if isinstance(begun := before["about"].get("model"), dict):
        now["about"]["model"]["name"] = begun.get("name")  # the weights identify it, not their place
    options = before.get("options", {}) | now["options"]  # the strategies may differ from before
    steps = {each.get("steps") for each in options.values()}
    now["options"], now["about"]["data"]["steps"] = options, steps.pop() if len(steps) == 1 else None
    return now if before["units"].keys() <= now["units"].keys() else now | {"units": before["units"] | now["units"]}


def _merged_request(out: Path, before: Json, now: Json) -> Json:
    """Return the merged request; raise ``UsageError`` if the new request differs in more than strategies and seeds."""
    listed = {key: before[key] if isinstance(before.get(key), list) else [] for key in _GROWING}
    new = [registry.strategy_name(each) for each in now["strategy"] if each not in listed["strategy"]]
    # No result so far depends on the options of strategies that are added now.
    settings = {key: value for key, value in now["set"].items() if key.rpartition(".")[0] not in new}
    differ = _differing(
        before,
        now | {"set": settings},
        lambda key: key if key == "stream" else f"--{key.replace('_', '-')}",
    )
    classes = {registry.strategy_name(each): each for each in listed["strategy"] if isinstance(each, str)}
    for each in now["strategy"]:
        if (was := classes.get(registry.strategy_name(each), each)) != each:
            differ.append(f"--strategy {each} (was {was})")
    if differ:
        raise UsageError(
            f"--resume needs the configuration that {out} was started with; these differ: {', '.join(differ)}. Start "
            f"a new run with another --out, or give the old options from {out / 'config.json'}."
        )
    return now | {key: [*each, *(one for one in now[key] if one not in each)] for key, each in listed.items()}


def _differing(before: Json, now: Json, name: Callable[[str], str]) -> list[str]:
    """List the options that differ, as they are typed. Paths of data and models are skipped: their contents are compared."""
    differences = []
    for key in dict.fromkeys((*before, *now)):
        was, is_now = before.get(key), now.get(key)
        recipe = bool({str(was), str(is_now)} & recipes.MODELS.keys())  # a registered model may have one
        if isinstance(was, dict) and isinstance(is_now, dict):
            differences += _differing(was, is_now, flag_of)
        elif was != is_now and key not in (*_GROWING, "data", "fine_tuned") and (key != "model" or recipe):
            both = ("not given" if each is None else typed(each) for each in (was, is_now))
            differences.append("{} (was {}, now {})".format(name(key), *both))
    return differences


def told_circumstances(before: Json, now: Json, out: Path) -> list[str]:
    """List the versions and the device that changed since a run was begun, and print a note about them."""
    then, here = _circumstances(before), _circumstances(now)
    changes = [f"{key} (was {then[key]}, is {here[key]})" for key in here if then[key] not in (None, here[key])]
    if changes:
        tell_note(
            f"{' and '.join(changes)} changed since {out} was started: results of further units may differ in "
            "the last bits."
        )
    return changes


def _circumstances(config: Json) -> Json:
    """Return the versions and hardware that decide the bits of results; the number of the device does not matter."""
    machine = config["machine"]
    about = {package: config["versions"].get(package) for package in ("forgetfree", "torch", "transformers")}
    return about | {"device": device_type(str(machine.get("device"))), "processor": machine.get("processor")}


def changed_inputs(before: Json, now: Json) -> list[str]:
    """List the data and models that changed since a run was begun; if any changed, the run cannot be resumed."""
    if "model" not in now:
        return []
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
