"""The package as installed: its parts, imports, version, and wheel."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import forgetfree

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOMES = {"forgetfree": "forgetfree", "strategies": "forgetfree.strategies", "benchmarks": "benchmarks"}
HEAVY = ("torch", "transformers", "avalanche", "datasets", "numpy", "pandas", "peft")


def files(folder: str) -> Iterator[tuple[str, Path]]:
    """Yield every module of a top folder and its file; the symbolic link is not followed."""
    for path, folders, names in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if not (Path(path) / name).is_symlink() and name != "__pycache__"]
        for name in names:
            if name.endswith(".py"):
                inner = (Path(path) / name).relative_to(ROOT / folder).with_suffix("").parts
                parts = inner[:-1] if inner[-1] == "__init__" else inner
                yield ".".join([HOMES[folder], *parts]), Path(path) / name


MODULES = {module: path for folder in HOMES for module, path in files(folder)}


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, timeout=120)


# -- Parts -----------------------------------------------------------------------------------------------


def test_the_package_list_is_what_is_on_disk() -> None:
    """Benchmarks are run from a checkout, and are not installed."""
    packages = (module for module, path in MODULES.items() if path.name == "__init__.py")
    on_disk = sorted(module for module in packages if not within(module, "benchmarks"))
    assert PROJECT["tool"]["setuptools"]["packages"] == on_disk


def test_every_folder_of_modules_is_a_package() -> None:
    assert [path for path in MODULES.values() if not (path.parent / "__init__.py").is_file()] == []


def test_a_checkout_has_the_shape_of_an_installation() -> None:
    assert os.readlink(ROOT / "forgetfree" / "strategies") == "../strategies"


# -- Imports ---------------------------------------------------------------------------------------------


#: "MODULE:NAME" of an object, and the functions that import a module by its name.
TARGET = re.compile(r"(forgetfree(?:\.\w+)*):\w+(?:\.\w+)*")
BY_NAME = ("import_module", "resolve_name", "__import__")
#: Modules that declare objects to be found by name.
DECLARED = ("forgetfree.registry", "forgetfree")


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return every module that a module imports anywhere, also for types alone or by a string with its name."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    named = set() if module in DECLARED else named_in_strings(tree)
    return frozenset(imported(tree, module) | named)


def imported(tree: ast.Module, module: str) -> set[str]:
    """Return the names in import statements; ``package.name`` too if that is a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found.add(str(node.module))
            found |= {name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES}
    return found


def named_in_strings(tree: ast.Module) -> set[str]:
    """Return every module of ours that a string names for import; for an f-string, the package in its constant start."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (target := TARGET.fullmatch(node.value)):
            found.add(target[1])
        elif isinstance(node, ast.JoinedStr) and isinstance(first := node.values[0], ast.Constant):
            if (text := str(first.value)).startswith("forgetfree.") and " " not in text:
                found.add(text.rpartition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            found |= {
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    return {name for name in found if within(name, "forgetfree")}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def importers(package: str) -> set[str]:
    return {module for module in MODULES if any(within(name, package) for name in imports(module))}


#: From the bottom: a room imports from itself, from earlier rooms, and from the files that all rooms use.
ROOMS = (
    *("core", "ledger", "data", "models", "results", "kinds", "training"),
    *("continual", "trainers", "serve", "jobs", "cli", "testing"),
)
COMMON = {
    "checkpoint",
    "device",
    "display",
    "errors",
    "files",
    "hub_file",
    "json_file",
    "options",
    "recipes",
    "registry",
    "seeds",
    "tasks",
    "tensor_file",
}


def room(module: str) -> str:
    """Return the folder of the library that contains a module, or the module's own name."""
    return module.removeprefix("forgetfree.").split(".")[0]


LIBRARY = [m for m in MODULES if not within(m, "forgetfree.strategies") and not within(m, "benchmarks")]


def test_the_library_has_these_rooms_and_common_files() -> None:
    top = {room(module) for module in LIBRARY if module != "forgetfree"}
    assert top == {*ROOMS, *COMMON, "__main__"}


@pytest.mark.parametrize("module", [m for m in LIBRARY if room(m) in ROOMS])
def test_a_room_imports_from_those_before_it(module: str) -> None:
    before = {*COMMON, *ROOMS[: ROOMS.index(room(module)) + 1]}
    assert {name for name in ours(module) if room(name) not in before} == set()


