"""A graft as it was asked for, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from forgetfree import recipes
from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.jobs.config import CommonOptions, JobConfig, check_known, check_or_fewer
from forgetfree.options import build, option

if TYPE_CHECKING:
    from forgetfree.training.localization import LocalizationOptions


@dataclass(frozen=True, kw_only=True)
class GraftConfig(JobConfig):
    """A graft as it was asked for: what ``forgetfree graft`` takes. Checked as a whole by `checked`."""

    command: ClassVar[str] = "graft"

    task: str = option("", "a registered task, or one under --data DIR", completion="tasks")
    shots: int | None = option(None, "training rows per label (default: all)", at_least=1, group="How to learn")
    sparsities: tuple[float, ...] = option(
        (),
        "share of the parameters that the region may have, may be given several times",
        flag="sparsity",
        group="How to learn",
        placeholder="F",
    )
    base: str | None = option(
        None,
        "γ_base of eq. 4, or a graft whose region it is; --set mask_steps=0 grafts it as it is",
        group="How to learn",
        placeholder="KIND|FILE",
    )
    fine_tuned: str | None = option(
        None, "a model fine-tuned from --model, in Hugging Face layout; none is trained then", placeholder="DIR"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of the task."""
        return (self.task,)

    @property
    def sparsity(self) -> float | None:
        """Return the first sparsity, if one is given."""
        return next(iter(self.sparsities), None)

    @property
    def base_file(self) -> Path | None:
        """Return the file that γ_base is read from, if there is one."""
        from forgetfree.core.base_regions import BaseKind

        return None if self.base is None or self.base in get_args(BaseKind) else Path(self.base)

    def recipe(self) -> dict[str, Any]:
        """Return the model's recipe, for what is not set otherwise; of localizing alone for a model that is fine-tuned."""
        from forgetfree.training.training_options import TrainingOptions

        recipe = recipes.recipe_of(self.model, {**self.settings, **self.flags()}, graft=True)
        unused = () if self.fine_tuned is None else TrainingOptions.__dataclass_fields__
        return {key: value for key, value in recipe.items() if key not in unused}

    def checked(self, classes: Mapping[str, Any] = MappingProxyType({})) -> CheckedGraft:
        """Return the options.

        Raises:
            UsageError: naming every fault.
        """
        from forgetfree.training.localization import LocalizationOptions
        from forgetfree.training.training_options import TrainingOptions

        faults = self.faults()
        own, known = set(CommonOptions.__dataclass_fields__), set(LocalizationOptions.__dataclass_fields__)
        # Steps and batch size say how many rows fine-tuning read, and so how many mask steps are the default.
        still_read = {"steps", "batch_size", "precision", "answer_precision", "evaluation_batch_size", "deterministic"}
        training = TrainingOptions.__dataclass_fields__.keys() - still_read
        for key in self.settings:
            faults.attempt(check_known, key, own | known)
            if self.fine_tuned is not None and key in training:
                faults.add(f"--set {key} has no effect with --fine-tuned: nothing is trained. Leave it out.")
        if self.base_file is not None:
            faults.attempt(_check_base_file, self.base_file)
        if self.fine_tuned is not None and not Path(self.fine_tuned).is_dir():
            faults.add(f"--fine-tuned {self.fine_tuned!r} is no directory. Give one that save_pretrained wrote.")
        values = {
            **self.recipe(),
            **{key: value for key, value in self.settings.items() if key in known},
            **self.flags(),
        }
        if self.base_file is not None:
            del values["base"]  # no kind of base: its entries are given
        options = [
            faults.attempt(build, LocalizationOptions, values | sparsity, "graft")
            for sparsity in [{"sparsity": each} for each in self.sparsities] or [{}]
        ]
        for each in options[:1]:
            if each is not None and each.region_from != "mask" and self.base is not None:
                faults.add(
                    f"--base {self.base} is of region_from=mask, got region_from={each.region_from}. Leave one out."
                )
        common = faults.attempt(self.set_of, CommonOptions)
        if common is not None:
            faults.attempt(check_or_fewer, common, self.shots)
            if self.fine_tuned is not None and common.dtype != "float32":
                faults.add(
                    f"dtype={common.dtype} does not go with --fine-tuned, whose weights are read in float32. Leave it out."
                )
        faults.report()
        return CheckedGraft(tuple(options), common)

    def section(self) -> dict[str, Any]:
        """Return the configuration as a file in ``out`` has it, a kind of base by its name."""
        return super().section() | ({"base": self.base} if self.base_file is None else {})


@dataclass(frozen=True)
class CheckedGraft:
    """Options of fine-tuning and localizing, one for each sparsity, and the command's own."""

    options: tuple[LocalizationOptions, ...]
    common: CommonOptions


def _check_base_file(path: Path) -> None:
    from forgetfree.core.base_regions import BaseKind

    if path.suffix == ".safetensors" and not path.exists():
        raise UsageError(f"--base {str(path)!r} does not exist. Give the file of a graft, or a kind of base region.")
    if not path.exists():
        raise UnknownNameError("--base", str(path), get_args(BaseKind), "The file of a graft also serves.")
