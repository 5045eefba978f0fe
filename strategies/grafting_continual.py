"""GraftingContinual: a tiny region per task, trained once and frozen for ever after (paper, §5.2 and appendix C.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import nn

from forgetfree.data.encoding import Batch
from forgetfree.data.sampling import evenly, micro_batches, plan_batches
from forgetfree.errors import OptionError
from forgetfree.grafting import (
    BaseKind,
    Graft,
    LearnedRegion,
    MaskOptions,
    RegionParameters,
    base_region,
    budget,
    learn_region,
)
from forgetfree.ledger import Ledger, LedgerSwitch, Record, changed_buffers
from forgetfree.models.state import ModelState, load_tensors_, tensors_of
from forgetfree.options import option
from forgetfree.regions import Region
from forgetfree.seeds import derive_seed
from forgetfree.strategy import ContinualStrategy, Predictions
from forgetfree.streams import Stream, StreamTask
from forgetfree.training import TrainingOptions, predict


@dataclass(frozen=True, kw_only=True)
class GraftingOptions(TrainingOptions):
    """Fine-tuning, then localising, then training the region."""

    sparsity: float = option(
        1e-4, "share of the graftable entries a region may have; the paper: 1e-4", above=0, at_most=1
    )
    base: BaseKind = option("movement", "γ_base: the most moved entries, none, or random ones (§2.2)")
    mask_steps: int | None = option(
        None,
        "SGD steps on the mask scores S, 0 to keep γ_base; none: as many as read the rows fine-tuning read, at "
        "most the paper's 100",
        at_least=0,
    )
    mask_batch_size: int = option(1024, "rows per step on S", at_least=1)
    mask_micro_batch_size: int = option(64, "rows per forward pass of such a step", at_least=1)
    mask_score_init: float = option(-10.0, "every S at first: σ(−10) ≈ 4.5e-5")
    mask_learning_rate: float = option(1e7, "of SGD on S", above=0)
    mask_evaluations: int = option(4, "hard masks tried on validation rows while S is learned", at_least=1)
    validation_rows: int = option(512, "validation rows those are scored on, at most", at_least=1)
    region_start: Literal["fine-tuned", "pre-trained"] = option("fine-tuned", "values the region is trained from")
    region_steps: int | None = option(None, "updates of the region; none: as many as fine-tuning", at_least=0)
    region_optimizer: Literal["sgd", "adamw"] | None = option(None, "none: that of fine-tuning")
    region_learning_rate: float | None = option(
        None,
        "none: that of fine-tuning; with AdamW times √(N/s) for s of N entries, so that an update is as long as there",
        above=0,
    )
    final_union: bool = option(False, "evaluate the one final union on all tasks too")


class GraftingContinual(ContinualStrategy):
    """For each task: fine-tune θ_pre on it alone, localise γ_n, train γ_n minus what is owned, commit (C.3).

    Each task is inferred with θ_pre under the union of the regions up to its own, so what later tasks do cannot reach it.

    Where the paper is silent: the entries of γ_n that earlier tasks own keep those tasks' values; the linear readout
    starts from the fine-tuned one and is trained with the region. If earlier tasks own all of γ_n, nothing but the readout
    is trained. A task that is not learned yet is answered by the union of all regions so far. A task met again is refused.
    """

    Options: ClassVar[type[TrainingOptions]] = GraftingOptions
    forget_free: ClassVar[bool] = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """The sparsity must leave an entry, and something must choose the region."""
        budget(len(stream.model.space()), options.sparsity)
        if options.base == "empty" and options.mask_steps == 0:
            raise OptionError(
                "base=empty with mask_steps=0 leaves no region. Set mask_steps above 0, or base=movement."
            )
        if options.region_optimizer not in (None, options.optimizer) and options.region_learning_rate is None:
            raise OptionError(
                f"region_optimizer={options.region_optimizer} beside optimizer={options.optimizer} needs a "
                "region_learning_rate of its own. Set it."
            )

    def setup(self) -> None:
        """An empty ledger."""
        self.ledger: Ledger = Ledger(self.space, self.stream.loaded.fingerprint)
        self.localized: dict[str, LearnedRegion] = {}
        self._switch = LedgerSwitch(self.ledger, self.task_model.backbone)
        self._region: RegionParameters | None = None
        self._owned = Region.empty()
        self._final_union = False

    def prepare(self, task: StreamTask) -> None:
        """Steps 1 and 2 of C.3, up to the training itself."""
        self.ledger.check_new(task.name)
        self._switch.to(0)
        fine_tuned = self.fine_tuned(task)
        learned = self._localize(task, fine_tuned)
        # Without the scores, which are as large as the model: the ledger's memory is O(T·s).
        self.localized[task.name] = replace(learned, scores=learned.scores.new_empty(0))

        self._switch.to(len(self.ledger.records))
        self._owned = self.ledger.free(learned.region)
        self._switch.remember(self._owned)
        load_tensors_(self.task_model.readout_module(task.label), fine_tuned.readouts[task.name])
        backbone = self.task_model.backbone
        if self.options.region_start == "fine-tuned":
            indices = self._owned.indices
            self.space.scatter_(backbone, indices, fine_tuned.theta[indices])
        self._region = RegionParameters(backbone, self.space, self._owned)

    def _localize(self, task: StreamTask, fine_tuned: ModelState) -> LearnedRegion:
        """γ_n by eqs. 3 and 4, with the fine-tuned readout; the model holds θ_pre before and after."""
        model, options = self.task_model, self.options
        pre = self.pristine.theta.to(self.device)
        ft = fine_tuned.theta.to(self.device)
        count = budget(len(self.space), options.sparsity)
        seed = self.phase_seed("localize", task)
        base = base_region(options.base, pre, ft, count, derive_seed(seed, "base"))
        size = min(options.mask_batch_size, len(task.train))
        steps = options.mask_steps
        if steps is None:
            steps = min(100, max(1, self.full_steps(task) * options.batch_size // size))
        mask = MaskOptions(
            steps=steps,
            batch_size=size,
            micro_batch_size=options.mask_micro_batch_size,
            score_init=options.mask_score_init,
            learning_rate=options.mask_learning_rate,
            evaluate_every=max(1, -(-steps // options.mask_evaluations)),
            precision=options.precision,
        )
        validation = task.validation.subset(evenly(len(task.validation), options.validation_rows))

        def score() -> float:
            logits = predict(model, validation, batch_size=options.evaluation_batch_size, precision=options.precision)
            return Predictions(logits.numpy(), validation.labels.numpy()).score(task.definition.metric)

        def batches() -> Iterator[list[Batch]]:
            for rows in plan_batches(task.train.lengths, size, steps, derive_seed(seed, "batches")):
                yield [task.train.batch(part) for part in micro_batches(rows, mask.micro_batch_size)]

        readout = model.readout_module(task.label)
        untrained = tensors_of(readout)
        load_tensors_(readout, fine_tuned.readouts[task.name])
        mode = model.training
        model.eval()  # no dropout, the readout's included
        try:
            with self.phase("localize", task, steps) as on_step:
                return learn_region(
                    model.backbone,
                    self.space,
                    pre,
                    ft,
                    batches(),
                    model,
                    sparsity=options.sparsity,
                    base=base,
                    options=mask,
                    validate=score,
                    on_step=on_step,
                )
        finally:
            model.train(mode)
            load_tensors_(readout, untrained)

    def training_options(self) -> TrainingOptions:
        """Those of the region."""
        options: GraftingOptions = self.options
        optimizer = options.region_optimizer or options.optimizer
        rate = options.region_learning_rate or options.learning_rate
        if options.region_learning_rate is None and optimizer == "adamw":
            # AdamW moves every entry by about its rate, so s of N entries move less far together.
            rate *= math.sqrt(len(self.space) / budget(len(self.space), options.sparsity))
        return replace(
            options,
            optimizer=optimizer,
            learning_rate=rate,
            readout_learning_rate=options.readout_learning_rate or options.learning_rate,
            l1=0.0,  # a region is as sparse as it gets
        )

    def steps(self, task: StreamTask) -> int:
        """None where there is nothing to train."""
        steps: int | None = self.options.region_steps
        if not any(parameter.numel() for group in self.parameters(task) for parameter in group):
            return 0
        return self.full_steps(task) if steps is None else steps

    def parameters(self, task: StreamTask) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The region's values, and the readout."""
        assert self._region is not None
        return [self._region.values], list(self.task_model.readout_module(task.label).parameters())

    def gradients(self, task: StreamTask) -> list[nn.Parameter]:
        """The tensors that hold the region, and the readout."""
        assert self._region is not None
        return [*self._region.touched, *self.parameters(task)[1]]

    def before_step(self) -> None:
        """Of the tensors' gradients, the region's."""
        assert self._region is not None
        self._region.collect()

    def after_step(self) -> None:
        """The region's values, into the tensors."""
        assert self._region is not None
        self._region.write()

    def commit(self, task: StreamTask) -> None:
        """Step 3 of C.3: record who owns what."""
        backbone = self.task_model.backbone
        self.ledger.append(
            Record(
                task.name,
                self.localized[task.name].region,
                Graft.of(backbone, self.space, self._owned),
                self.options.sparsity,
                readout=tensors_of(self.task_model.readout_module(task.label)),
                buffers=changed_buffers(backbone, self.pristine.buffers),
            )
        )
        self._switch.committed()
        self._region = None

    def suspend(self) -> None:
        """θ_pre where the region is being trained."""
        self._switch.revert_uncommitted()

    def enter_evaluation(self, task: StreamTask) -> None:
        """Step 4 of C.3: θ_pre under the union of the regions up to the task's own."""
        learned = task.name in self.ledger.tasks and not self._final_union
        self._switch.to(self.ledger.position(task.name) + 1 if learned else len(self.ledger.records))

    def leave_evaluation(self, task: StreamTask) -> None:
        """The union of all regions so far."""
        self._switch.to(len(self.ledger.records))

    def extra_results(self) -> dict[str, Any]:
        """The one final union on all tasks: what the union per task buys, by comparison."""
        if not self.options.final_union:
            return {}
        self._final_union = True
        try:
            answers = self.evaluate()
        finally:
            self._final_union = False
        return {
            "union": {
                "accuracy": [answers[task.name].score(task.definition.metric) for task in self.stream.tasks],
                "ece": [answers[task.name].ece for task in self.stream.tasks],
            }
        }
