"""Measure the runs of result pages, unit by unit, and store each unit as soon as it ends.

    python -m benchmarks.evidence related-32 --data DIR --rates
    python -m benchmarks.evidence related-32 --data DIR

evidence/NAME.toml is a file for ``forgetfree run --config``, and results/NAME.csv is the output of ``forgetfree report --format
csv`` for that run. The command runs one strategy with one seed at a time and skips units that are in the CSV file. So it can be
stopped at any moment, and several processes with the same ``--work`` can share the units.

With ``--rates``, it scores four or five learning rates of each strategy on validation rows, with a seed that no test score
uses, and writes the averages to results/rates/NAME.json. The TOML file must then have the best ones.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from shutil import rmtree
from types import MappingProxyType
from typing import Any

from forgetfree.errors import ForgetfreeError, RunError, UnknownNameError
from forgetfree.files import locked, write_atomically, write_json
from forgetfree.jobs.config import Execution, RunConfig, prepared
from forgetfree.jobs.environment import quiet_libraries
from forgetfree.jobs.option_file import for_strategies, read_options
from forgetfree.jobs.run import run
from forgetfree.json_file import read_json
from forgetfree.registry import strategy, strategy_name
from forgetfree.results.report.run_report import render
from forgetfree.results.runs import read_run
from forgetfree.results.table import Results, load_results

CONFIGS = Path(__file__).resolve().with_name("evidence")
RESULTS = CONFIGS.with_name("results")
#: The scored rates: of all training (readout and region have multiples of it); of adapters (the lowest was added when the next
#: had the best score); and of PackNet's region, as multiples of the rate in fine-tuning: for 0.1 % of the entries, they are
#: 0.3, 1, 3 and 10 times √(N/s).
RATES = ("learning_rate", (1e-5, 3e-5, 1e-4, 3e-4))
ADAPTER_RATES = ("lora_learning_rate", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2))
PACKNET_RATES = ("region_rate_factor", (10.0, 32.0, 95.0, 316.0))
#: The seed that rates are scored with.
SEED = 10


@dataclass(frozen=True)
class Unit:
    """A strategy with one seed.

    Attributes:
        reference: the strategy, as ``--strategy``.
        seed: its seed.
        rate: a learning rate in place of the one in the TOML file.
    """

    reference: str
    seed: int
    rate: float | None = None

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return strategy_name(self.reference)

    @property
    def changes(self) -> dict[str, float]:
        """The options that differ from the TOML file."""
        return {} if self.rate is None else {f"{self.strategy}.{rates_of(self.reference)[0]}": self.rate}

    def __str__(self) -> str:
        return f"{self.strategy}-{self.seed}" + ("" if self.rate is None else f"-{self.rate:g}")


class Evidence(ABC):
    """Units of one TOML file, and the file with their results.

    Args:
        name: the name of the TOML file.
        data: as ``--data``.
        work: the directory in which units run; it is not needed later.
    """

    #: Options of all units that differ from the TOML file.
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, name: str, data: str, work: Path) -> None:
        self.section = {**read_options(CONFIGS / f"{name}.toml"), "data": data}
        self.config, self.name, self.work = RunConfig.of(self.section), name, work / name
        self.references = dict(zip(self.config.strategy_names, self.config.strategy, strict=True))

    def measure(self, strategies: Sequence[str] = ()) -> None:
        """Run the units of some strategies, or of all, unless they are stored or another process runs them.

        Raises:
            UnknownNameError: there is no such strategy.
        """
        for name in strategies:
            if name not in self.references:
                raise UnknownNameError("strategy", name, self.references)
        for unit in self.units():
            if not strategies or unit.strategy in strategies:
                self._measure(unit)

    def _measure(self, unit: Unit) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.work / f"{unit}.lock", wait=False))
            except BlockingIOError:
                return
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
        """Return whether a unit is stored."""

    @abstractmethod
    def keep(self, unit: Unit, out: Path) -> None:
        """Store the results of a unit that ran in a directory."""

    def _run(self, unit: Unit) -> Path:
        out = self.work / str(unit)
        rmtree(out, ignore_errors=True)  # left by a killed process
        section = for_strategies(self.section, [unit.reference])
        section["set"] = {**section["set"], **self.settings, **unit.changes, "cache": str(self.work / "fine-tuned")}
        own = {"strategy": (unit.reference,), "seed": (unit.seed,), "out": str(out)}
        run(prepared(RunConfig.of(section, own)), Execution(debug=True))
        return out


class Scores(Evidence):
    """The scores of all strategies and seeds on test rows, in a CSV file."""

    @property
    def path(self) -> Path:
        """The CSV file."""
        return RESULTS / f"{self.name}.csv"

    def units(self) -> Iterable[Unit]:
        """Return all units, seed after seed.

        Raises:
            RunError: the TOML file does not have the best of the scored rates.
        """
        for name, found in averages(self.name).items():
            option, rates = rates_of(self.references[name])
            ours, best = getattr(self.config.options[name], option), max(found, key=lambda rate: found[rate])
            if len(found) < len(rates) or ours != float(best):
                raise RunError(
                    f"{self.name}.toml: expected {name}.{option}={best}, the best of the {len(rates)} rates in "
                    f"{rates_path(self.name)} (which has {len(found)}), got {ours}. Score all with --rates, and write the best."
                )
        return [Unit(reference, seed) for seed, reference in product(self.config.seed, self.config.strategy)]

    def has(self, unit: Unit) -> bool:
        """Return whether the CSV file has a unit."""
        kept = load_results(self.path).runs if self.path.exists() else []
        return any((each.strategy, each.seed) == (unit.strategy, unit.seed) for each in kept)

    def keep(self, unit: Unit, out: Path) -> None:
        """Add a unit to the CSV file, and update its header for all units."""
        steps = {options.steps for options in self.config.options.values()}
        records = [read_run(path) for path in (self.path, out) if path.exists()]
        for each in records[-1].runs:
            each.facts.made["command"] = f"python -m benchmarks.evidence {self.name} --data DIR"
        data = {"steps": steps.pop() if len(steps) == 1 else None}
        abouts = [each.about.model_copy(update={"data": {**each.about.data, **data}}) for each in records]
        together = [replace(each, about=about) for each, about in zip(records, abouts, strict=True)]
        write_atomically(self.path, render(Results(together), "csv"))


class Rates(Evidence):
    """The averages of all strategies with some learning rates on validation rows, in a JSON file."""

    settings = MappingProxyType({"evaluate_on": "validation", "upper_triangle": False, "floors": "constant"})

    def units(self) -> Iterable[Unit]:
        """Return the units of all rates."""
        return [Unit(reference, SEED, rate) for reference in self.config.strategy for rate in rates_of(reference)[1]]

    def has(self, unit: Unit) -> bool:
        """Return whether the JSON file has a rate."""
        return f"{unit.rate:g}" in averages(self.name).get(unit.strategy, {})

    def keep(self, unit: Unit, out: Path) -> None:
        """Add a rate to the JSON file."""
        kept = averages(self.name)
        kept.setdefault(unit.strategy, {})[f"{unit.rate:g}"] = load_results(out).summary()["average", "mean"].item()
        rates_path(self.name).parent.mkdir(exist_ok=True)
        write_json(rates_path(self.name), kept)


def rates_of(reference: str) -> tuple[str, tuple[float, ...]]:
    """Return the option that scales the training of a strategy, and the values that are scored.

    >>> rates_of("lora")[0], rates_of("grafting-continual")[0], rates_of("ewc")[0]
    ('lora_learning_rate', 'learning_rate', 'learning_rate')

    Args:
        reference: the strategy, as ``--strategy``.
    """
    options = strategy(reference).Options
    if "lora_learning_rate" in options.model_fields:
        return ADAPTER_RATES
    return PACKNET_RATES if "keep" in options.model_fields else RATES


def rates_path(name: str) -> Path:
    """Return the JSON file with the averages of rates."""
    return RESULTS / "rates" / f"{name}.json"


def averages(name: str) -> dict[str, dict[str, float]]:
    """Return the average of each rate by strategy; empty if none was scored.

    Args:
        name: the name of the TOML file.
    """
    if not rates_path(name).exists():
        return {}
    found: dict[str, dict[str, float]] = read_json(rates_path(name), RunError, "Remove it, and score the rates again.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the missing units, and return the exit status."""
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
