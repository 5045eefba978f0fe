"""A graft as it was asked for, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.jobs.run_config import CommonOptions, Faults, recipe_of
from forgetfree.options import build
from forgetfree.results.config_file import portable

if TYPE_CHECKING:
    from forgetfree.learning.localization import LocalizationOptions


@dataclass(frozen=True, kw_only=True)
class GraftConfig:
    """A graft as it was asked for: what ``forgetfree graft`` takes. Checked as a whole by `checked`.

    Attributes:
        base: a kind of γ_base, or the file of a graft.
        fine_tuned: a fine-tuned model's directory; none: it is fine-tuned here.
    """

    task: str
    model: str = "minilm"
    data: str = "hub"
    readout: str = "auto"
    shots: int | None = None
    steps: int | None = None
    seeds: tuple[int, ...] = (0,)
    sparsities: tuple[float, ...] = ()
    base: str | None = None
    fine_tuned: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    out: str = ""

    @property
    def base_file(self) -> Path | None:
        """The file that γ_base is read from, if it is."""
        from forgetfree.core.base_regions import BaseKind

        return None if self.base is None or self.base in get_args(BaseKind) else Path(self.base)

    def recipe(self) -> dict[str, Any]:
        """The model's recipe, for what is not set otherwise; of localizing alone for a model that is fine-tuned."""
        from forgetfree.learning.training import TrainingOptions

        recipe = recipe_of(self.model, {*self.settings, *self._flags()}, graft=True)
        unused = () if self.fine_tuned is None else TrainingOptions.__dataclass_fields__
        return {key: value for key, value in recipe.items() if key not in unused}

    def checked(self) -> CheckedGraft:
        """The options.

        Raises:
            UsageError: naming every fault.
        """
        from forgetfree.learning.localization import LocalizationOptions
        from forgetfree.learning.training import TrainingOptions

        faults = Faults()
        faults.check_common(self.shots, self.steps, self.seeds)
        faults.check_distinct("sparsity", self.sparsities)
        own, known = set(CommonOptions.__dataclass_fields__), set(LocalizationOptions.__dataclass_fields__)
        # Steps and batch size say how many rows fine-tuning read, and so how many mask steps are the default.
        still_read = {"steps", "batch_size", "precision", "evaluation_batch_size"}
        training = TrainingOptions.__dataclass_fields__.keys() - still_read
        for key in self.settings:
            faults.attempt(_check_setting, key, own | known)
            if self.fine_tuned is not None and key in training:
                faults.add(f"--set {key} has no effect with --fine-tuned: nothing is trained. Leave it out.")
            if key in self._flags():
                faults.add(f"--{key} and --set {key}={self.settings[key]} are both given. Leave one of them out.")
        if self.base_file is not None:
            faults.attempt(_check_base_file, self.base_file)
        if self.fine_tuned is not None and not Path(self.fine_tuned).is_dir():
            faults.add(f"--fine-tuned {self.fine_tuned!r} is no directory. Give one that save_pretrained wrote.")
        given = {
            **self.recipe(),
            **{key: value for key, value in self.settings.items() if key in known},
            **self._flags(),
        }
        if self.base_file is not None:
            del given["base"]  # no kind of base: its entries are given
        options = [
            faults.attempt(build, LocalizationOptions, given | sparsity, "graft")
            for sparsity in [{"sparsity": each} for each in self.sparsities] or [{}]
        ]
        common = faults.attempt(build, CommonOptions, {k: v for k, v in self.settings.items() if k in own}, "graft")
        faults.report()
        return CheckedGraft(tuple(options), common)

    def section(self) -> dict[str, Any]:
        """The configuration under the names of the command line, as a file in ``out``."""
        out = Path(self.out)
        return {
            "task": self.task,
            "model": portable(self.model, out),
            "data": portable(self.data, out),
            "readout": self.readout,
            "shots": self.shots,
            "steps": self.steps,
            "seed": list(self.seeds),
            "sparsity": list(self.sparsities),
            "base": self.base if self.base_file is None else portable(str(self.base_file), out),
            "fine_tuned": self.fine_tuned and portable(self.fine_tuned, out),
            "set": dict(self.settings),
            "device": self.device,
        }

    def _flags(self) -> dict[str, Any]:
        """The options that have a flag of their own, where it is given."""
        flags = {"steps": self.steps, "base": self.base, "sparsity": self.sparsities[0] if self.sparsities else None}
        return {key: value for key, value in flags.items() if value is not None}


@dataclass(frozen=True)
class CheckedGraft:
    """Options of fine-tuning and localizing, one for each sparsity, and the command's own."""

    options: tuple[LocalizationOptions, ...]
    common: CommonOptions


def _check_setting(key: str, known: set[str]) -> None:
    if key not in known:
        raise UnknownNameError("option", key, known)


def _check_base_file(path: Path) -> None:
    from forgetfree.core.base_regions import BaseKind

    if path.suffix == ".safetensors" and not path.exists():
        raise UsageError(f"--base {str(path)!r} does not exist. Give the file of a graft, or a kind of base region.")
    if not path.exists():
        raise UnknownNameError("--base", str(path), get_args(BaseKind), "The file of a graft also serves.")