@pytest.mark.parametrize("module", [f"forgetfree.{name}" for name in sorted(COMMON)])
def test_what_all_rooms_use_imports_no_room(module: str) -> None:
    tables = {"forgetfree.data.streams"}
    found = ours(module) - tables if module == "forgetfree.registry" else ours(module)
    assert {name for name in found if room(name) not in COMMON} == set()


def test_no_file_imports_itself_through_others() -> None:
    """All imports count: one inside a function, for types alone, or by a name in a string could hide a cycle."""
    graph = {module: {name for name in imports(module) if name in MODULES} - {module} for module in MODULES}
    for module, named in graph.items():  # `from package import module` needs the module, not the rest of the package
        inner = {name for name in named if any(other.startswith(f"{name}.") for other in named)}
        graph[module] = named - {name for name in inner if MODULES[name].name == "__init__.py"}
    TopologicalSorter(graph).prepare()  # raises if there is a cycle


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if within(name, "forgetfree") and name != "forgetfree"}


@pytest.mark.parametrize(
    ("name", "others"),
    [("core", {"bitsandbytes"}), ("ledger", {"numpy", "pydantic"})],
)
def test_the_first_rooms_need_torch_and_little_else(name: str, others: set[str]) -> None:
    found = {each.split(".")[0] for m in LIBRARY if room(m) == name for each in imports(m)}
    assert found - {*sys.stdlib_module_names, "forgetfree", "torch"} <= others


def test_avalanche_stays_in_its_room_and_in_strategies() -> None:
    assert {room(module) for module in importers("avalanche") if module in LIBRARY} == {"continual"}


def test_the_library_mocks_nothing() -> None:
    assert not importers("unittest") & set(LIBRARY)


def test_the_library_finds_strategies_by_name_only_and_needs_no_benchmark() -> None:
    assert not importers("forgetfree.strategies") & set(LIBRARY)
    assert importers("benchmarks") & set(LIBRARY) == set()


def test_strategies_and_benchmarks_never_import_each_other() -> None:
    for one, other in (("forgetfree.strategies", "benchmarks"), ("benchmarks", "forgetfree.strategies")):
        assert importers(other) & {module for module in MODULES if within(module, one)} == set()
    siblings = [m for m in MODULES if m.startswith("forgetfree.strategies.")]
    for module in siblings:
        own = module.rpartition(".")[0] if within(module, "forgetfree.strategies.lora") else module
        assert not {name for name in imports(module) if name in siblings and not within(name, own)}


def test_listing_and_help_import_nothing_heavy() -> None:
    code = (
        "import sys, json, io, contextlib\n"
        "import forgetfree\n"
        "from forgetfree.cli import main\n"
        "codes = []\n"
        "lists = [f'list {what}' for what in ('strategies', 'streams', 'tasks', 'models')]\n"
        "for line in ('--help', 'run --help', 'graft --help', *lists):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        codes.append((main(line.split()), bool(out.getvalue().strip())))\n"
        f"print(json.dumps([codes, [name for name in {HEAVY!r} if name in sys.modules]]))\n"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[[0, True]] * 7, []]


# -- Names -----------------------------------------------------------------------------------------------

#: Modules that re-export names to users, on first use.
DOORS = ("forgetfree", "forgetfree.testing")


