"""The paper's experiments by name: work done unit by unit, results.json, tables, claims and a figure.

An experiment is one class in one file of `forgetfree.benchmarks.paper`. It says what is measured on one unit
(a task, a number of shots, a seed), and what follows from all rows together.
"""

from forgetfree.jobs.experiment_config import ExperimentConfig, Preset, adjusted
from forgetfree.jobs.experiments.context import ExperimentContext, TunedTask
from forgetfree.jobs.experiments.experiment import (
    Claim,
    Experiment,
    draw_outcome,
    load_experiment,
    load_experiment_results,
    outcome,
    rows_of,
)
from forgetfree.jobs.experiments.rows import (
    SCORE,
    Row,
    Unit,
    distinct,
    kept,
    mean,
    pivot,
    ratio,
    scores_over_sparsity,
    select,
    share_of,
    sparsities_of,
    values,
    verdict,
    with_constant,
)
from forgetfree.jobs.running.workers import usual_jobs
from forgetfree.results.report.page import percent

__all__ = [
    "SCORE",
    "Claim",
    "Experiment",
    "ExperimentConfig",
    "ExperimentContext",
    "Preset",
    "Row",
    "TunedTask",
    "Unit",
    "adjusted",
    "distinct",
    "draw_outcome",
    "kept",
    "load_experiment",
    "load_experiment_results",
    "mean",
    "outcome",
    "percent",
    "pivot",
    "ratio",
    "rows_of",
    "scores_over_sparsity",
    "select",
    "share_of",
    "sparsities_of",
    "usual_jobs",
    "values",
    "verdict",
    "with_constant",
]
