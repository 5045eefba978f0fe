"""Which share of small faults in the method's code do the fast tests find? ``python tests/mutants --help``.

A mutant is one change within one function, by an operator of cosmic-ray: a comparison turned round, a number off by one,
a loop that never begins. A seed draws them. Each is put into a forked process in which everything is imported already, and
the tests that reach its line run there until one fails, the shortest first and for a limited time.

Needs ``pip install cosmic-ray pytest-cov``, and the tests by line in ``.coverage``, from
``pytest --cov --cov-context=test --cov-branch --durations=0 --durations-min=0.005 > durations.txt``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The method's code: what must not break unseen.
TARGETS = (
    "forgetfree/core/*.py",
    "forgetfree/ledger/*.py",
    "forgetfree/results/learning_matrix.py",
    "forgetfree/results/metrics.py",
    "forgetfree/results/evidence.py",
    "forgetfree/continual/region_strategy.py",
    "strategies/**/*.py",
)
#: Seconds of tests that one mutant may take, as they took where coverage was measured, and by the clock.
BUDGET, LIMIT = 10.0, 240
#: The operator of a control, which changes nothing and so must survive.
NONE = "none"
LEFT_OUT = ("core/RemoveDecorator", "core/ExceptionReplacer", "core/VariableInserter", "core/VariableReplacer")


@dataclass(frozen=True)
class Mutant:
    """One change: the ``occurrence``-th place in ``path`` that ``operator`` may change."""

    path: str
    operator: str
    occurrence: int
    line: int


# -- Drawing ---------------------------------------------------------------------------------------------


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw places evenly, and at each place one of the operators that fit there."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    places: dict[tuple[str, tuple[int, int]], list[Mutant]] = {}
    for path in sorted(path for pattern in TARGETS for path in ROOT.glob(pattern)):
        name, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        inside, nodes = set(_lines_of_functions(source)), list(ast_nodes(get_ast(source)))
        for operator in sorted(set(operator_names()) - set(LEFT_OUT)):
            positions = get_operator(operator)().mutation_positions
            starts = [start for node in nodes for start, _ in positions(node)]
            for i, start in enumerate(starts):
                if start[0] in inside:
                    places.setdefault((name, start), []).append(Mutant(name, operator, i, start[0]))
    generator = random.Random(seed)
    drawn = (generator.choice(places[place]) for place in generator.sample(sorted(places), len(places)))
    return list(islice(filter(_compiles, drawn), count))


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(changed(mutant), mutant.path, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def changed(mutant: Mutant) -> str:
    """The source of the mutant's file with its change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    return str(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence))


def _lines_of_functions(source: str) -> Iterator[int]:
    """Lines of bodies of functions: not of signatures, decorators and docstrings."""
    import ast

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            for statement in body:
                yield from range(statement.lineno, int(statement.end_lineno or 0) + 1)


# -- Tests of a line -------------------------------------------------------------------------------------


class Reached:
    """Which tests reach a line, and how long each takes."""

    def __init__(self, coverage_file: str, durations: str, tests: str | None) -> None:
        from coverage import CoverageData

        self._data = CoverageData(coverage_file)
        self._data.read()
        files = {Path(name).resolve(): name for name in self._data.measured_files()}
        self._files = {"/".join(path.parts[-3:]): name for path, name in files.items()}
        self._allowed = set(Path(tests).read_text(encoding="utf-8").splitlines()) if tests else None
        self._seconds: dict[str, float] = {}
        for line in Path(durations).read_text(encoding="utf-8").splitlines():
            if match := re.match(r"([\d.]+)s (?:call|setup|teardown) +(.*)", line):
                self._seconds[match[2]] = self._seconds.get(match[2], 0.0) + float(match[1])

    def tests(self, mutant: Mutant, killer: str = "") -> list[str]:
        """The shortest first, those of the module's own test file before the others, within the budget; and ``killer``."""
        file = self._files.get("/".join((ROOT / mutant.path).parts[-3:]))
        contexts = self._data.contexts_by_lineno(file).get(mutant.line, []) if file else []
        found = {context.rpartition("|")[0] for context in contexts if "|" in context}
        if self._allowed is not None:
            found &= self._allowed
        own = f"test_{Path(mutant.path).stem}.py"
        tests, spent = [killer] if killer in found else [], 0.0
        for test in sorted(found, key=lambda name: (own not in name, self._seconds.get(name, 0.0), name)):
            spent += self._seconds.get(test, 0.005)
            if spent > BUDGET:
                break
            if test != killer:
                tests.append(test)
        return tests


