"""Measure what result pages need, unit by unit, and keep each unit as soon as it ends.

    python -m benchmarks.evidence related-32 --data DIR --rates
    python -m benchmarks.evidence related-32 --data DIR

evidence/NAME.toml is a file for ``forgetfree run --config``, and results/NAME.csv is what ``forgetfree report --format csv``
prints of that run. The command runs one strategy with one seed at a time and leaves out those that are in the CSV file. So it
can be stopped at any moment, and several processes can share the work.

With ``--rates``, it scores four learning rates of each strategy on validation rows, with a seed that no claim is about, and
writes the averages to results/rates/NAME.json. The best ones belong into the TOML file.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from shutil import rmtree
from types import MappingProxyType
from typing import Any

from forgetfree.continual.region_strategy import SkillOptions
from forgetfree.display import NULL
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.files import locked, write_atomically, write_json
from forgetfree.jobs.config import Execution, RunConfig, prepared
from forgetfree.jobs.environment import quiet_libraries
from forgetfree.jobs.option_file import for_strategies, read_options
from forgetfree.jobs.run import run
from forgetfree.json_file import read_json
from forgetfree.registry import strategy, strategy_name
from forgetfree.results.report.page import Table
from forgetfree.results.report.run_report import render
from forgetfree.results.table import load_results

CONFIGS = Path(__file__).resolve().with_name("evidence")
RESULTS = CONFIGS.with_name("results")
#: The rates that are scored, by the option that has them.
RATES: Mapping[str, tuple[float, ...]] = {
    "lora_learning_rate": (3e-4, 1e-3, 3e-3, 1e-2),
    "region_rate_factor": (0.3, 1.0, 3.0, 10.0),
    "learning_rate": (1e-5, 3e-5, 1e-4, 3e-4),
}
#: The seed that rates are scored with.
SEED = 10


@dataclass(frozen=True)
class Unit:
    """A strategy with one seed.

    Attributes:
        reference: the strategy, as ``--strategy``.
        seed: its seed.
        changes: options that differ from the TOML file.
    """

    reference: str
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return strategy_name(self.reference)

    def __str__(self) -> str:
        return "-".join([self.strategy, str(self.seed), *(f"{value:g}" for value in self.changes.values())])


class Evidence(ABC):
    """Units of one TOML file, and the file that keeps what they found.

    Args:
        name: of the TOML file.
        data: as ``--data``.
        work: where units are run; nothing there is needed later.
    """

    #: Options of all units that differ from the TOML file.
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, name: str, data: str, work: Path) -> None:
        self.section = {**read_options(CONFIGS / f"{name}.toml"), "data": data}
        self.config, self.name, self.work = RunConfig.of(self.section), name, work / name

    def measure(self, strategies: Sequence[str] = ()) -> None:
        """Run the units that are not kept and that no other process runs; of some strategies, or else of all."""
        for unit in (each for each in self.units() if not strategies or each.strategy in strategies):
            with suppress(BlockingIOError), locked(self.work / f"{unit}.lock", wait=False):
                if not self.has(unit):
                    out = self._run(unit)
                    with locked(self.work / "kept.lock"):
                        self.keep(unit, out)
                    rmtree(out)
                    print(f"{self.name}: {unit}", flush=True)

    @abstractmethod
    def units(self) -> Iterable[Unit]:
        """Return all units."""

    @abstractmethod
    def has(self, unit: Unit) -> bool:
        """Say whether a unit is kept."""

    @abstractmethod
    def keep(self, unit: Unit, out: Path) -> None:
        """Add a unit that was run in a directory to those that are kept."""

    def _run(self, unit: Unit) -> Path:
        out = self.work / str(unit)
        rmtree(out, ignore_errors=True)  # of a process that was killed
        section = for_strategies(self.section, [unit.reference])
        section["set"] = {**section["set"], **self.settings, **unit.changes, "cache": str(self.work / "fine-tuned")}
        own = {"strategy": (unit.reference,), "seed": (unit.seed,), "out": str(out)}
        run(prepared(RunConfig.of(section, own)), Execution(debug=True))
        return out


class Scores(Evidence):
    """The scores of all strategies and seeds on test rows, in a CSV file."""

    def units(self) -> Iterable[Unit]:
        """Return all units, seed after seed."""
        return [Unit(reference, seed) for seed, reference in product(self.config.seed, self.config.strategy)]

    def has(self, unit: Unit) -> bool:
        """Say whether the CSV file has a unit."""
        kept = load_results(self._file).runs if self._file.exists() else []
        return any((each.strategy, each.seed) == (unit.strategy, unit.seed) for each in kept)

    def keep(self, unit: Unit, out: Path) -> None:
        """Add a unit to the CSV file."""
        kept = [self._file] if self._file.exists() else []
        write_atomically(self._file, render(load_results(*kept, out), "csv"))

    @property
    def _file(self) -> Path:
        return RESULTS / f"{self.name}.csv"


class Rates(Evidence):
    """The averages of all strategies with some learning rates on validation rows, in a JSON file."""

    settings = MappingProxyType({"evaluate_on": "validation", "upper_triangle": False, "floors": "constant"})

    def units(self) -> Iterable[Unit]:
        """Return the units of all rates."""
        for reference in self.config.strategy:
            option = rate_of(reference)
            for rate in RATES[option]:
                yield Unit(reference, SEED, {f"{strategy_name(reference)}.{option}": rate})

    def has(self, unit: Unit) -> bool:
        """Say whether the JSON file has a rate."""
        (rate,) = unit.changes.values()
        return f"{rate:g}" in averages(self.name).get(unit.strategy, {})

    def keep(self, unit: Unit, out: Path) -> None:
        """Add a rate to the JSON file."""
        (rate,), kept = unit.changes.values(), averages(self.name)
        average = load_results(out).summary()["average", "mean"].item()
        kept.setdefault(unit.strategy, {})[f"{rate:g}"] = average
        _file(self.name).parent.mkdir(exist_ok=True)
        write_json(_file(self.name), kept)


def rate_of(reference: str) -> str:
    """Return the option whose values are scored: the rate of adapters, of a region after fine-tuning, or of all training.

    >>> rate_of("lora"), rate_of("grafting-continual"), rate_of("packnet")
    ('lora_learning_rate', 'region_rate_factor', 'learning_rate')
    """
    options = strategy(reference).Options
    if "lora_learning_rate" in options.model_fields:
        return "lora_learning_rate"
    return "region_rate_factor" if issubclass(options, SkillOptions) else "learning_rate"


def averages(name: str) -> dict[str, dict[str, float]]:
    """Return the average of each rate by strategy; nothing where none was scored.

    Args:
        name: of the TOML file.
    """
    if not _file(name).exists():
        return {}
    found: dict[str, dict[str, float]] = read_json(_file(name), RunError, "Remove it, and score the rates again.")
    return found


def _file(name: str) -> Path:
    return RESULTS / "rates" / f"{name}.json"


def table(name: str) -> Table:
    """Return the average of each rate by strategy, and which one is the best."""
    rows = []
    for scored, found in averages(name).items():
        best = max(found, key=lambda rate: found[rate])
        text = ", ".join(f"{rate}: {100 * average:.1f}" for rate, average in sorted(found.items(), key=_rate))
        rows.append((scored, text, best if len(found) > 1 else NULL))
    return Table(
        f"Learning rates on validation rows of seed {SEED} (average in %)",
        ("strategy", "rate: average", "best"),
        tuple(rows),
    )


def _rate(pair: tuple[str, float]) -> float:
    return float(pair[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(path.stem for path in CONFIGS.glob("*.toml")))
    parser.add_argument("--data", required=True, help="as that of forgetfree run")
    parser.add_argument("--rates", action="store_true", help="score learning rates on validation rows")
    parser.add_argument("--strategy", action="append", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="where units are run")
    asked = parser.parse_args(arguments)
    quiet_libraries()
    try:
        (Rates if asked.rates else Scores)(asked.name, asked.data, asked.work.resolve()).measure(asked.strategy)
    except ForgetfreeError as error:
        print(f"forgetfree: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
