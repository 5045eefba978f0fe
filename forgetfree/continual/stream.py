"""A stream: tasks in order, the model that reads them, the strategy that owns it, and their Avalanche benchmark."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from avalanche.benchmarks import split_online_stream
from avalanche.models.dynamic_modules import MultiTaskModule
from torch import nn

from forgetfree.core.body import fingerprint_of
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.errors import RunError, UsageError
from forgetfree.models.loading import LoadedModel
from forgetfree.models.state import ModelState
from forgetfree.models.task_model import ClassifierModel, ModuleModel, TaskModel
from forgetfree.tasks import Scenario
from forgetfree.training.encoded_task import EncodedTask

#: Where a network keeps its `Owner`, so that a copy of both belong together.
_OWNER = "_owner"


class _WithTaskLabels(MultiTaskModule):
    """What Avalanche knows a model with task labels by."""

    def adaptation(self, experience: Any) -> None:
        """Nothing to adapt: the readouts of all tasks are there from the start."""


class StreamModel(TaskModel, _WithTaskLabels):
    """A `TaskModel` that Avalanche knows as one with task labels."""

    @classmethod
    def of(cls, loaded: LoadedModel, *, shared_readout: bool) -> StreamModel | StreamClassifier:
        """Make a model on a loaded model's backbone that has no readouts so far.

        Args:
            loaded: the model; it gets no readout.
            shared_readout: see `ReadoutModel`.

        Raises:
            UsageError: it is none that `load_model` or `load_fine_tuned` gives, or its weights are not those that were loaded.
        """
        model = loaded.model
        if type(model) not in (TaskModel, ClassifierModel, cls, StreamClassifier) or not isinstance(model, TaskModel):
            raise UsageError(f"A stream needs a model as load_model gives it, got a {type(model).__name__}.")
        if fingerprint_of(model.backbone) != loaded.fingerprint:
            raise UsageError(
                f"The weights of {loaded.name!r} are no longer those that were loaded: something has trained them, perhaps a "
                "strategy of an earlier stream. Load the model again for each stream."
            )
        if isinstance(model, ClassifierModel):
            return StreamClassifier(model.backbone, model.tokens, model.classes, graftable=model._graftable)
        return cls(
            model.backbone,
            model.tokens,
            model.readout,
            read_last=model.read_last,
            dropout=model.dropout.p,
            graftable=model._graftable,
            shared_readout=shared_readout,
        )


class StreamClassifier(ClassifierModel, _WithTaskLabels):
    """A `ClassifierModel` that Avalanche knows as one with task labels."""


class BenchmarkModel(ModuleModel, _WithTaskLabels):
    """A `ModuleModel` that Avalanche knows as one with task labels."""


@dataclass(eq=False)
class Owner:
    """The strategy that a model belongs to: the last that was made on it.

    Attributes:
        name: its class.
        is_busy: whether it is training or evaluating.
    """

    name: str
    is_busy: bool = False


@dataclass(frozen=True)
class Stream:
    """Tasks in order, the model that reads them, and their Avalanche benchmark.

    Attributes:
        name: as it was asked for.
        tasks: in order.
        loaded: the model with its tokenizer and fingerprint. It belongs to the last strategy that was made on it.
        seed: of the k-shot samples and the readouts' first weights.
        pre_trained: what the model held at first: every strategy starts from it.
        benchmark: the Avalanche benchmark with a ``train_stream`` and a ``test_stream``.
        scenario: what is known at inference.
    """

    name: str
    tasks: tuple[EncodedTask, ...]
    loaded: LoadedModel
    seed: int
    pre_trained: ModelState
    benchmark: Any
    scenario: Scenario = "task"

    @property
    def model(self) -> ReadoutModel:
        """Return the model that a strategy trains."""
        return self.loaded.model

    def copy(self) -> Stream:
        """Return a stream of the same rows with a model of its own, for a strategy beside another."""
        model = copy.deepcopy(self.model)
        vars(model.backbone).pop(_OWNER, None)
        return replace(self, loaded=replace(self.loaded, model=model))

    def claim(self, name: str) -> Owner:
        """Give the model, with θ_pre in it, to a new strategy of this name; that of an earlier one is refused from then on.

        Raises:
            RunError: the strategy that has the model is training or evaluating.
        """
        owner: Owner | None = vars(self._backbone).get(_OWNER)
        if owner is not None and owner.is_busy:
            raise RunError(
                f"{owner.name} is training or evaluating with the model that {name} needs. Use one after the other, or give "
                "each a stream of its own: stream.copy()."
            )
        self.pre_trained.load_(self.model)
        vars(self._backbone)[_OWNER] = owner = Owner(name)
        return owner

    def check_owner(self, owner: Owner) -> None:
        """Raise ``RunError`` where the model belongs to another strategy by now."""
        if (other := vars(self._backbone)[_OWNER]) is not owner:
            raise RunError(
                f"{owner.name} has lost its model to another strategy ({other.name}), which was made on the same stream later "
                "and started from θ_pre. Give each strategy a stream of its own: stream.copy()."
            )

    @cached_property
    def _backbone(self) -> nn.Module:
        """The network that holds its owner, which streams over one loaded model share; adapters may lie around it later."""
        return self.model.backbone

    def task_of(self, experience: Any, *, training: bool = False) -> EncodedTask:
        """Return the task of an experience of the benchmark, of a copy with the same rows, or of a part that Avalanche cut off.

        Args:
            experience: of any stream of the benchmark, such as ``train_stream`` and ``test_stream``.
            training: whether it is to be trained on.

        Raises:
            UsageError: it is of another benchmark, has rows of several experiences, or is no training experience.
        """
        own = whole(experience)
        place = place_of(own)
        streams = [
            name
            for name, datasets in self._datasets.items()
            if any(i == place and dataset is own.dataset for i, dataset in enumerate(datasets))
        ]
        if place is None or not streams:
            raise UsageError(
                f"{named(own)} is none of this stream's own: expected an experience of stream.benchmark, or a part of one, got "
                "other rows. Train and evaluate on the benchmark that the stream is of, or make a stream of the other one."
            )
        if training and "train" not in streams:
            raise UsageError(
                f"{named(own)} is no training experience. Train on stream.benchmark.train_stream[{place}]."
            )
        return self.tasks[place]

    def parts(self, rows: int, seed: int = 0) -> list[Any]:
        """Cut the training experiences into parts of ``rows`` rows each, shuffled by ``seed``: Avalanche's online stream."""
        return list(split_online_stream(self.benchmark.train_stream, rows, seed=seed))

    @cached_property
    def _datasets(self) -> dict[str, list[Any]]:
        """Return the data sets of each stream's experiences; copies of an experience share them."""
        return {
            name.removesuffix("_stream"): [experience.dataset for experience in islice(stream, len(self.tasks))]
            for name, stream in vars(self.benchmark).items()
            if name.endswith("_stream")
        }


# -- What Avalanche's experiences say of themselves: where they stand, and what they were cut from ------------


def part_of(experience: Any) -> int | None:
    """Return the number of a sub-experience in its online stream (`avalanche.benchmarks.split_online_stream`).

    ``None`` for an experience that is whole.
    """
    shown = experience.logging()  # in training, an experience hides where it is from
    return place_of(shown) if hasattr(shown, "origin_experience") else None


def whole(experience: Any) -> Any:
    """Return the experience, or the one that it was cut from.

    Raises:
        UsageError: it was cut from several.
    """
    shown = experience.logging()
    if not hasattr(shown, "origin_experience"):
        return shown
    if shown.origin_experience is None:
        raise UsageError(
            f"{named(shown)} has rows of several experiences, so it is of no task. Train on experiences of one task each: "
            "those of stream.benchmark.train_stream, or parts of them by split_online_stream."
        )
    return whole(shown.origin_experience)


def place_of(experience: Any) -> int | None:
    """Return the place of an experience in its stream."""
    number: int | None = experience._current_experience  # the public property fails where there is none
    return number


def named(experience: Any) -> str:
    """Return the name of an experience for a message."""
    return f"Experience {place_of(experience)} of the stream {getattr(experience._origin_stream, 'name', None)!r}"
