"""How likely a language model finds each of the answers that a task allows: the same for any batch, order and padding.

The answers of one row are read side by side, and nothing beside them, so what is found depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forgetfree.core.readout_model import evaluating
from forgetfree.data.prompts import EncodedTexts
from forgetfree.models.generation import Answer, Turns
from forgetfree.models.task_model import TaskModel
from forgetfree.parallel.exchange import gathered, own_items

#: How many answers are read in one forward pass.
_TOGETHER = 64


@torch.no_grad()
def log_probabilities(
    model: TaskModel,
    rows: EncodedTexts,
    *,
    batch_size: int,
    precision: str,
    answer: Answer | None = None,
    turns: Turns | None = None,
) -> Tensor:
    """Return the log-probability of each allowed answer after each prompt, in nats ``(rows, answers)``, float32.

    It is that of the whole text: the sum over its tokens and the one that ends it, not divided by their number.

    Args:
        model: the model.
        rows: the rows, with the allowed answers.
        batch_size: rows that `turns` puts together, at most.
        precision: of forward passes.
        answer: what answers in the model's place, if anything.
        turns: which rows are answered alike, where not all are.
    """
    found = torch.empty(len(rows), len(rows.allowed))
    prompts = rows.prompts
    with evaluating(model, precision):
        for together, answering in turns(prompts, batch_size) if turns else [(range(len(prompts)), answer)]:
            own = [(i, _of_row(answering or model, model, rows, prompts[i])) for i in own_items(list(together))]
            for i, of_row in gathered(own):
                found[i] = of_row
    return found


def _of_row(read: Answer, model: TaskModel, rows: EncodedTexts, prompt: Sequence[int]) -> Tensor:
    """Return the log-probability of each allowed answer after one prompt ``(answers,)``."""
    return torch.cat(
        [
            _of_answers(read, model, rows, prompt, rows.allowed[start : start + _TOGETHER])
            for start in range(0, len(rows.allowed), _TOGETHER)
        ]
    )


def _of_answers(
    read: Answer, model: TaskModel, rows: EncodedTexts, prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> Tensor:
    """Return the same of some of them, in one forward pass."""
    marked = [[*prompt[:-1], *(~token for token in (prompt[-1], *ids))] for ids in answers]
    longest = max(map(len, marked))
    x = torch.tensor([[*ids, *[model.tokens.pad] * (longest - len(ids))] for ids in marked], device=model.device)
    learned = torch.tensor([token for ids in answers for token in (*ids, rows.end)], device=model.device)
    logits = read(x, torch.full_like(learned, rows.task))
    each = logits.float().log_softmax(-1).gather(1, learned[:, None]).squeeze(1)
    return torch.stack([part.sum() for part in torch.split(each, [len(ids) + 1 for ids in answers])]).cpu()
