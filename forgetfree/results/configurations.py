"""Configurations of strategies: comparable runs, the options that distinguish them, and their references."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forgetfree.display import NULL, brief
from forgetfree.errors import RunError
from forgetfree.options import typed
from forgetfree.results.runs import REFERENCE, Run, RunRecord

Json = dict[str, Any]
#: By name: the options of a configuration, with the settings that differ between directories; and by ascending seed its runs,
#: each with its record.
Configurations = Mapping[str, tuple[Json, Mapping[int, tuple[Run, RunRecord]]]]
#: Settings that a report does not mention.
_USUAL: Json = {"scenario": "task", "evaluated_on": "test"}
#: Settings that may differ between compared runs; their labels include them.
_MAY_DIFFER = ("model", "fingerprint", "graftable", "readout", "shots", "steps", "max_length")


def check_comparable(ours: RunRecord, theirs: RunRecord) -> None:
    """Raise ``RunError`` if two runs cannot be compared task by task; it names the first difference."""
    one, other = map(_measured, (ours, theirs))
    for what in one | other:
        a, b = one.get(what), other.get(what)
        if a != b:
            raise RunError(
                f"{ours.source} and {theirs.source} cannot be compared: {what} is {brief(a)} in one and {brief(b)} in the "
                "other. Report on them separately."
            )


def _measured(record: RunRecord) -> Json:
    """Return the measured tasks, and each task's metric and rows, by the user's names for them."""
    about = record.about
    whole = {"the list of tasks": about.tasks, "scenario": about.scenario, "evaluated_on": about.evaluated_on}
    rows = about.data.get("fingerprints") or {}
    return whole | {
        f"{what} of {task}": of_tasks.get(task)
        for what, of_tasks in (
            ("the metric", about.metric),
            ("SHA-256 of the rows", rows),
            ("test rows", record.test_rows),
        )
        for task in about.tasks
    }


def _stated(record: RunRecord, key: str) -> Any:
    """Return a setting of a run, from whichever part of the record has it; for a fingerprint the first eight digits."""
    about = record.about
    if key == "model":
        return about.model.get("name")
    places = (dict(about), about.data, about.model, about.set)
    value = next((place[key] for place in places if place.get(key) is not None), None)
    return str(value)[:8] if key == "fingerprint" else value


def differing_settings(records: Sequence[RunRecord]) -> list[str]:
    """Return the settings that differ between runs; fingerprint and size only if the model's name is the same."""
    keys = [key for key in _MAY_DIFFER if len({_stated(record, key) for record in records}) > 1]
    return [key for key in keys if key not in ("fingerprint", "graftable") or "model" not in keys]


def shared_settings(records: Sequence[RunRecord]) -> Json:
    """Return the settings that all runs share and that are not defaults."""
    settings = []
    for record in records:
        keys = ("model", "scenario", "evaluated_on", "readout", "shots", "steps", "sparsity", *record.about.set)
        its = {key: _stated(record, key) for key in keys}
        settings.append({k: v for k, v in its.items() if isinstance(v, str | int | float) and v != _USUAL.get(k)})
    return {key: value for key, value in settings[0].items() if all(other.get(key) == value for other in settings)}


def configurations_of(records: Sequence[RunRecord]) -> Configurations:
    """Return the configurations of each strategy.

    Raises:
        RunError: one strategy and seed has two different outcomes.
    """
    telling = differing_settings(records)
    # strategy → options as JSON → seed → run
    found: dict[str, dict[str, dict[int, tuple[Run, RunRecord]]]] = {}
    for record in records:
        setup = {key: _stated(record, key) for key in telling}
        for run in record.runs:
            options = json.dumps(setup | run.facts.options, sort_keys=True)
            seeds = found.setdefault(run.strategy, {}).setdefault(options, {})
            earlier, its = seeds.setdefault(run.seed, (run, record))
            if run is not earlier and record.outcome(run) != its.outcome(earlier):
                raise RunError(
                    f"{run.strategy} with seed {run.seed} is in {earlier.source} and in {run.source}, with "
                    "different outcomes. Leave one of them out, or run with another seed."
                )
    configurations = {}
    for strategy, variants in found.items():
        options_of_each = [json.loads(variant) for variant in variants]
        labels = _labels_of(strategy, options_of_each, telling)
        for label, its_options, seeds in zip(labels, options_of_each, variants.values(), strict=True):
            configurations[label] = its_options, dict(sorted(seeds.items()))
    return configurations


def references_of(configurations: Configurations) -> dict[tuple[str, int], str]:
    """Return, for each configuration and seed, the label of the fine-tuned models that are its reference.

    They come from its own directory, or from another one with equal options.
    """
    references = {}
    for label, (options, units) in configurations.items():
        for seed, (run, _) in units.items():
            tuned = [
                (place, its, theirs[seed][0].source)
                for place, (its, theirs) in configurations.items()
                if seed in theirs and theirs[seed][0].strategy == REFERENCE
            ]
            own = [place for place, _, source in tuned if source == run.source]
            if found := own or [place for place, its, _ in tuned if _agree(options, its)]:
                references[label, seed] = found[0]
    return references


def _labels_of(strategy: str, variants: Sequence[Json], always: Sequence[str]) -> Iterator[str]:
    """Yield for each configuration the strategy's name, with the options that differ or are in ``always``.

    An option that is ``None`` is left out, unless all of these options are.
    """
    keys = dict.fromkeys(key for variant in variants for key in variant)
    for options in variants:
        telling = [k for k in keys if k in always or any(other.get(k) != options.get(k) for other in variants)]
        telling = [k for k in telling if k not in options or options[k] is not None] or telling
        told = ", ".join(f"{key}={typed(options[key]) if key in options else NULL}" for key in telling)
        yield f"{strategy} ({told})" if told else strategy


def _agree(ours: Json, theirs: Json) -> bool:
    return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())
