"""The bench of one task on one model: fine-tune, localize, graft, train a region, answer (paper, §2 and §3).

Grafts, strategies and the paper's experiments share it. It returns every model as a `ModelState`: θ and a readout. The
formula that makes θ from θ_pre and θ_ft is in `forgetfree.core.regions` (`graft_theta`).
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from typing import cast

import torch

from forgetfree import __version__
from forgetfree.core.fingerprint import body_fingerprint
from forgetfree.core.mask import LearnedRegion, MaskOptions, learn_region
from forgetfree.core.parameters import ParameterSpace, tensors_of
from forgetfree.core.readout_model import Precision, ReadoutModel, body_of, body_prefix, body_space, evaluating
from forgetfree.core.regions import Region, graft_theta
from forgetfree.core.selection import ROWS, PlainTensors, budget, choose, floor_share, most_moved
from forgetfree.core.trained import (
    Batch,
    CrossEntropy,
    RegionParameters,
    TrainedParameters,
)
from forgetfree.data.examples import EncodedRows, Examples
from forgetfree.data.rows import Rows, TaskRows, micro_batches, plan_batches, representative
from forgetfree.device import find_device
from forgetfree.errors import OptionError
from forgetfree.ledger.binding import head_digest, network_of
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.models.loading import LoadedModel, config_of
from forgetfree.models.state import ModelState, StateStore
from forgetfree.options import Function, name_of_function, recorded
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed
from forgetfree.tensor_file import checksum, grouped
from forgetfree.training.encoded_task import EncodedTask, answers_of, encode_task, quality_of
from forgetfree.training.monitor import Monitor, Phase
from forgetfree.training.step import deterministic, fine_tune, layer_checkpoints
from forgetfree.training.training_options import (
    LocalizationOptions,
    TrainingOptions,
    for_model,
    region_rate,
    scheduled_rate,
)

#: Number of hard masks that are evaluated on validation rows while S is learned.
MASK_EVALUATIONS = 2
#: Maximum number of validation rows to choose a mask by.
VALIDATION_ROWS = 512
#: Maximum rows and tokens per pass with gradients of the whole model, on a CPU: few tokens take little memory.
_ON_CPU = {"size": 64, "tokens": 240}
#: Elsewhere: a pass of few rows leaves a GPU idle.
_ELSEWHERE = {"size": 2**14, "tokens": 2**14}


def check_localization(options: LocalizationOptions, space: ParameterSpace) -> None:
    """Raise ``OptionError`` unless the options allow at least one entry and choose the region."""
    budget(len(space), options.sparsity)
    if options.mask_steps == 0 and options.region_from == "mask" and not options.base_fraction:
        raise OptionError(
            "base_fraction=0 with mask_steps=0 leaves the region empty. Set mask_steps above 0, or "
            "region_from=movement."
        )


def mask_options(options: LocalizationOptions, rows: int, fine_tuning_steps: int) -> MaskOptions:
    """Return the options of learning S on ``rows`` training rows, after this many updates of fine-tuning."""
    size = min(options.mask_batch_size, rows)
    steps = options.mask_steps
    if steps is None:
        steps = min(100, max(1, fine_tuning_steps * options.batch_size // size))
    return MaskOptions(
        steps=steps,
        batch_size=size,
        learning_rate=options.mask_learning_rate,
        evaluate_every=max(1, -(-steps // MASK_EVALUATIONS)),
        precision=cast(Precision, options.precision),  # decided by now
    )


def base_size(options: LocalizationOptions, mask: MaskOptions, count: int) -> int:
    """Return the size of γ_base for a region of at most ``count`` entries: all of them if no S is learned."""
    if mask.steps == 0 or not options.base_fraction:
        return 0 if mask.steps else count
    return max(1, floor_share(options.base_fraction, count))


def mask_loss(model: ReadoutModel, options: LocalizationOptions) -> CrossEntropy:
    """Return the loss of θ(γ) over a batch of `mask_batches`."""
    return CrossEntropy(model, next(model.parameters()).device, options.precision)


def mask_batches(rows: Examples, mask: MaskOptions, seed: int, device: torch.device) -> Iterator[list[Batch]]:
    """Yield the mini-batches of each step on S, each small enough for one pass; see `in_pieces`."""
    # Each step changes every score, so it must not depend on rows of one length alone.
    for batch in plan_batches(rows.lengths, mask.batch_size, mask.steps, seed, group_by_length=False):
        yield in_pieces(rows, batch, device)


def in_pieces(rows: Examples, batch: Sequence[int], device: torch.device) -> list[Batch]:
    """Return rows, by their numbers, as mini-batches, each small enough for one pass with gradients of the whole model."""
    piece = _ON_CPU if device.type == "cpu" else _ELSEWHERE
    return [rows.batch(part) for part in micro_batches(batch, rows.lengths, **piece)]


#: Updates of a linear readout alone before γ is chosen, where `region_from` needs no θ_ft.
READOUT_STEPS = 100


class SingleTask:
    """One task, its rows, and the model that reads them. The model holds ``pre`` between calls.

    Args:
        loaded: the model.
        task: the task, encoded for it.
        pre: the state that the model holds and the task is learned on top of, with the task's untrained readout; default: the
            model's present state, usually θ_pre.
        seed: for all training.
        device: where to train.
        store: stores and shares fine-tuned models; default: each is trained anew.
        monitor: logs phases and steps.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        task: EncodedTask,
        *,
        pre: ModelState | None = None,
        seed: int = 0,
        device: torch.device,
        store: StateStore | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.loaded, self.model, self.task, self.seed, self.device = loaded, loaded.model, task, seed, device
        self.space = self.model.space()
        self.pre = pre or ModelState.of(self.model, [task.name])
        self.monitor = monitor or Monitor()
        self._store = store

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        rows: TaskRows,
        *,
        shots: int | None = None,
        seed: int = 0,
        test_limit: int | None = None,
        device: str | torch.device = "auto",
        store: StateStore | None = None,
        monitor: Monitor | None = None,
    ) -> SingleTask:
        """Return the bench of a task whose rows are not encoded yet.

        Args:
            loaded: the model; it must have no readout of this task yet.
            rows: the task and its rows.
            shots: training rows per label; default: all.
            seed: for the sample and all training.
            test_limit: evaluate on at most this many test rows, spread evenly; default: all.
            device: where to train; ``auto``: on a GPU, if there is one.
            store: stores and shares fine-tuned models; default: in memory.
            monitor: logs phases and steps.
        """
        device = torch.device(find_device("auto") if device == "auto" else device)
        task = encode_task(rows, loaded, shots=shots, seed=seed, test_limit=test_limit)
        pre = ModelState.of(loaded.model, [task.name])
        loaded.model.to(device)
        return cls(loaded, task, pre=pre, seed=seed, device=device, store=store or StateStore(), monitor=monitor)

    def seed_of(self, phase: Phase) -> int:
        """Return the seed of a phase."""
        return derive_seed(self.seed, phase, self.task.name)

    # -- Models ----------------------------------------------------------------------------------------------

    def fine_tuned(self, options: TrainingOptions, start: ModelState | None = None) -> ModelState:
        """Return θ_ft, fine-tuned on the task's rows; with a store, each θ_ft is trained only once, see `key`.

        Args:
            options: how to train.
            start: the state whose weights and buffers training starts from; default: θ_pre. The result keeps its readouts,
                too: they name the tasks on which it was trained.
        """
        store, key = self._store, self.key(options, start) if self._store else ""
        with store.making(key) if store else nullcontext() as known:
            if store and known is not None:
                self.monitor.log_reused(self.task.name, self.task.full_steps(options))
                return known
            begin = replace(start, readouts=self.pre.readouts) if start else self.pre
            with self.holding(begin):
                self.train_(options, "fine_tune")
                state = ModelState.of(self.model, [self.task.name])
            if start:
                state = replace(state, readouts={**start.readouts, **state.readouts})
            if store:
                store.put(key, state)
            return state

    def key(self, options: TrainingOptions, start: ModelState | None = None) -> str:
        """Return the key of θ_ft in the store, by the arguments of `fine_tuned`."""
        return fine_tuned_key(self.loaded, self.task, self.pre, options, self.seed, self.device, start)

    def with_readout(self, options: TrainingOptions) -> ModelState:
        """Return θ_pre with a readout trained alone: the rows' gradients at a random readout would be meaningless."""
        readout = self.model.readout_module(self.task.label)
        if not any(parameter.numel() for parameter in readout.parameters()):
            return self.pre
        nothing = RegionParameters(self.model.backbone, self.space, Region.empty())
        options = options.model_copy(update={"l1": 0.0})
        with self.holding(self.pre, Region.empty()):
            self.train_(options, "fine_tune", nothing, READOUT_STEPS, about=("readout",))
            return replace(self.pre, readouts={self.task.name: tensors_of(readout)})

    def region(self, fine_tuned: ModelState, options: LocalizationOptions, taken: Region | None = None) -> Region:
        """Choose γ as ``region_from`` says.

        Args:
            fine_tuned: θ_ft; only its readout counts where γ is chosen at θ_pre.
            options: how to choose.
            taken: the entries that ``among=free`` leaves out.
        """
        options = for_model(options, self.model, self.task.train)
        if (source := options.region_from) == "mask":
            return self.localized(fine_tuned, options).region
        rows, batches, loss = self.task.train, list[Batch](), mask_loss(self.model, options)
        if source == "fisher":  # small squares underflow in half precision
            loss = CrossEntropy(self.model, self.device, "fp32", summed=True)
            batches = [rows.batch([row]) for row in representative(rows.targets, ROWS)]
        elif source not in ("movement", "random"):
            batches = in_pieces(rows, representative(rows.targets, ROWS), self.device)
        with (
            self.monitor.phase(self.task.name, "localize", 1) as on_step,
            self._reading_as(fine_tuned),
            evaluating(self.model, "fp32"),  # unless the loss has another precision
            layer_checkpoints(self.model, options.gradient_checkpointing),
            deterministic(options.deterministic_training),
        ):
            region = choose(
                source,
                PlainTensors(self.model.backbone, self.space),
                budget(len(self.space), options.sparsity),
                batches=batches,
                loss=loss,
                fine_tuned=self.space.views(fine_tuned.theta),
                taken=taken if options.among == "free" else None,
                seed=derive_seed(self.seed_of("localize"), "base"),
            )
            on_step(1, math.nan)
            return region

    def localized(self, fine_tuned: ModelState, options: LocalizationOptions) -> LearnedRegion:
        """Find γ by eqs. 3 and 4.

        S is learned on the training rows, with the readout and the buffers of θ_ft; validation rows choose between hard masks.
        A mask is judged as the trained region will be: with BatchNorm's statistics of the task.
        """
        options = for_model(options, self.model, self.task.train)
        check_localization(options, self.space)
        mask = mask_options(options, len(self.task.train), self.task.full_steps(options))
        seed, count = self.seed_of("localize"), budget(len(self.space), options.sparsity)
        readout = fine_tuned.readouts[self.task.name]
        theta_pre, theta_ft = self.pre.theta.to(self.device), fine_tuned.theta.to(self.device)
        validation = self.task.validation.subset(representative(self.task.validation.targets, VALIDATION_ROWS))
        with (
            self.monitor.phase(self.task.name, "localize", mask.steps) as on_step,
            self._reading_as(fine_tuned),
            layer_checkpoints(self.model, options.gradient_checkpointing),
            deterministic(options.deterministic_training),
        ):
            self.monitor.log_rate(lambda step: mask.learning_rate)
            return learn_region(
                self.model.backbone,
                self.space,
                theta_pre,
                theta_ft,
                mask_batches(self.task.train, mask, derive_seed(seed, "batches"), self.device),
                mask_loss(self.model, options),
                sparsity=options.sparsity,
                base=most_moved(theta_pre, theta_ft, base_size(options, mask, count)),
                options=mask,
                validate=lambda: quality_of(self.model, self.task, validation, options)[0],
                on_step=on_step,
                checkpoint=self.monitor.checkpoint(),
                about=(seed, recorded(options), self.task.train.labels, sorted(readout.items())),
            )

    def grafted(self, fine_tuned: ModelState, region: Region) -> ModelState:
        """Return θ(γ) of eq. 1, with the fine-tuned readout."""
        return replace(fine_tuned, theta=graft_theta(self.pre.theta, fine_tuned.theta, region))

    def retrained(self, start: ModelState, region: Region, options: TrainingOptions) -> ModelState:
        """Train ``region`` of θ_pre alone on the task, together with the readout (paper, §3.1); see `region_rate`.

        Args:
            start: the state whose readout is trained further; its θ is not used.
            region: the entries to train, starting from θ_pre.
            options: the options of fine-tuning.
        """
        rate = region_rate(options, len(self.space), len(region))
        readout_rate = options.readout_learning_rate or options.learning_rate
        rates = {"learning_rate": rate, "readout_learning_rate": readout_rate}
        options = options.model_copy(update={**rates, "l1": 0.0})
        with self.holding(replace(start, theta=self.pre.theta), region):
            self.train_(options, "train", RegionParameters(self.model.backbone, self.space, region))
            return ModelState.of(self.model, [self.task.name])

    def train_(
        self,
        options: TrainingOptions,
        phase: Phase,
        trained: TrainedParameters | None = None,
        steps: int | None = None,
        *,
        logged: bool = True,
        about: tuple[str, ...] = (),
    ) -> None:
        """Train the model in place, from its current weights.

        Args:
            options: how to train.
            phase: the phase, which names the steps.
            trained: the trained parameters of the backbone; default: all graftable tensors.
            steps: number of updates; default: as the options say.
            logged: whether losses and learning rates are logged.
            about: extra values mixed into the checkpoint's key, so that another training is not resumed by mistake.
        """
        steps = self.task.full_steps(options) if steps is None else steps
        with self.monitor.phase(self.task.name, phase, steps) as on_step:
            if logged:
                self.monitor.log_rate(scheduled_rate(options, steps))

            fine_tune(
                self.model,
                self.task.train,
                options,
                steps=steps,
                seed=self.seed_of(phase),
                on_step=on_step if logged else lambda step, loss: on_step(step, math.nan),
                trained=trained,
                checkpoint=self.monitor.checkpoint(),
                about=about,
            )

    def graft(self, fine_tuned: ModelState, region: Region, sparsity: float) -> Graft:
        """Return the entries of θ_ft at ``region`` as a graft, which can be saved and applied elsewhere.

        Args:
            fine_tuned: the state with the graft's values, readout and buffers.
            region: γ.
            sparsity: the allowed size of the region, as a share of the space.
        """
        backbone, task, loaded = self.model.backbone, self.task.definition, self.loaded
        binding = replace(loaded.binding(), network=network_of(body_of(backbone)))
        classes = self.model.readout_of(self.task.label).columns if binding.architecture else ()
        fingerprint, head = body_fingerprint(backbone), head_digest(backbone)
        origin = GraftOrigin(task, loaded.name, fingerprint, sparsity, binding, classes, head)
        changed = {
            name.removeprefix(body_prefix(backbone)): buffer
            for name, buffer in fine_tuned.buffers.items()
            if not torch.equal(buffer, self.pre.buffers[name])
        }
        values = fine_tuned.theta[region.indices]
        readout = fine_tuned.readouts[task.name]
        return Graft(region, values, body_space(backbone, self.space), readout, changed, origin)

    @contextmanager
    def holding(self, state: ModelState, changed: Region | None = None) -> Iterator[None]:
        """Load ``state`` into the model; it holds θ_pre again after the block.

        Args:
            state: the state to load.
            changed: for a state with θ_pre, the entries that change inside; default: any entry may change.
        """
        names = [self.task.name]
        try:
            if changed is None:
                state.load_(self.model, names)
            else:
                state.load_beside_theta_(self.model, names)
            yield
        finally:
            if changed is None:
                self.pre.load_(self.model, names)
            else:
                self.pre.load_beside_theta_(self.model, names)
                self.space.scatter_(self.model.backbone, changed.indices, self.pre.theta[changed.indices])

    @contextmanager
    def _reading_as(self, fine_tuned: ModelState) -> Iterator[None]:
        """Inside, the model has θ_pre with the readout and the buffers of θ_ft, and no dropout."""
        mode = self.model.training
        try:
            fine_tuned.load_beside_theta_(self.model, [self.task.name])
            self.model.eval()
            yield
        finally:
            self.model.train(mode)
            self.pre.load_beside_theta_(self.model, [self.task.name])

    # -- Answers ---------------------------------------------------------------------------------------------

    def answers(
        self, state: ModelState, rows: Examples | None = None, options: TrainingOptions | None = None
    ) -> Answers:
        """Return the model's predictions.

        Args:
            state: the model's θ and readout.
            rows: default: the test rows.
            options: evaluation batch size and precision.
        """
        rows, options = self.task.test if rows is None else rows, options or TrainingOptions()
        with self.holding(state):
            return answers_of(self.model, self.task, rows, options)

    def encode(self, rows: Rows) -> EncodedRows:
        """Encode rows of another data set as this task's rows, by its prompt and for its readout."""
        encoder, task = self.loaded.encoder(self.task.definition), self.task
        return task.kind.encode(task.definition, rows, encoder, label=task.label, pad=self.loaded.pad)


