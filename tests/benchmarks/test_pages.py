"""The result pages agree with the committed files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import floors
from benchmarks.claims import RESULTS
from benchmarks.pages import COMPARED, ROOT, made, pages, written
from forgetfree.results.table import load_results

#: The pages behind README's table and the words beside it.
PAGES = ("results", *(f"results/{page}" for page in ("main-job", "one-budget", "baselines", "recipe", "withheld")))


# docs/results.md has the coverage, which takes seconds to simulate; tests/results/test_evidence.py requires 0.9.
@pytest.mark.parametrize("page", [page for page in pages() if page.name != "results.md"], ids=lambda path: path.stem)
def test_make_results_would_change_no_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert written(text) == text


def test_a_table_is_made_of_the_file_that_its_mark_names() -> None:
    text = "Before.\n<!-- made of: report small: After the last -->\nstale\n<!-- end -->\nAfter."
    new = written(text)
    assert new.startswith("Before.\n<!-- made of: report small: After the last -->\n\n**After the last task (in %")
    assert "stale" not in new and new.endswith("<!-- end -->\nAfter.") and written(new) == new
    with pytest.raises(StopIteration):
        made("report small: No such table")


def test_what_the_main_job_says_in_words_stands_in_its_table() -> None:
    text = next(page for page in pages() if page.name == "main-job.md").read_text(encoding="utf-8")
    said = text[text.index("- **Nothing is forgotten**") : text.index("<!-- made of: figures")]
    told = {each.lstrip("-") for each in re.findall(r"-?\d+\.\d", made("figures movement"))}
    assert len(found := re.findall(r"\d+\.\d", said)) > 8 and [each for each in found if each not in told] == []


def test_what_readme_says_in_words_stands_on_the_pages_of_its_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = text.replace(made("comparison"), "")[text.index("**Use it**") :]
    known = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"(?<![\w.])\d+\.\d(?!\w)", said.replace("6.5 GB", "").replace("0.01 %", ""))
    missing = [each for each in found if each not in known]
    assert len(found) > 10 and missing == []


def test_the_rows_of_readme_are_called_what_they_are() -> None:
    for called, file, strategy in COMPARED:
        runs = [run.facts.options for run in load_results(RESULTS / f"{file}.csv").runs if run.strategy == strategy]
        for word, option in (("rank", "rank"), ("replay of", "mem_size")):
            if word in called:
                assert {int(re.search(rf"{word} (\d+)", called)[1])} == {each[option] for each in runs}  # type: ignore[index]
        if strategy == "grafting-continual":
            (composition,) = {each["composition"] for each in runs}
            assert composition in called and {each["region_from"] for each in runs} == {
                "mask" if "mask" in called else "movement"
            }


def test_floors_are_measured_on_the_rows_of_the_runs(data_directory: Path) -> None:
    """Each seed has the floors of its own sample; all else in the file stays."""
    runs = (
        '{"stream": "sst2,qnli", "scenario": "task", "data": {"shots": 4, "test_rows": {"sst2": 9, "qnli": 9}}, '
        '"model": {}, "floors": {"constant": [0.5, 0.5]}}'
    )
    text = f'# {runs}\n# {{"strategy": "a", "seed": 0}}\n# {{"strategy": "a", "seed": 3}}\ntask,strategy\n'
    new = floors.measured(text, str(data_directory), probe=False)
    assert new.split("\n", 1)[1] == text.split("\n", 1)[1]
    assert '"constant": [0.5, 0.5], "bag_of_words": {"0": [' in new and '"3": [' in new
