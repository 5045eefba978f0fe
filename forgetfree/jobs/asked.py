"""What a configuration of any kind asks for: tasks, a model, and units with their phases, for a plan beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from forgetfree.errors import ForgetfreeError, UsageError
from forgetfree.jobs.config import CommonOptions, Faults, JobConfig
from forgetfree.jobs.experiment_config import ExperimentConfig
from forgetfree.jobs.graft_config import GraftConfig
from forgetfree.jobs.in_memory import InMemory
from forgetfree.jobs.run_config import RunConfig, RunOptions, strategies_of
from forgetfree.jobs.running.unit import Json
from forgetfree.jobs.sweep_config import Setting, SweepConfig
from forgetfree.learning.localization import LocalizationOptions
from forgetfree.learning.monitor import Phase
from forgetfree.learning.training import TrainingOptions


@dataclass(frozen=True)
class Learner:
    """A unit of a job, as far as it costs.

    Attributes:
        unit: its name.
        tasks: that it learns, in order.
        options: how.
        phases: that each task takes.
        shots: training rows a label.
        seed: of the sample.
        keeps: ``ledger``, ``models`` or ``model``.
        evaluations: how many times it answers the test rows of a task, on average.
        repeats: how many models it fine-tunes for a task.
        sparsities: shares of the space that regions may have.
        check: refuses options that do not go with a stream.
    """

    unit: str
    tasks: tuple[str, ...]
    options: TrainingOptions
    phases: tuple[Phase, ...]
    shots: int | None
    seed: int
    keeps: str = "ledger"
    evaluations: float = 1.0
    repeats: int = 1
    sparsities: tuple[float, ...] = ()
    check: Callable[[Any, Any], None] = lambda options, stream: None


@dataclass
class Asked:
    """What a configuration asks for, of any kind of job.

    Attributes:
        model: its name.
        readout: as it is asked for.
        tasks: the names of the tasks.
        common: the job's own options.
        learners: its units.
    """

    model: str
    readout: str
    tasks: tuple[str, ...]
    common: CommonOptions
    learners: list[Learner] = field(default_factory=list)

    @property
    def sparsities(self) -> tuple[float, ...]:
        """The sparsities of all units, each once."""
        return tuple(dict.fromkeys(sparsity for learner in self.learners for sparsity in learner.sparsities))


def asked_for(config: JobConfig, in_memory: InMemory, faults: Faults) -> Asked:
    """Return what a configuration asks for; what is wrong with it is added to ``faults``."""
    match config:
        case RunConfig():
            return _asked_of_run(config, in_memory, faults)
        case SweepConfig():
            settings = faults.attempt(config.checked) or _one_setting(config)
            trials = settings if config.trials is None else [settings[0]] * config.trials
            runs = [config.run_config(setting, config.out, trial=True) for setting in trials]
            runs.append(config.run_config(settings[0], config.out, trial=False))  # the chosen one
            every = [_asked_of_run(run, in_memory, faults, f"trials/{number}/") for number, run in enumerate(runs)]
            every[0].learners = [learner for each in every for learner in each.learners]
            return every[0]
        case GraftConfig():
            return _asked_of_graft(config, faults)
        case ExperimentConfig():
            return _asked_of_experiment(config, faults)
    raise UsageError(f"There is no plan of a {config.command}.")


def _one_setting(config: SweepConfig) -> list[Setting]:
    """Return a setting by which the rest of a sweep with a fault can be looked at."""
    try:
        return config.grid()[:1]
    except ForgetfreeError:
        return [{}]


def _asked_of_run(config: RunConfig, in_memory: InMemory, faults: Faults, prefix: str = "") -> Asked:
    config = replace(config, strategies=strategies_of(config.strategies))
    checked = faults.attempt(config.checked, in_memory.strategies)
    common = (checked and checked.run) or RunOptions()
    names = config.names
    asked = Asked(config.model, config.readout, names, common)
    if checked is None:
        return asked
    count = len(names)
    for seed in config.seeds:
        for name, cls in checked.classes.items():
            options = checked.options[name]
            phases: tuple[Phase, ...] = getattr(cls, "phases", ("train",))
            # When it is learned; after each later task, if that may change it; before the first and until it is learned.
            changing = 0 if cls.forget_free else (count - 1) / 2
            evaluations = 1 + changing + (1 + (count - 1) / 2 if common.upper_triangle else 0)
            keeps = "ledger" if hasattr(options, "sparsity") else "models" if phases == ("fine_tune",) else "model"
            sparsities = (options.sparsity,) if hasattr(options, "sparsity") else ()
            unit = f"{prefix}seed-{seed}" if prefix else f"{name}/seed-{seed}"
            asked.learners.append(
                Learner(
                    unit,
                    names,
                    options,
                    phases,
                    config.shots,
                    seed,
                    keeps,
                    evaluations,
                    sparsities=sparsities,
                    check=cls.check,
                )
            )
    return asked


def _asked_of_graft(config: GraftConfig, faults: Faults) -> Asked:
    checked = faults.attempt(config.checked)
    common = checked.common if checked else CommonOptions()
    asked = Asked(config.model, config.readout, (config.task,), common)
    if checked is None:
        return asked
    options, phases = checked.options[0], ("fine_tune", "localize")
    sparsities = tuple(each.sparsity for each in checked.options)
    for seed in config.seeds:
        how: Json = {"evaluations": 3.0 + len(sparsities), "sparsities": sparsities}
        own: tuple[Phase, ...] = phases[1:] if config.fine_tuned else phases  # type: ignore[assignment]
        asked.learners.append(Learner(f"seed-{seed}", (config.task,), options, own, config.shots, seed, **how))
    return asked


def _asked_of_experiment(config: ExperimentConfig, faults: Faults) -> Asked:
    from forgetfree.jobs.experiments import load_experiment
    from forgetfree.options import build

    checked = faults.attempt(config.checked)
    if checked is None:
        return Asked(config.model or "minilm", config.readout or "auto", config.tasks, CommonOptions())
    preset, common, experiment = checked.preset, checked.common, load_experiment(config.name)
    names = tuple(each[0] for each in experiment.tasks(preset))
    own = {key: getattr(preset, key) for key in ("max_length", "test_limit", "evaluate_on", "graftable")}
    common = CommonOptions(**(vars(common) | own | {"or_fewer": True}))
    asked = Asked(preset.model, preset.readout, names, common)
    given = {"sparsity": preset.sparsity, **preset.options, **preset.fixed}
    options = faults.attempt(build, LocalizationOptions, given, "the experiment") or LocalizationOptions()
    repeats = sum(map(len, preset.arms.values())) or len(preset.grid)
    for unit in experiment.units(preset):
        folder = "-".join(str(value) for value in unit.values())
        tasks = (unit["task"],) if "task" in unit else names
        how: Json = {"evaluations": 2.0 + len(preset.sparsities), "repeats": repeats, "sparsities": preset.sparsities}
        shots, seed = unit.get("shots", preset.shots[0]), unit.get("seed", preset.seeds[0])
        asked.learners.append(Learner(f"units/{folder}", tasks, options, ("fine_tune", "localize"), shots, seed, **how))
    return asked
