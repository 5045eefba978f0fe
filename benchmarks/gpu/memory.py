"""Memory: what each phase takes at most, beside what ``--check`` predicts and docs/scaling.md says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from forgetfree.benchmarks.gpu.bench import Bench
from forgetfree.benchmarks.gpu.results import Measurement, SectionResults, Value
from forgetfree.benchmarks.memory import LARGER, PHASES, peaks_of, ways
from forgetfree.core.tensors import DTYPES
from forgetfree.jobs.running.costs import ModelSize, memory_of_phases
from forgetfree.recipes import ModelDtype
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.monitor import Phase
from forgetfree.training.single_task import SingleTask

#: Tokens of a row, as in docs/scaling.md.
LENGTH = 512


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield every way to choose γ at 1 and 8 billion parameters; the one that takes least first."""
    sizes = {"1 billion": 40.0} if bench.tiny else {"1 billion": 40.0, "8 billion": 120.0}
    for size, seconds in sizes.items():
        for way, dtype, options in reversed(list(ways())):
            yield Measurement(f"{size}, {way}", seconds, partial(peaks, bench, size, dtype, options))


def peaks(bench: Bench, size: str, dtype: ModelDtype, options: LocalizationOptions) -> Iterator[Value]:
    """Measure the peaks of the phases, unless more is predicted than the card has."""

    def predicted(known: ModelSize) -> dict[Phase, int]:
        return memory_of_phases(known, options, LENGTH, PHASES, bench.device.type)

    published = predicted(replace(LARGER[size], width=DTYPES[dtype].itemsize))
    if not bench.tiny and (most := max(published.values())) > bench.memory:
        yield Value("peak", f"left out: {most / 1e9:.0f} GB are predicted, more than the card has", shown=True)
        return
    loaded = bench.llama(size, "linear", dtype)
    rows = bench.rows("alpha", LENGTH - 2, 32)
    single = SingleTask.of(loaded, rows, device=bench.device)
    found, backbone = peaks_of(single, options), loaded.model.backbone
    parameters = sum(each.numel() for each in loaded.model.parameters())
    expected = predicted(ModelSize.of(backbone.config, parameters, len(single.space), dtype))
    for phase, peak in found.items():
        what = phase.replace("_", "-")
        yield Value(what, peak / 1e9, "GB", f"{expected[phase] / 1e9:.1f}", shown=peak == max(found.values()))
