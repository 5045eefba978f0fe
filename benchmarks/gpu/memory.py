"""Memory: the peak of each phase."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Measurement, SectionResults, Value
from benchmarks.memory import peaks_of, ways
from forgetfree.recipes import ModelDtype
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions

#: Tokens of a row.
LENGTH = 512


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield every way to choose γ at 1 and 8 billion parameters; the one with the least memory first."""
    sizes = {"1 billion": 40.0} if bench.tiny else {"1 billion": 40.0, "8 billion": 120.0}
    for size, seconds in sizes.items():
        for way, dtype, options in reversed(list(ways())):
            yield Measurement(f"{size}, {way}", seconds, partial(peaks, bench, size, dtype, options))


def peaks(bench: Bench, size: str, dtype: ModelDtype, options: LocalizationOptions) -> Iterator[Value]:
    """Measure the peaks of the phases."""
    loaded = bench.llama(size, "linear", dtype)
    single = SingleTask.of(loaded, bench.rows("alpha", LENGTH - 2, 32), device=bench.device)
    found = peaks_of(single, options)
    for phase, peak in found.items():
        yield Value(phase.replace("_", "-"), peak / 1e9, "GB", shown=peak == max(found.values()))
