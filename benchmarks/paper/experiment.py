"""An experiment of the paper as a script: it measures units one by one, and reports on all their rows.

    python -m benchmarks.paper.calibration --data DIR --out runs/calibration

OUT/setting.json         the setting; it must be the same when the command is repeated
OUT/units/NAME.json      the rows of a finished unit; they are not measured again
OUT/calibration.csv      all rows, below a line with the setting
OUT/report.md            the paper's claims with our measurements, and tables
OUT/calibration.png      the paper's figure
"""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.paper.context import Context
from benchmarks.paper.rows import Row, Unit, rows_of_csv, rows_to_csv
from benchmarks.paper.setting import Setting
from forgetfree.data.sources import default_data
from forgetfree.device import find_device
from forgetfree.errors import DataError, ForgetfreeError, RunError, UsageError
from forgetfree.files import make_directory, write_atomically, write_json
from forgetfree.jobs.environment import check_precision, quiet_libraries, set_threads, versions
from forgetfree.json_file import read_json
from forgetfree.results.report.page import Page, Table, render_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the paper's measurement, ours, and whether the claim holds here.

    Attributes:
        text: the claim.
        paper: the paper's number; a dash if only the claim is available.
        ours: our number.
        holds: whether the claim holds here; ``None`` if the rows do not decide it.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None


class Experiment(ABC):
    """Base class of all experiments. Subclasses define measurements, tables, claims and a figure."""

    name: ClassVar[str]
    #: The part of the paper that it repeats.
    paper: ClassVar[str]
    #: Its question, in one sentence.
    question: ClassVar[str]
    setting: ClassVar[Setting]
    #: Settings that may have only one value: several numbers of shots, or sparsities, would be mistaken for seeds.
    single: ClassVar[tuple[str, ...]] = ("shots",)

    def tasks(self, setting: Setting) -> list[tuple[str, ...]]:
        """Return the tasks whose data it needs, each with one name or several; the first name with data is used."""
        return [(task,) for task in setting.tasks]

    def units(self, setting: Setting) -> list[Unit]:
        """Return the units: by default every task with every number of shots and seed."""
        return [
            {"task": task, "shots": shots, "seed": seed}
            for task, shots, seed in product(setting.tasks, setting.shots, setting.seeds)
        ]

    @abstractmethod
    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure one unit, and return tidy rows; the keys of the unit are added to them."""

    @abstractmethod
    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return the tables of the report."""

    @abstractmethod
    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return the paper's claims, each with our measurement."""

    @abstractmethod
    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw the paper's figure from our rows."""

    def page(self, header: Mapping[str, Any], rows: Sequence[Row]) -> Page:
        """Return the report: claims, then tables.

        Args:
            header: the setting of the rows, from the first line of their file.
            rows: all rows.
        """
        setting, seeds = header["setting"], len({row["seed"] for row in rows})
        notes = [
            self.question,
            f"{setting['model']}, readout {setting['readout']}, {' and '.join(map(str, setting['shots']))} shots, "
            f"{seeds} {'seed' if seeds == 1 else 'seeds: mean (std)'}; all in %",
        ]
        if setting.get("evaluate_on", "test") != "test":
            notes.append(f"scored on {setting['evaluate_on']} rows: to choose options by, not to report")
        if header["skipped"]:
            notes.append(f"no data at hand for: {', '.join(header['skipped'])}")
        verdicts = {True: "yes", False: "no", None: "undecided"}
        claims = Table(
            "What the paper claims",
            ("claim", "paper", "here", "holds here"),
            tuple((c.text, c.paper, c.ours, verdicts[c.holds]) for c in self.claims(rows)),
        )
        return Page(f"{self.name}: {self.paper}", tuple(notes), (claims, *self.tables(rows)))


