"""A sweep: options tried on validation rows, and the best of them run once on test rows. A unit is a trial with a seed.

OUT/results.json              every trial, and which was chosen
OUT/report.md                 the table of trials
OUT/trials/N/seed-S/          a unit
OUT/chosen/                   the run with the chosen setting: as `forgetfree run` writes it
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.errors import Faults, ForgetfreeError, RunError
from forgetfree.files import write_atomically
from forgetfree.jobs.config import InMemory, with_precision
from forgetfree.jobs.job import Job
from forgetfree.jobs.run import RunJob, shared_value
from forgetfree.jobs.running.costs import Workload
from forgetfree.jobs.running.engine import perform
from forgetfree.jobs.running.execution import Execution
from forgetfree.jobs.running.unit import Json, Unit
from forgetfree.jobs.sweep_config import CheckedSweep, Range, Setting, SweepConfig, setting_text
from forgetfree.results.records import CHOSEN, SweepResults
from forgetfree.results.report.graft_and_sweep import lay_out_sweep
from forgetfree.results.report.page import render_page
from forgetfree.results.scores import SCORES_FILE, Score, write_scores
from forgetfree.seeds import derive_seed
from forgetfree.training.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.core.parameters import ParameterSpace

#: Trials that are drawn at a time: from all that came before, so the outcome does not depend on the number of workers.
_ROUND = 4


class Sweep:
    """A sweep from its first trial to the run of the setting that it chose.

    Args:
        config: what is tried.

    Attributes:
        settings: how many are tried.

    Raises:
        UsageError: the configuration is wrong.
    """

    def __init__(self, config: SweepConfig) -> None:
        self.config = with_precision(config)
        self._checked = self.config.checked()
        self.settings = len(self._checked.settings) if config.trials is None else config.trials

    def perform(self, execution: Execution) -> Json:
        """Try all settings on validation rows, then run the best one on test rows, with the same seeds.

        Returns:
            The content of results.json, and under ``run`` that of the chosen run, whose ``failed`` is this one's, too.
        """
        config, checked = self.config, self._checked
        if config.trials is None:
            results = perform(SweepJob(config, checked), execution)
        else:
            settings, trials = list[Setting](), list[Json]()
            while len(settings) < config.trials:
                settings += draw(config, trials, min(_ROUND, config.trials - len(settings)))
                checked = config.checked_settings(settings)
                results = perform(SweepJob(config, checked), execution)
                trials, execution = results["trials"][: len(settings)], replace(execution, resume=True)
        if results["chosen"] is None:
            errors = [error for trial in results["trials"] for error in trial["errors"]]
            raise RunError(f"No setting could be trained with every seed: {errors[0]} Try others in another --out.")
        out = Path(config.out) / CHOSEN
        chosen = RunJob(config.run_config(checked.settings[results["chosen"]], str(out), trial=False))
        run = perform(chosen, replace(execution, resume=(out / "config.json").exists()))
        return results | {"run": run, "failed": run["failed"]}


def draw(config: SweepConfig, trials: Sequence[Json], count: int) -> list[Setting]:
    """Return settings that Optuna's tree-structured Parzen estimator proposes.

    Args:
        config: what is tried; its first seed is the sampler's.
        trials: all before, as results.json has them.
        count: how many.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: _distribution(values) for key, values in config.candidates().items()}
    seed = derive_seed(config.seeds[0], "sweep", str(len(trials))) % 2**32
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for trial in trials:
        score = {"value": trial["mean"]} if trial["mean"] is not None else {"state": optuna.trial.TrialState.FAIL}
        study.add_trial(optuna.trial.create_trial(params=trial["values"], distributions=space, **score))
    drawn = [study.ask(space).params for _ in range(count)]
    return [{key: _short(value, config.candidates()[key]) for key, value in params.items()} for params in drawn]


