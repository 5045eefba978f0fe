"""forgetfree: continual learning for pre-trained language models.

Importing this package imports neither torch nor transformers nor Avalanche; the names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgetfree.cli.calls import graft as graft
    from forgetfree.cli.calls import plan as plan
    from forgetfree.cli.calls import run as run
    from forgetfree.continual.stream import Stream as Stream
    from forgetfree.continual.stream import load_stream as load_stream
    from forgetfree.core.parameters import ParameterSpace as ParameterSpace
    from forgetfree.core.regions import Region as Region
    from forgetfree.ledger.graft import Graft as Graft
    from forgetfree.ledger.ledger import Ledger as Ledger
    from forgetfree.ledger.mixed_batch import MixedBatchModel as MixedBatchModel
    from forgetfree.ledger.switch import LedgerSwitch as LedgerSwitch
    from forgetfree.models.loading import load_model as load_model
    from forgetfree.results.learning_matrix import LearningMatrix as LearningMatrix
    from forgetfree.results.table import Results as Results
    from forgetfree.results.table import load_results as load_results
    from forgetfree.serve.inference import Predictor as Predictor
    from forgetfree.serve.task_switch import TaskSwitch as TaskSwitch
    from forgetfree.trainers.learning import answering as answering
    from forgetfree.trainers.learning import learning as learning
    from forgetfree.training.training_options import TrainingOptions as TrainingOptions

__version__ = "0.3.0.dev0"

_HOME = {
    "Graft": "forgetfree.ledger.graft",
    "LearningMatrix": "forgetfree.results.learning_matrix",
    "Ledger": "forgetfree.ledger.ledger",
    "LedgerSwitch": "forgetfree.ledger.switch",
    "MixedBatchModel": "forgetfree.ledger.mixed_batch",
    "ParameterSpace": "forgetfree.core.parameters",
    "Predictor": "forgetfree.serve.inference",
    "Region": "forgetfree.core.regions",
    "Results": "forgetfree.results.table",
    "Stream": "forgetfree.continual.stream",
    "TaskSwitch": "forgetfree.serve.task_switch",
    "TrainingOptions": "forgetfree.training.training_options",
    "answering": "forgetfree.trainers.learning",
    "graft": "forgetfree.cli.calls",
    "learning": "forgetfree.trainers.learning",
    "load_model": "forgetfree.models.loading",
    "load_results": "forgetfree.results.table",
    "load_stream": "forgetfree.continual.stream",
    "plan": "forgetfree.cli.calls",
    "run": "forgetfree.cli.calls",
}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forgetfree' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
