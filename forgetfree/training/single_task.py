"""The bench of one task on one model: fine-tune, localize, graft, train a region, answer (paper, §2 and §3).

Grafts, strategies and the paper's experiments use it alike. Every model that comes of it is a `ModelState`: θ, and the
readout it answers with. Those made of θ_pre and θ_ft by a formula have their θ from `forgetfree.core.regions`
(`graft_theta`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from forgetfree.core.mask import LearnedRegion, learn_region
from forgetfree.core.parameters import tensors_of, write_
from forgetfree.core.readout_model import body_fingerprint, body_of, body_prefix, body_space
from forgetfree.core.regions import Region, graft_theta
from forgetfree.core.selection import budget, most_moved, most_salient
from forgetfree.core.trained import RegionParameters, TrainedParameters
from forgetfree.data.examples import EncodedRows, Examples
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.data.sampling import representative
from forgetfree.device import find_device
from forgetfree.ledger.binding import network_of
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.models.loading import LoadedModel
from forgetfree.models.state import ModelState, StateStore
from forgetfree.models.task_model import ClassifierModel
from forgetfree.options import recorded
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import EncodedTask, encode_task
from forgetfree.training.localization import (
    VALIDATION_ROWS,
    base_size,
    check_localization,
    mask_batches,
    mask_loss,
    mask_options,
    score_entries,
)
from forgetfree.training.loop import answers_of, fine_tune, fine_tuned_key, quality_of
from forgetfree.training.monitor import Monitor, Phase
from forgetfree.training.step import layer_checkpoints
from forgetfree.training.training_options import (
    LocalizationOptions,
    TrainingOptions,
    for_model,
    region_rate,
    scheduled_rate,
)

#: Updates of a linear readout alone before γ is chosen, where `region_from` needs no θ_ft.
READOUT_STEPS = 100


class SingleTask:
    """One task, its rows, and the model that reads them. The model holds ``pre`` between calls.

    Args:
        loaded: the model.
        task: the task, encoded for it.
        pre: θ_pre, or what else the task is learned on top of, with the task's untrained readout: what the model holds.
        seed: for all training.
        device: where to train.
        store: keeps and shares fine-tuned models; default: each is made anew.
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
        """Make the bench of a task whose rows are not encoded yet.

        Args:
            loaded: the model; it must have no readout of this task yet.
            rows: the task and its rows.
            shots: training rows per label; default: all.
            seed: for the sample and all training.
            test_limit: evaluate on at most this many test rows, spread evenly; default: all.
            device: where to train; ``auto``: on a GPU, if there is one.
            store: keeps and shares fine-tuned models; default: in memory.
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

    def fine_tuned(self, options: TrainingOptions) -> ModelState:
        """Return θ_ft, fine-tuned on the task alone; where there is a store, made once for everything that determines it."""
        store, key = self._store, self.key(options) if self._store else ""
        with store.making(key) if store else nullcontext() as known:
            if store and known is not None:
                self.monitor.log_reused(self.task.name, self.task.full_steps(options), store.seconds(key))
                return known
            clock = self.monitor.checkpoint().clock
            begin = clock()
            with self.holding(self.pre):
                self.train_(options, "fine_tune")
                state = ModelState.of(self.model, [self.task.name])
            if store:
                store.put(key, state, clock() - begin)
            return state

    def key(self, options: TrainingOptions) -> str:
        """Return the key of θ_ft in the store."""
        return fine_tuned_key(self.loaded, self.task, self.pre, options, self.seed, self.device)

    def with_readout(self, options: TrainingOptions) -> ModelState:
        """Return θ_pre with a readout that is trained alone: one drawn by the seed would say nothing of the rows' gradients."""
        readout = self.model.readout_module(self.task.label)
        if not any(parameter.numel() for parameter in readout.parameters()):
            return self.pre
        nothing = RegionParameters(self.model.backbone, self.space, Region.empty())
        options = replace(options, l1=0.0)
        with self.holding(self.pre):
            self.train_(options, "fine_tune", nothing, READOUT_STEPS, about=("readout",))
            return replace(self.pre, readouts={self.task.name: tensors_of(readout)})

    def region(self, fine_tuned: ModelState, options: LocalizationOptions) -> Region:
        """Choose γ as ``region_from`` says.

        Args:
            fine_tuned: θ_ft; its readout counts alone where γ is chosen at θ_pre.
            options: how to choose.
        """
        options = for_model(options, self.model, self.task.train)
        if (kind := options.region_from) == "mask":
            return self.localized(fine_tuned, options).region
        count = budget(len(self.space), options.sparsity)
        theta_pre, theta_ft = self.pre.theta.to(self.device), fine_tuned.theta.to(self.device)
        seed = derive_seed(self.seed_of("localize"), "base")
        with (
            self.monitor.phase(self.task.name, "localize", 1) as on_step,
            self._reading_as(fine_tuned),
            layer_checkpoints(self.model, options.gradient_checkpointing),
        ):
            scores = score_entries(kind, self.model, self.task.train, theta_pre, theta_ft, options, seed)
            on_step(1, math.nan)
            return most_salient(scores, count)

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
            region: what is trained, starting from θ_pre.
            options: those of fine-tuning.
        """
        rate = region_rate(options, len(self.space), len(region))
        readout_rate = options.readout_learning_rate or options.learning_rate
        options = replace(options, learning_rate=rate, readout_learning_rate=readout_rate, l1=0.0)
        with self.holding(replace(start, theta=self.pre.theta)):
            self.train_(options, "train", RegionParameters(self.model.backbone, self.space, region))
            return ModelState.of(self.model, [self.task.name])

    def train_(
        self,
        options: TrainingOptions,
        phase: Phase,
        trained: TrainedParameters | None = None,
        steps: int | None = None,
        *,
        frozen: Region | None = None,
        logged: bool = True,
        about: tuple[str, ...] = (),
    ) -> None:
        """Train in the model, from the weights that it holds, and leave there what comes of it.

        Args:
            options: how to train.
            phase: what the steps are called.
            trained: what is trained of the backbone; default: all graftable tensors.
            steps: updates; default: those of the options.
            frozen: entries of what is trained that stay as they are.
            logged: whether losses and learning rates are logged.
            about: what tells the training from another that starts alike.
        """
        steps = self.task.full_steps(options) if steps is None else steps
        with self.monitor.phase(self.task.name, phase, steps) as on_step:
            if logged:
                self.monitor.log_rate(scheduled_rate(options, steps))

            frozen = frozen or Region.empty()
            tensors, values = (
                self.space.parameters(self.model.backbone),
                self.space.gather(self.model.backbone, frozen.indices),
            )
            pieces = [(tensors[i], local.to(values.device)) for i, local, _ in self.space.split(frozen.indices)]

            def updated(step: int, loss: float) -> None:
                write_(pieces, values)  # momentum and decay move them without a gradient
                on_step(step, loss if logged else math.nan)

            fine_tune(
                self.model,
                self.task.train,
                options,
                steps=steps,
                seed=self.seed_of(phase),
                on_step=updated,
                trained=trained,
                checkpoint=self.monitor.checkpoint(),
                about=about,
            )

    def graft(self, fine_tuned: ModelState, region: Region, sparsity: float) -> Graft:
        """Return what `grafted` holds at ``region`` as a graft, which can be saved and applied elsewhere.

        Args:
            fine_tuned: the state with the graft's values, readout and buffers.
            region: γ.
            sparsity: the share of the space that the region was allowed.
        """
        backbone, task, loaded = self.model.backbone, self.task.definition, self.loaded
        readout = fine_tuned.readouts[task.name]
        origin = GraftOrigin(
            task,
            loaded.readout,
            loaded.name,
            body_fingerprint(backbone),
            sparsity,
            max_length=loaded.max_length,
            network=network_of(body_of(backbone)),
            tokenizer=loaded.tokenizer_digest,
        )
        if isinstance(self.model, ClassifierModel):
            readout = self.model.head_tensors()
            origin = replace(origin, architecture=self.model.architecture, classes=self.model.classes)
        changed = {
            name.removeprefix(body_prefix(backbone)): buffer
            for name, buffer in fine_tuned.buffers.items()
            if not torch.equal(buffer, self.pre.buffers[name])
        }
        values = fine_tuned.theta[region.indices]
        return Graft(region, values, body_space(backbone, self.space), readout, changed, origin)

    @contextmanager
    def holding(self, state: ModelState) -> Iterator[None]:
        """Load ``state`` into the model; it holds θ_pre again after the block."""
        try:
            state.load_(self.model, [self.task.name])
            yield
        finally:
            self.pre.load_(self.model, [self.task.name])

    @contextmanager
    def _reading_as(self, fine_tuned: ModelState) -> Iterator[None]:
        """Inside, the model has the readout and the buffers of θ_ft beside θ_pre, which it holds, and draws no dropout."""
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
            state: its θ and readout.
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
