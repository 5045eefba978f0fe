"""Which entries a task may train: localising its skill (paper, §2), and what strategies on weight matrices share.

To localise, fine-tune θ_pre on the task alone, then learn the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forgetfree.data.encoding import Batch
from forgetfree.data.sampling import evenly, micro_batches, plan_batches
from forgetfree.errors import ModelError, OptionError
from forgetfree.grafting import BaseKind, LearnedRegion, MaskOptions, base_region, budget, learn_region
from forgetfree.ledger_strategy import RegionOptions
from forgetfree.models.state import ModelState, load_tensors_, persistent_buffers, tensors_of
from forgetfree.options import option
from forgetfree.parameters import ParameterSpace
from forgetfree.seeds import derive_seed
from forgetfree.strategy import ContinualStrategy, Predictions
from forgetfree.streams import Stream, StreamTask
from forgetfree.training import predict


@dataclass(frozen=True, kw_only=True)
class LocalizationOptions(RegionOptions):
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


def weight_matrices(space: ParameterSpace) -> list[int]:
    """The numbers of the tensors that are neither a bias nor a normalisation's: those of two dimensions or more.

    Raises:
        ModelError: there is none.
    """
    found = [i for i, spec in enumerate(space.tensors) if len(spec.shape) >= 2]
    if not found:
        raise ModelError(
            f"The model has no graftable weight matrix: expected a tensor of two dimensions or more among its "
            f"{len(space.tensors)}. Choose another model, or a strategy that trains any tensor, such as grafting-continual."
        )
    return found


def check_grafting(options: LocalizationOptions, stream: Stream) -> None:
    """Raise ``OptionError`` unless the sparsity leaves an entry, and something chooses the region."""
    budget(len(stream.model.space()), options.sparsity)
    if options.base == "empty" and options.mask_steps == 0:
        raise OptionError("base=empty with mask_steps=0 leaves no region. Set mask_steps above 0, or base=movement.")


def localize(strategy: ContinualStrategy, task: StreamTask, fine_tuned: ModelState) -> LearnedRegion:
    """γ of one task by eqs. 3 and 4, with the fine-tuned readout; the model holds θ_pre before and after."""
    model, space, options = strategy.task_model, strategy.space, strategy.options
    pre = strategy.pristine.theta.to(strategy.device)
    ft = fine_tuned.theta.to(strategy.device)
    count = budget(len(space), options.sparsity)
    seed = strategy.phase_seed("localize", task)
    base = base_region(options.base, pre, ft, count, derive_seed(seed, "base"))
    size = min(options.mask_batch_size, len(task.train))
    steps = options.mask_steps
    if steps is None:
        steps = min(100, max(1, strategy.full_steps(task) * options.batch_size // size))
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
    # BatchNorm's statistics of the task: a mask is judged as the trained region will be.
    _load_buffers(strategy, fine_tuned)
    mode = model.training
    model.eval()  # no dropout, the readout's included
    try:
        with strategy.phase("localize", task, steps) as on_step:
            return learn_region(
                model.backbone,
                space,
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
        _load_buffers(strategy, strategy.pristine)


def _load_buffers(strategy: ContinualStrategy, state: ModelState) -> None:
    for name, buffer in persistent_buffers(strategy.task_model.backbone).items():
        buffer.copy_(state.buffers[name])