@functools.cache
def defined(module: str) -> frozenset[str]:
    """Return the names that a module itself defines at its top level."""
    found = set[str]()
    for node in ast.walk(ast.Module(top_level(MODULES[module]), [])):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def top_level(path: Path) -> list[ast.stmt]:
    """Return the statements of a file, with nothing inside functions and classes."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.body = []
    return body


@pytest.mark.parametrize("module", [m for m in MODULES if m not in DOORS])
def test_a_name_is_imported_from_the_file_that_defines_it(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    elsewhere = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES and node.module not in DOORS
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES and alias.name not in defined(node.module)
    }
    assert elsewhere == set()


def test_no_two_files_have_one_name() -> None:
    """Only the files of commands in cli may repeat a name."""
    names = [path.name for module, path in MODULES.items() if within(module, "forgetfree") and room(module) != "cli"]
    assert {name for name in names if names.count(name) > 1} == {"__init__.py"}


def test_no_two_classes_have_one_name() -> None:
    """Only ``Table`` occurs twice: for a file and for a page."""
    names = [
        node.name
        for module in MODULES
        if within(module, "forgetfree")
        for node in top_level(MODULES[module])
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == {"Table"}


# -- The surface -----------------------------------------------------------------------------------------


def test_the_public_names() -> None:
    """Users rely on these names: each change of the list must be on purpose."""
    assert forgetfree.__all__ == [
        "__version__",
        "Graft",
        "LearningMatrix",
        "Ledger",
        "LedgerSwitch",
        "MixedBatchModel",
        "ParameterSpace",
        "Predictor",
        "Region",
        "Results",
        "Stream",
        "TaskSwitch",
        "TrainingOptions",
        "answering",
        "graft",
        "learning",
        "load_model",
        "load_results",
        "load_stream",
        "plan",
        "run",
    ]
    assert dir(forgetfree) == sorted(forgetfree.__all__)


@pytest.mark.parametrize("name", forgetfree.__all__[1:])
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(forgetfree, name).__name__ == name


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "forgetfree" / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        str(alias.asname): str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == forgetfree._HOME


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'forgetfree' has no attribute 'Grfat'"):
        _ = forgetfree.Grfat


# -- The version -----------------------------------------------------------------------------------------


def test_the_version_is_one() -> None:
    assert PROJECT["project"]["version"] == forgetfree.__version__


def test_the_changelogs_newest_version_is_ours() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[?v?(\d+\.\d+\S*?)\]?(?:\s|$)", changelog, re.MULTILINE)
    assert versions[:1] == [forgetfree.__version__]


# -- The wheel -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """sdist → wheel → an environment that borrows the dependencies of this one; there it runs, predicts and learns."""
    clutter = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    source = Path(shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=clutter))
    built = run("-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source))
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1

    environment = tmp_path / "environment"
    assert run("-m", "venv", "--without-pip", str(environment)).returncode == 0
    python = environment / "bin" / "python"
    installed = run("-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    assert installed.returncode == 0, installed.stderr
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def inside(*command: str | Path) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=clean, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = inside(environment / "bin" / "forgetfree", "list", "strategies")
    assert all(name in listed for name in ("fine-tune", "continual-ft", "grafting-continual"))
    where = inside(python, "-c", "import forgetfree.strategies.fine_tune as module; print(module.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    for module, path in MODULES.items():
        shipped = packages.joinpath(*module.split("."))
        file = shipped / "__init__.py" if path.name == "__init__.py" else shipped.with_suffix(".py")
        assert file.is_file() != within(module, "benchmarks")  # benchmarks are run from a checkout
    assert (packages / "forgetfree" / "py.typed").is_file()
    forgetfree_ = environment / "bin" / "forgetfree"
    small = [
        "--strategy",
        "fine-tune",
        "--shots",
        "4",
        "--test-limit",
        "8",
        "--set",
        "steps=2",
        "--set",
        "floors=constant",
    ]
    inside(forgetfree_, "run", "sst2,ag_news", "--data", "demo", "--out", "run", *small)
    assert inside(forgetfree_, "predict", "run", "--task", "sst2", "A joy.").split()[0] in ("negative", "positive")
    learned = """if True:
        import torch, transformers
        from forgetfree import Ledger, answering, learning
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        ids, ledger = torch.arange(8)[None], Ledger.of_model(model)
        with learning(model, ledger, "one", batches=[{"input_ids": ids, "labels": ids}], sparsity=0.1) as skill:
            model(input_ids=ids, labels=ids).loss.backward()
            torch.optim.SGD([skill.values], lr=0.1).step()
        with answering(model, ledger, "one"):
            print(len(ledger.records[0].owned.region))
    """
    assert int(inside(python, "-c", learned)) > 0


# -- Versions that were tested together ------------------------------------------------------------------


def test_constraints_name_a_version_of_every_dependency() -> None:
    """Each version is admitted by the ranges of pyproject.toml, and the file has nothing but names and versions."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(lines)
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in map(Requirement, [*PROJECT["project"]["dependencies"], *chain(*extras.values())]):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), str(requirement)


def test_what_installs_here_installs_by_the_constraints() -> None:
    """The Makefile uses the constraints, and README shows users how to do so."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    installs = [line for line in lines if "pip install" in line and "--upgrade pip" not in line]
    assert [line for line in installs if "--constraint constraints.txt" in line and "$(BIN)/" in line] == installs[:1]
    assert all("$(NEWEST)/" in line for line in installs[1:])
    assert "pip install -c constraints.txt '.[minilm]'" in (ROOT / "README.md").read_text(encoding="utf-8")
