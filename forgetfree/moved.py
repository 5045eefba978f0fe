"""Modules of version 0.2 under their old names: they can be imported, with a warning, until version 0.4."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Where the names of an old module are now.
MOVED: Mapping[str, tuple[str, ...]] = {
    f"forgetfree.{old}": tuple(f"forgetfree.{module}" for module in new)
    for old, new in {
        "adapter": ("continual.adapter",),
        "apply": ("serve.apply",),
        "experiments": ("jobs.experiments",),
        "figures": ("results.figures",),
        "fisher": ("core.fisher",),
        "graft_file": ("core.graft_file",),
        "grafting": ("core.graft", "core.graft_origin", "core.base_regions", "core.mask", "core.trained"),
        "inference": ("serve.inference",),
        "ledger_strategy": ("continual.regions",),
        "localization": ("learning.localization",),
        "lora": ("models.lora_adapters", "strategies.lora.file"),
        "lora_strategy": ("strategies.lora.task_adapters",),
        "metrics": ("results.metrics",),
        "monitor": ("learning.monitor",),
        "parameters": ("core.parameters",),
        "regions": ("core.regions",),
        "runner": ("jobs.runner",),
        "run_config": ("jobs.run_config",),
        "single_task": ("learning.single_task",),
        "skill_strategy": ("continual.skills",),
        "strategy": ("continual.strategy",),
        "streams": ("continual.streams",),
        "training": ("learning.training", "core.steps", "core.trained", "core.examples"),
    }.items()
}

#: Classes of old modules that have another name now.
RENAMED = {"StreamTask": "EncodedTask"}


class _Finder(MetaPathFinder, Loader):
    """Makes a module with an old name that finds names in their new places."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old, homes = module.__name__, MOVED[module.__name__]

        def find(name: str) -> Any:
            now = RENAMED.get(name, name)
            if not name.startswith("__"):
                for home in homes:
                    if hasattr(found := importlib.import_module(home), now):
                        warnings.warn(f"{old}.{name} is {home}.{now} now.", DeprecationWarning, stacklevel=2)
                        return getattr(found, now)
            raise AttributeError(f"module {old!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Make old names importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