def read_rows(file: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the setting of the rows of a CSV file, and the rows."""
    header, rows = rows_of_csv(file.read_text(encoding="utf-8"))
    return header, rows


# -- As a script -----------------------------------------------------------------------------------------


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> int:
    """Measure the requested units that are missing, write files and print the report; return the exit code."""
    asked = _parser(experiment).parse_args(arguments)
    out = Path(asked.out)
    quiet_libraries()
    try:
        setting = setting_of(experiment, asked)
        context = Context(setting, asked.data, find_device(asked.device), out, asked.cache or out.parent / "fine-tuned")
        options = context.options(**setting.optimizer)
        check_precision([options.precision], context.device)
        set_threads(asked.threads)
        page = measure(experiment, context)
    except ForgetfreeError as error:
        print(f"{experiment.name}: error: {error}", file=sys.stderr)
        return error.exit_code
    print(render_page(page, "rich"))
    return 0


def _parser(experiment: Experiment) -> argparse.ArgumentParser:
    usual = experiment.setting
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.paper.{experiment.name.replace('-', '_')}",
        description=f"{experiment.question} ({experiment.paper})",
    )
    parser.add_argument("--data", default=default_data(), help="as that of forgetfree run")
    parser.add_argument("--out", default=f"runs/{experiment.name}", help="directory to write, or to go on in")
    parser.add_argument("--cache", type=Path, help="of fine-tuned models, which experiments share; default: beside OUT")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    lists: dict[str, Callable[[str], Any]] = {"tasks": str, "shots": int, "seeds": int, "sparsities": float}
    for name, kind in lists.items():
        flag = {"sparsities": "sparsity"}.get(name, name if name == "shots" else name[:-1])
        told = " ".join(map(str, getattr(usual, name)))
        parser.add_argument(f"--{flag}", dest=name, action="append", type=kind, help=f"several times; default: {told}")
    for name in ("model", "readout", "evaluate_on", "graftable"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=getattr(usual, name), help="default: %(default)s")
    parser.add_argument("--test-limit", type=int, default=usual.test_limit, help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of training")
    return parser


def setting_of(experiment: Experiment, asked: argparse.Namespace) -> Setting:
    """Return the experiment's setting with the requested changes.

    Raises:
        UsageError: the experiment does not support a change.
    """
    changes: dict[str, Any] = {
        name: tuple(given) for name in ("tasks", "shots", "seeds", "sparsities") if (given := vars(asked)[name])
    }
    changes |= {name: vars(asked)[name] for name in ("model", "readout", "evaluate_on", "graftable", "test_limit")}
    for name in changes.keys() & {*experiment.single}:
        if len(changes[name]) > 1:
            several = ", ".join(map(str, changes[name]))
            raise UsageError(f"{experiment.name} looks at one of {name}, got {several}. Give one.")
    fixed = dict[str, str]()
    for each in asked.set:
        key, equals, value = each.partition("=")
        if not equals:
            raise UsageError(f"--set takes KEY=VALUE, got {each!r}. Write, say, --set steps=100.")
        if key == "sparsity" or any(key in arm for arm in experiment.setting.arms.values()):
            raise UsageError(
                f"--set {key}: this experiment varies this option itself. Leave it out, or give --sparsity."
            )
        fixed[key] = value
    return replace(experiment.setting, **changes, fixed=fixed)


def measure(experiment: Experiment, context: Context) -> Page:
    """Measure the units whose rows are not in ``context.out`` yet, write the files of all rows, and return the report.

    Raises:
        DataError: there is no data.
        RunError: the directory was begun with another setting, model or data.
    """
    from benchmarks.paper.plots import save_figure

    setting, out = context.setting, context.out
    needed = experiment.tasks(setting)
    skipped = {names[0]: reason for names in needed if (reason := context.missing(names))}
    units = [unit for unit in experiment.units(setting) if unit.get("task") not in skipped]
    if not units or (skipped and "task" not in units[0]):
        raise DataError(next(iter(skipped.values())))
    data: dict[str, str | None] = {name: None for name in skipped if name not in setting.tasks}
    there = [context.first_available(names) for names in needed if names[0] not in skipped]
    data |= {name: context.rows(name).fingerprint() for name in there}
    header = {
        "experiment": experiment.name,
        "paper": experiment.paper,
        "setting": asdict(setting),
        "model": context.model().fingerprint,
        "data": data,
        "skipped": skipped,
        "versions": {package: versions()[package] for package in ("forgetfree", "torch", "transformers")},
        "device": context.device,
    }
    make_directory(out / "units")
    check_setting(out / "setting.json", header, units[0])
    rows = list[Row]()
    for unit in units:
        file = out / "units" / f"{'-'.join(map(str, unit.values())).replace('/', '_')}.json"
        if not file.exists():
            print(f"{experiment.name}: {', '.join(f'{key} {value}' for key, value in unit.items())}", file=sys.stderr)
            write_json(file, [{**unit, **row} for row in experiment.measure(context, unit)])
        rows += read_json(file, RunError, "Remove it, and it is measured again.")
    write_atomically(out / f"{experiment.name}.csv", rows_to_csv(rows, header))
    page = experiment.page(json.loads(json.dumps(header)), rows)
    write_atomically(out / "report.md", render_page(page, "markdown"))
    save_figure(experiment.draw(rows), out / experiment.name)
    return page


def check_setting(file: Path, header: Mapping[str, Any], unit: Unit) -> None:
    """Write the setting; raise ``RunError`` if the file has a different one.

    Args:
        file: setting.json of the directory.
        header: the current header.
        unit: the first unit: its keys may get further values.
    """
    lists = {"tasks": "task", "shots": "shots", "seeds": "seed"}
    growing = {name for name, part in lists.items() if part in unit}
    now: dict[str, Any] = json.loads(json.dumps({key: each for key, each in header.items() if key != "skipped"}))
    if file.exists():
        before = read_json(file, RunError, "Give another --out.")
        pairs = {
            f"setting.{key}": (before["setting"].get(key), now["setting"][key])
            for key in now["setting"].keys() - growing
        }
        pairs |= {
            f"data of {key}": (before["data"][key], now["data"][key]) for key in before["data"].keys() & now["data"]
        }
        pairs |= {key: (before[key], now[key]) for key in ("experiment", "model", "versions", "device")}
        if differing := [name for name, (was, becomes) in pairs.items() if was != becomes]:
            raise RunError(
                f"{file.parent} was begun otherwise: these differ: {', '.join(sorted(differing))}. Give another --out."
            )
        now["data"] = before["data"] | now["data"]
    write_json(file, now)
