"""Where a graft comes from."""

from __future__ import annotations

from dataclasses import dataclass

from forgetfree.core.readout_model import ReadoutKind
from forgetfree.tasks import MAX_LENGTH, TaskDefinition


@dataclass(frozen=True)
class GraftOrigin:
    """Where a graft comes from: what else is needed to answer with it.

    Attributes:
        task: what it was made for.
        readout: how its logits are read: ``linear``, ``prompt``, ``causal`` or ``classifier``.
        model: the base model's name, as it was asked for.
        fingerprint: of the base model's body, see `forgetfree.core.body.body_fingerprint`.
        sparsity: the share of the space that its region was allowed.
        architecture: of ``classifier``: the Hugging Face class whose head the readout is.
        classes: of ``classifier``: of each of the task's labels, the number of the head's class.
        max_length: tokens a row was read at, at most.
        network: what the base model computes beside its weights, see `forgetfree.core.binding.network_of`; of
            ``classifier``, the fine-tuned model. Empty where it is not known.
        tokenizer: what its tokenizer does, see `forgetfree.core.binding.tokenizer_digest`; empty likewise.
    """

    task: TaskDefinition
    readout: ReadoutKind
    model: str
    fingerprint: str
    sparsity: float
    architecture: str = ""
    classes: tuple[int, ...] = ()
    max_length: int = MAX_LENGTH
    network: str = ""
    tokenizer: str = ""
