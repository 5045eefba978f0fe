"""Makes the gallery, one page that compares the strategies of benchmarks/results/*.csv: `python docs/gallery.py gallery.html`.

The page reads these files as it reads one that a reader drops onto it: they stand inside, without what it does not show.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from forgetfree.json_file import parse_json
from forgetfree.results.report.figures import style_sheet

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "forgetfree" / "results" / "report"
#: What a strategy needs beside the model and one row after the other.
NEEDS = {
    "rows": ("replay", "agem", "gem", "gdumb", "der", "cumulative", "joint"),
    "models": ("fine-tune", "merge-task-arithmetic"),
    "task": ("fine-tune", "grafting-continual", "packnet", "wsn", "bitfit", "graft-retrain", "lora"),
}
#: Of the first line of a file, and of a line of a strategy with a seed.
_SETTING = ("stream", "tasks", "metric", "scenario", "model", "data", "floors")
_UNIT = ("strategy", "seed", "summary", "kept_bytes", "seconds", "variant")


def page(files: list[Path]) -> str:
    """The page with these results inside."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files}
    # Runs alone, and of the version that says what is known at inference.
    runs = {name: text for name, text in texts.items() if '"scenario"' in text.partition("\n")[0]}
    variants = _variants(runs)
    content = {"files": {name: _short(name, text, variants) for name, text in runs.items()}, "needs": NEEDS}
    template = (ROOT / "docs" / "gallery.html").read_text(encoding="utf-8")
    # The report of a run has the same look.
    template = template.replace("{{style}}", f"{style_sheet()}\n{(REPORT / 'report.css').read_text(encoding='utf-8')}")
    return template.replace("{{content}}", json.dumps(content, ensure_ascii=False).replace("</", "<\\/"))


def _lines(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of settings, and the rows below them."""
    lines = text.splitlines()
    settings = [parse_json(line[2:]) for line in lines if line.startswith("# ")]
    return settings, [line for line in lines if not line.startswith("# ")]


def _place(setting: dict[str, Any]) -> str:
    """What runs have in common that stand in one table; gallery.html has the same."""
    data = setting["data"]
    return json.dumps(
        [setting["tasks"], setting["scenario"], setting["model"]["name"], data.get("shots"), data.get("steps")]
    )


def _variants(texts: dict[str, str]) -> dict[tuple[str, str, int], str]:
    """For file, strategy and seed: the options by which runs of one strategy in one table differ."""
    found: dict[tuple[str, str], dict[tuple[str, str, int], dict[str, Any]]] = defaultdict(dict)
    for name, text in texts.items():
        (setting, *units), _ = _lines(text)
        for unit in units:
            key = (name, unit["strategy"], unit["seed"])
            found[_place(setting), unit["strategy"]][key] = unit.get("options", {})
    names = {}
    for options in found.values():
        keys = {key for each in options.values() for key in each}
        differ = sorted(key for key in keys if len({repr(each[key]) for each in options.values() if key in each}) > 1)
        for key, each in options.items():
            names[key] = ", ".join(f"{option}={each[option]}" for option in differ if option in each)
    return names


def _short(name: str, text: str, variants: dict[tuple[str, str, int], str]) -> str:
    """The lines that the page reads: settings in part, and the scores after the last task."""
    (setting, *units), (header, *rows) = _lines(text)
    setting["data"].pop("fingerprints", None)
    setting["floors"] = {"constant": setting.get("floors", {}).get("constant")}
    kept = [{key: setting[key] for key in _SETTING if key in setting}]
    for unit in units:
        unit["variant"] = variants[name, unit["strategy"], unit["seed"]]
        kept.append({key: unit[key] for key in _UNIT if key in unit})
    places = [header.split(",").index(column) for column in ("after", "task", "metric")]
    wanted = [[str(len(setting["tasks"])), task, setting["metric"][task]] for task in setting["tasks"]]
    last = [row for row in rows if [row.split(",")[place] for place in places] in wanted]
    return "\n".join([*(f"# {json.dumps(line)}" for line in kept), header, *last])


def results() -> list[Path]:
    """The committed runs, but for one that only tests read."""
    return [path for path in sorted((ROOT / "benchmarks" / "results").glob("*.csv")) if path.stem != "small"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(results()), encoding="utf-8")
