"""One task on one model: fine-tune, localize, graft, re-train, answer (paper, §2 and §3). Needs no Avalanche.

Every model of the paper's single-task experiments is a `ModelState`: θ, and the readout it answers with. Those made of
θ_pre and θ_ft by a formula have their θ from `forgetfree.core.graft` (`graft_theta`, `pruned_theta`, `interpolate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from forgetfree.core.base_regions import BaseKind
from forgetfree.core.body import body_fingerprint, body_of, body_prefix, body_space
from forgetfree.core.examples import Examples
from forgetfree.core.graft import graft_theta, interpolate
from forgetfree.core.mask import LearnedRegion
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters
from forgetfree.data.encoding import EncodedRows
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.device import find_device
from forgetfree.learning.encoded_task import encode_task
from forgetfree.learning.fine_tuning import fine_tuned_key, fine_tuned_state, full_steps
from forgetfree.learning.localization import (
    LocalizationOptions,
    check_localization,
    choose_base,
    localize,
    mask_options,
    searches,
)
from forgetfree.learning.monitor import Monitor
from forgetfree.learning.scaled_start import GraftOptions, choose_scale
from forgetfree.learning.training import TrainingOptions, fine_tune, predict, scheduled_rate
from forgetfree.ledger.binding import network_of
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.graft_origin import GraftOrigin
from forgetfree.models.classifier import ClassifierModel
from forgetfree.models.loading import LoadedModel
from forgetfree.models.state import ModelState, StateStore
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed


class SingleTask:
    """One task, its rows, and the model that reads them. The model holds θ_pre between calls.

    Args:
        loaded: the model; it must have no readout of this task yet.
        rows: the task and its rows.
        shots: training rows per label; default: all.
        or_fewer: take all rows of a label that has fewer, instead of refusing.
        seed: for the sample and all training.
        test_limit: evaluate on at most this many test rows, spread evenly; default: all.
        device: where to train; ``auto``: on a GPU, if there is one.
        store: keeps and shares fine-tuned models; default: in memory.
        monitor: is told of phases and steps.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        rows: TaskRows,
        *,
        shots: int | None = None,
        or_fewer: bool = False,
        seed: int = 0,
        test_limit: int | None = None,
        device: str | torch.device = "auto",
        store: StateStore | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.loaded, self.model, self.seed = loaded, loaded.model, seed
        self.device = torch.device(find_device("auto") if device == "auto" else device)
        self.task = encode_task(rows, loaded, shots=shots, or_fewer=or_fewer, seed=seed, test_limit=test_limit)
        self.space = self.model.space()
        self.pre = ModelState.of(self.model, [self.task.name])
        self.model.to(self.device)
        self._store = store or StateStore()
        self.monitor = monitor or Monitor()

    # -- Models ----------------------------------------------------------------------------------------------

    def fine_tuned(self, options: TrainingOptions) -> ModelState:
        """Return θ_ft, made once for everything that determines it and shared with strategies."""

        def make() -> ModelState:
            seed = derive_seed(self.seed, "fine_tune", self.task.name)
            steps = full_steps(options, self.task)
            with self.monitor.phase(self.task.name, "fine_tune", steps) as on_step:
                self.monitor.learning_rate(scheduled_rate(options, steps))
                kept = self.monitor.checkpoint()
                return fine_tuned_state(self.loaded, self.task, self.pre, options, seed, on_step, kept)

        return self._store.get_or_make(self.key(options), make)

    def key(self, options: TrainingOptions) -> str:
        """Return the key of θ_ft in the store."""
        return fine_tuned_key(self.loaded, self.task, self.pre, options, self.seed, self.device)

    def localized(
        self,
        fine_tuned: ModelState,
        options: LocalizationOptions,
        sparsities: Sequence[float] | None = None,
        base: Region | None = None,
    ) -> list[LearnedRegion]:
        """Find γ by eqs. 3 and 4: one for each sparsity, independent of the others.

        From an empty γ_base, one search finds all.

        Args:
            fine_tuned: θ_ft.
            options: how to localize.
            sparsities: the shares that the regions may have; default: that of the options.
            base: γ_base, cut to its most moved entries if too large. Default: of the kind that the options name.
        """
        wanted = [options.sparsity] if sparsities is None else list(sparsities)
        for sparsity in wanted:
            check_localization(replace(options, sparsity=sparsity), self.space)
        mask = mask_options(options, len(self.task.train), full_steps(options, self.task))
        seed = derive_seed(self.seed, "localize", self.task.name)
        steps = mask.steps * searches(options, wanted, base, len(self.space))
        with self.monitor.phase(self.task.name, "localize", steps) as on_step:
            self.monitor.learning_rate(lambda step: mask.learning_rate)
            return localize(
                self.model,
                self.task,
                self.pre,
                fine_tuned,
                options,
                mask,
                sparsities=wanted,
                seed=seed,
                base=base,
                on_step=on_step,
                checkpoint=self.monitor.checkpoint(),
            )

    def base(self, kind: BaseKind, fine_tuned: ModelState, count: int, fisher_rows: int = 256) -> Region:
        """Choose a region that is not learned, of at most ``count`` entries: see `choose_base`."""
        seed = derive_seed(derive_seed(self.seed, "localize", self.task.name), "base")
        theta_pre, theta_ft = self.pre.theta.to(self.device), fine_tuned.theta.to(self.device)
        with self.holding(replace(fine_tuned, theta=self.pre.theta)):
            return choose_base(
                kind,
                self.model,
                self.task.train,
                theta_pre,
                theta_ft,
                count,
                seed=seed,
                fisher_rows=fisher_rows,
            )

    def grafted(self, fine_tuned: ModelState, region: Region) -> ModelState:
        """Return θ(γ) of eq. 1, with the fine-tuned readout."""
        return replace(fine_tuned, theta=graft_theta(self.pre.theta, fine_tuned.theta, region))

    def scale(self, fine_tuned: ModelState, region: Region, options: GraftOptions) -> float:
        """Return the c by which a graft of ``region`` answers training rows best, see `choose_scale`."""
        if options.largest_scale == 1:
            return 1.0
        with self.holding(replace(fine_tuned, theta=self.pre.theta)):
            return choose_scale(
                self.model,
                self.task,
                region,
                self.pre.theta,
                fine_tuned.theta,
                options,
                largest=options.largest_scale,
                rows=options.validation_rows,
            )

    def moved(self, fine_tuned: ModelState, scale: float) -> ModelState:
        """Return the state at θ_pre + c · (θ_ft − θ_pre), with the fine-tuned readout."""
        return (
            fine_tuned
            if scale == 1
            else replace(fine_tuned, theta=interpolate(self.pre.theta, fine_tuned.theta, scale))
        )

    def retrained(self, start: ModelState, region: Region, options: TrainingOptions) -> ModelState:
        """Train ``region`` of θ_pre alone on the task, together with the readout (paper, §3.1).

        With AdamW the rate is that of fine-tuning times √(N/s) for s of N entries, so that updates are equally long.

        Args:
            start: the state whose readout is trained further; its θ is not used.
            region: what is trained, starting from θ_pre.
            options: those of fine-tuning.
        """
        rate = options.learning_rate
        if options.optimizer == "adamw":
            rate *= math.sqrt(len(self.space) / max(1, len(region)))
        readout_rate = options.readout_learning_rate or options.learning_rate
        options = replace(options, learning_rate=rate, readout_learning_rate=readout_rate, l1=0.0)
        steps = full_steps(options, self.task)
        seed = derive_seed(self.seed, "train", self.task.name)
        with self.holding(replace(start, theta=self.pre.theta)):
            trained = RegionParameters(self.model.backbone, self.space, region)
            with self.monitor.phase(self.task.name, "train", steps) as on_step:
                self.monitor.learning_rate(scheduled_rate(options, steps))
                fine_tune(
                    self.model,
                    self.task.train,
                    options,
                    steps=steps,
                    seed=seed,
                    on_step=on_step,
                    trained=trained,
                    checkpoint=self.monitor.checkpoint(),
                )
            return ModelState.of(self.model, [self.task.name])

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
            logits = predict(self.model, rows, batch_size=options.rows_at_once, precision=options.precision)
        return self.task.answers(logits, rows)

    def encode(self, rows: Rows) -> EncodedRows:
        """Encode rows of another data set as this task's rows, by its prompt and for its readout."""
        encoder = self.loaded.encoder(self.task.definition)
        return EncodedRows.of(encoder(rows), list(rows.labels), self.task.label, self.loaded.pad)