def fine_tuned_key(
    loaded: LoadedModel,
    task: EncodedTask,
    pre: ModelState,
    options: TrainingOptions,
    seed: int,
    device: torch.device,
    start: ModelState | None = None,
) -> str:
    """Return the start of the task's name and a digest of everything that determines its fine-tuned model."""
    model = loaded.model
    options = for_model(options, model, task.train)
    training = {field: getattr(options, field) for field in TrainingOptions.model_fields}
    training |= {"steps": task.full_steps(options), "dropout": bool(options.dropout), "evaluation_batch_size": None}
    content = {
        "model": loaded.fingerprint,
        "readout": model.readout,
        "label words": model.readout_of(task.label).columns,
        "tokens": repr(getattr(model, "tokens", None)),
        "head": checksum(pre.readouts[task.name]),
        "rows": task.train.digest,
        "task": asdict(task.definition) | {"hub": None},
        "options": training,
        "seed": seed,
        "config": config_of(model.backbone),
        "graftable": model.space().layout_hash,
        "versions": [__version__, torch.__version__, version("transformers")],
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    if start is not None:  # the model's fingerprint identifies θ_pre
        content["start"] = checksum({"theta": start.theta, **grouped(buffer=start.buffers)})
    if model.answered_labels is not None:
        content["labels"] = list(model.answered_labels)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=_identity).encode()).hexdigest()
    return f"{task.name[:40]}-{digest[:16]}"  # it becomes a file's name, whose length is limited


@cache
def _identity(function: Function) -> str:
    """Return a text that identifies a function; if its code may change, a different text in every process."""
    name = name_of_function(function)
    return name if name.startswith("torch.") else f"{name} {uuid.uuid4()}"  # torch's version is in the key
