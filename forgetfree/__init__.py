"""forgetfree: continual learning for pre-trained language models.

Importing this package imports neither torch nor transformers nor Avalanche; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgetfree.grafting import Graft as Graft
    from forgetfree.grafting import MaskOptions as MaskOptions
    from forgetfree.grafting import learn_region as learn_region
    from forgetfree.ledger import Ledger as Ledger
    from forgetfree.ledger import LedgerSwitch as LedgerSwitch
    from forgetfree.models.loading import load_model as load_model
    from forgetfree.parameters import ParameterSpace as ParameterSpace
    from forgetfree.regions import Region as Region
    from forgetfree.streams import Stream as Stream
    from forgetfree.streams import load_stream as load_stream
    from forgetfree.training import TrainingOptions as TrainingOptions

__version__ = "0.3.0.dev0"

_HOME = {
    "Graft": "forgetfree.grafting",
    "Ledger": "forgetfree.ledger",
    "LedgerSwitch": "forgetfree.ledger",
    "MaskOptions": "forgetfree.grafting",
    "ParameterSpace": "forgetfree.parameters",
    "Region": "forgetfree.regions",
    "Stream": "forgetfree.streams",
    "TrainingOptions": "forgetfree.training",
    "learn_region": "forgetfree.grafting",
    "load_model": "forgetfree.models.loading",
    "load_stream": "forgetfree.streams",
}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forgetfree' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