# -- Trying ----------------------------------------------------------------------------------------------


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const
            yield from codes(const)


def put_in(mutant: Mutant) -> None:
    """Replace the code of the functions that the mutant changes, wherever they are referred to."""
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    file = next(
        str(module.__file__)
        for module in list(sys.modules.values())
        if getattr(module, "__file__", None) and Path(str(module.__file__)).resolve() == ROOT / mutant.path
    )
    old, new = (list(codes(compile(text, file, "exec", dont_inherit=True))) for text in (source, changed(mutant)))
    pairs = [(one, other) for one, other in zip(old, new, strict=True) if one != other]
    functions = [each for each in gc.get_objects() if isinstance(each, types.FunctionType)]
    replaced = 0
    for one, other in pairs:
        for function in functions:
            if function.__code__ == one:
                function.__code__ = other
                replaced += 1
    if not replaced:
        raise LookupError(f"no function holds line {mutant.line} of {mutant.path}")


def try_one(mutant: Mutant, tests: list[str]) -> dict[str, object]:
    """In a forked process: run until a test fails."""
    begin = time.monotonic()
    outcome = {"status": "survived", "killed_by": "", "tests": len(tests)}
    if not tests:
        return {**outcome, "status": "not reached", "seconds": 0.0}
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        os.write(writing, json.dumps(_run(mutant, tests)).encode())
        os._exit(0)
    os.close(writing)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() - begin > LIMIT:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    with os.fdopen(reading) as answer:
        said = answer.read()
    found = json.loads(said) if said else {"status": "killed", "killed_by": "time"}  # ended, or never ended
    return {**outcome, **found, "seconds": round(time.monotonic() - begin, 1)}


def _run(mutant: Mutant, tests: list[str]) -> dict[str, str]:
    import pytest

    failed: list[str] = []

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    try:
        if mutant.operator != NONE:
            put_in(mutant)
        quiet = [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:anyio",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        code = pytest.main(["-x", "-q", *quiet, *tests], plugins=[Watch()])
    except BaseException as error:
        return {
            "status": "not tried" if isinstance(error, LookupError | ValueError) else "killed",
            "killed_by": str(error),
        }
    if failed:
        return {"status": "killed", "killed_by": failed[0]}
    return {"status": "survived"} if code == pytest.ExitCode.OK else {"status": "not tried", "killed_by": str(code)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/mutants", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", default=".coverage", help="the tests by line")
    parser.add_argument("--durations", default="durations.txt", help="what pytest --durations=0 printed")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th mutant from the I-th on")
    parser.add_argument("--tests", help="names of tests, from pytest --collect-only -q: no others are tried")
    parser.add_argument("--killers", help="an earlier --out: the test that killed a mutant there is tried first")
    parser.add_argument("--out", default="mutants.jsonl", help="one line a mutant; those that are there are left out")
    told = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    _import_everything()
    reached, out = Reached(told.coverage, told.durations, told.tests), Path(told.out)
    done, killers = outcomes(told.out), outcomes(told.killers)
    first, step = map(int, told.part.split("/"))
    mutants = draw(told.count, told.seed)[first::step]
    for control in [replace(mutant, operator=NONE) for mutant in mutants[:3]]:
        if (found := try_one(control, reached.tests(control)))["status"] == "killed":
            sys.exit(f"Without any change a test fails: {found['killed_by']}")
    for mutant in mutants:
        if mutant not in done:
            killer = killers.get(mutant, {}).get("killed_by", "")
            tests = reached.tests(mutant, killer)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(mutant), **try_one(mutant, tests)}) + "\n")


def outcomes(path: str | None) -> dict[Mutant, dict[str, str]]:
    """What an earlier call wrote."""
    if path is None or not Path(path).exists():
        return {}
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {Mutant(*(line[field.name] for field in fields(Mutant))): line for line in lines}


def _import_everything() -> None:
    """What tests need, so that a forked process begins with them."""
    import importlib
    import warnings

    warnings.simplefilter("ignore")
    for pattern in TARGETS:
        for path in ROOT.glob(pattern):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            importlib.import_module(name if name.startswith("forgetfree") else f"forgetfree.{name}")
    for name in (
        "avalanche.training",
        "transformers",
        "forgetfree.cli",
        "forgetfree.jobs.run",
    ):
        importlib.import_module(name)


if __name__ == "__main__":
    main()