def _distribution(values: tuple[Any, ...] | Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(values)
    kind = IntDistribution if values.is_whole else FloatDistribution
    return kind(values.low, values.high, log=values.low > 0)


def _short(value: Any, values: tuple[Any, ...] | Range) -> Any:
    """Return a drawn number with three digits, which one can type again."""
    if not isinstance(value, float) or not isinstance(values, Range):
        return value
    return min(max(float(f"{value:.3g}"), values.low), values.high)


class SweepJob(Job[SweepConfig]):
    """The trials of a sweep.

    Args:
        config: what was asked for.
        checked: the settings that are tried.
    """

    growing = ()
    learns_stream = True

    def __init__(self, config: SweepConfig, checked: CheckedSweep) -> None:
        self.settings = checked.settings
        self._options = [run.options[config.strategy_name] for run in checked.runs]
        precisions = [name for options in self._options for name in options.precisions]
        super().__init__(config, checked, checked.runs[0].run, precisions)

    @classmethod
    def first(cls, config: SweepConfig, in_memory: InMemory | None = None) -> SweepJob:
        """Return the trials that a sweep begins with."""
        config = with_precision(config)
        if config.trials is None:
            return cls(config, config.checked())
        return cls.of(config, draw(config, [], min(_ROUND, config.trials)))

    @classmethod
    def of(cls, config: SweepConfig, settings: Sequence[Setting]) -> SweepJob:
        """Return the trials of some settings, which are checked."""
        return cls(config, config.checked_settings(settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self.config, self.settings)

    @classmethod
    def workload(cls, config: SweepConfig, checked: CheckedSweep | None, faults: Faults) -> Workload:
        """Return every trial, and the run with a setting that is chosen, as if it were the first."""
        settings, runs = (checked.settings, checked.runs) if checked else (_first_setting(config), (None,))
        trials = [
            (config.run_config(setting, config.out, trial=True), run)
            for setting, run in zip(settings, runs, strict=True)
        ]
        chosen = config.run_config(settings[0], config.out, trial=False)
        if config.trials is not None:
            trials = trials[:1] * config.trials
        every = [
            RunJob.workload(run, known or faults.attempt(run.checked), faults)
            for run, known in [*trials, (chosen, None)]
        ]
        units = [
            replace(unit, name=f"trials/{number}/seed-{unit.seed}")
            for number, each in enumerate(every)
            for unit in each.units
        ]
        return replace(every[0], units=units)

    @cached_property
    def run(self) -> RunJob:
        """Return the run whose streams all trials learn: what is tried changes no stream."""
        config = self.config.run_config(self.settings[0], self.config.out, trial=True)
        return RunJob(config, checked=self.checked.runs[0])

    def keys(self) -> Json:
        """Return every trial, seed after seed."""
        return {
            f"trials/{number}/seed-{seed}": {"trial": number, "setting": setting_text(setting), "seed": seed}
            for seed in self.config.seeds
            for number, setting in enumerate(self.settings)
        }

    def describe(self) -> Json:
        """Describe tasks, model and data, and check every setting against the stream."""
        from forgetfree.continual.construction import check_options  # with Avalanche

        description = self.run.describe()
        stream = self.run.learner.stream(self.config.seeds[0])
        for options in self._options:
            check_options(self.run.checked.classes[self.config.strategy_name], options, stream)
        about = {key: description["about"][key] for key in ("stream", "tasks", "evaluated_on", "model", "data")}
        about["data"]["steps"] = shared_value(options.steps for options in self._options)
        about["metric"] = [task.definition.metric for task in stream.tasks]
        return {key: value for key, value in description.items() if key != "options"} | {
            "about": {**about, "strategy": self.config.strategy_name}
        }

    def space(self) -> ParameterSpace:
        """Return that of the stream's model, which is the same in every trial."""
        return self.run.space()

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Learn the stream with one setting, and score it; nothing else is kept."""
        number, seed, scores = key["trial"], key["seed"], list[Score]()
        tasks = self.run.learner.stream(seed).tasks

        def write(rows: Sequence[Any]) -> None:
            more = [
                Score(key, task.name, len(rows) - 1, metric, rows[-1][task.name].score(metric), len(task.test))
                for task in tasks
                if task.name in rows[-1]
                for metric in [task.definition.metric]
            ]
            scores.extend(more)
            write_scores(directory / SCORES_FILE, scores)
            monitor.scored(more)

        self.run.learner.learn(self.config.strategy_name, seed, monitor, on_row=write, options=self._options[number])
        last = [score for score in scores if score.after == len(tasks)]
        return {
            "values": self.settings[number],
            # The best is the highest, so a score of which lower is better counts as its negative.
            "average": statistics.fmean(task.gain(score.value) for task, score in zip(tasks, last, strict=True)),
            "rows": sum(score.rows for score in last),
        }

    @classmethod
    def gather(cls, out: Path, about: Json, units: Sequence[tuple[Unit, Json | None]]) -> Json:
        """Return ``trials``, and under ``chosen`` the one with the best mean among those that all seeds ended well."""
        trials: dict[int, Json] = {}
        for unit, record in units:
            number = unit.key["trial"]
            empty: Json = {"scores": [], "values": {}, "rows": None, "mean": None, "std": None, "errors": []}
            trial = trials.setdefault(number, {"trial": number, "setting": unit.key["setting"], **empty})
            if record and record["status"] == "done":
                details = record["details"]
                trial["scores"].append({"seed": unit.key["seed"], "average": details["average"]})
                trial |= {"values": details["values"], "rows": details["rows"]}
                trials[number] = trial
            elif record:
                trial["errors"].append(record["error"])
        seeds = len({unit.key["seed"] for unit, _ in units})
        for trial in trials.values():
            averages = [score["average"] for score in trial["scores"]]
            if len(averages) == seeds:
                trial["mean"] = statistics.fmean(averages)
                trial["std"] = statistics.stdev(averages) if seeds > 1 else None
        complete = [trial for trial in trials.values() if trial["mean"] is not None]
        best = max(complete, key=lambda trial: trial["mean"])["trial"] if complete else None
        return about | {"trials": [trials[number] for number in sorted(trials)], "chosen": best}

    @classmethod
    def report(cls, out: Path, results: Json, ended: bool) -> None:
        """Write the table of trials."""
        write_atomically(out / "report.md", render_page(lay_out_sweep(SweepResults.of(results)), "markdown"))


def _first_setting(config: SweepConfig) -> tuple[Setting]:
    """Return a setting by which the rest of a sweep with a fault can be looked at."""
    try:
        return (config.grid()[0],)
    except ForgetfreeError:
        return ({},)
