"""The bytes of published runs are those of today's ledgers."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest
import torch

from benchmarks import kept
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger, Record

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def readouts() -> dict[tuple[str, str], int]:
    return kept.readouts(sorted(kept.RESULTS.rglob("*.csv")))


@pytest.mark.sampled("movement", "movement-mask", share=0.15)
@pytest.mark.parametrize(
    "path", kept.files(), ids=lambda path: path.relative_to(kept.RESULTS).with_suffix("").as_posix()
)
def test_the_bytes_of_published_runs_are_those_of_todays_ledgers(
    path: Path, readouts: dict[tuple[str, str], int]
) -> None:
    """``make results`` would change no file."""
    assert kept.written(path, readouts) == path.read_text(encoding="utf-8")


def test_a_ledger_of_11_000_entries_takes_66_kilobytes(tmp_path: Path) -> None:
    """The entries are 0.1 % of MiniLM's graftable ones; the computed bytes are those of the file without its header."""
    places = [{"entries": 5_500_000, "owned": [6_000]}, {"entries": 5_100_000, "owned": [5_000]}]
    (weighed,) = kept.weighed({"places": places, "region_size": [11_000], "owned_size": [11_000]}, [3_080])
    space = ParameterSpace((TensorSpec("weight", (10_600_000,), torch.float32, 0),))
    region = Region.of(torch.randperm(10_600_000, generator=torch.Generator().manual_seed(0))[:11_000])
    ledger = Ledger(space, "f" * 64)
    readout = {"weight": torch.zeros(2, 384), "bias": torch.zeros(2)}
    ledger.append(Record("one", region, Graft(region, torch.zeros(11_000)), 1e-3, readout))
    ledger.save(tmp_path / "ledger")
    assert 11_000 * (4 + 2) + 3_080 == ledger.size_in_bytes == weighed
    assert 0 < (tmp_path / "ledger").stat().st_size - weighed < 2_000


GRAFTS = "grafting-continual"
#: For each number of bytes per task on a page, in order: the file and the strategy of its runs.
TOLD = {
    "docs/results.md": [("movement", GRAFTS)],
    "docs/results/main-job.md": [("movement-lora", "lora"), ("movement", GRAFTS), ("movement", GRAFTS)],
    "docs/results/baselines.md": [("baselines-lora", "lora"), ("packnet", "packnet")],
    "docs/results/literature.md": [("standard-1", GRAFTS), ("progressive-8", GRAFTS)],
    "docs/results/long.md": [("long", GRAFTS), ("long", "fine-tune")],
    "docs/results/ner-domains.md": [("ner-domains", GRAFTS)],
    "docs/results/smollm2.md": [("smollm2", GRAFTS)],
    "benchmarks/claims.md": [("movement-lora", "lora"), ("movement", GRAFTS)],
}


def kept_per_task(file: str, strategy: str) -> float:
    """Return the stored bytes per task, as the mean over seeds."""
    _, *runs = kept.heads(kept.RESULTS / f"{file}.csv")
    return mean(run["kept_bytes"][-1] / len(run["kept_bytes"]) for run in runs if run["strategy"] == strategy)


@pytest.mark.parametrize("page", TOLD)
def test_pages_tell_the_bytes_of_their_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    told = re.findall(r"([\d.]+) (kB|MB)", text)
    measured = [
        kept_per_task(*runs) / {"kB": 1e3, "MB": 1e6}[unit] for runs, (_, unit) in zip(TOLD[page], told, strict=True)
    ]
    assert [f"{size:.{len(number.partition('.')[2])}f}" for size, (number, _) in zip(measured, told, strict=True)] == [
        number for number, _ in told
    ]


def test_pages_tell_how_many_times_the_bytes_of_a_graft_others_keep() -> None:
    graft, times = kept_per_task("movement", GRAFTS), r"([\d.]+) times the bytes of a graft"
    lora, packnet = (kept_per_task(*runs) / graft for runs in TOLD["docs/results/baselines.md"])
    pages = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("results.md", "results/baselines.md")]
    assert [re.findall(times, page) for page in pages] == [[f"{packnet:.0f}"], [f"{lora:.1f}", f"{packnet:.0f}"]]


def test_the_recipes_page_tells_the_bytes_of_a_region_without_a_head() -> None:
    """The region has 0.1 % of MiniLM's graftable entries, in float32 and as gaps of two bytes."""
    entries = budget(10_646_784, 1e-3)
    page = (ROOT / "docs" / "results" / "recipe.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\d+) kB in a ledger\)", page) == [f"{entries * (4 + 2) / 1e3:.0f}"]
