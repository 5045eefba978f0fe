"""Texts by beams, or drawn at a temperature: a row at a time, so that a text depends on its row and its seed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgetfree.core.readout_model import autocast
from forgetfree.seeds import derive_seed
from forgetfree.tasks import Decoding

if TYPE_CHECKING:
    from forgetfree.models.task_model import TaskModel

#: Hears of each token that is decided: the ids of its text up to there.
Heard = Callable[[Sequence[int]], object]


def unheard(_: Sequence[int]) -> None:
    """Hear of a token, and do nothing."""


def counting(tell: Callable[[int], object]) -> Heard:
    """Return what tells how many tokens have been heard of."""
    count = 0

    def heard(_: Sequence[int]) -> None:
        nonlocal count
        count += 1
        tell(count)

    return heard


@torch.no_grad()
def write_alone(
    model: TaskModel,
    prompt: Sequence[int],
    decoding: Decoding,
    *,
    most: int,
    ends: Callable[[Sequence[int]], bool],
    end: int,
    heard: Heard = unheard,
) -> list[int]:
    """Return the ids that a model writes after a prompt, without the token that ends a text.

    Args:
        model: in evaluation mode.
        prompt: token ids.
        decoding: how; not greedily.
        most: the most tokens of a text; fewer where the model has fewer positions.
        ends: whether a text is at its end, by its ids.
        end: the token that ends a text.
        heard: hears of each token when it is decided: of beams, which decide at their end, of all one after another.
    """
    limit = min(most, model.most_after(prompt))
    if limit < 1:
        return []
    begun = model.to_continue([(prompt, [])])
    begin = 1 if model.writes_apart else len(prompt)
    generator = torch.Generator().manual_seed(derive_seed(decoding.seed, "text", *prompt))

    def draw(ids: Tensor, logits: Tensor) -> Tensor:
        alone, token = torch.full_like(logits, -torch.inf), drawn(logits[0], decoding, generator)
        alone[0, token] = 0.0
        if token != end:
            heard([*ids[0, begin:].tolist(), token])
        return alone

    def stop(ids: Tensor, _: Any) -> Tensor:
        return torch.tensor([ends(row[begin:].tolist()) for row in ids], device=ids.device)

    backbone: Any = model.backbone
    with autocast(model.precision, model.device.type):
        (ids,) = backbone.generate(
            **begun,
            max_new_tokens=limit,
            do_sample=False,
            num_beams=decoding.num_beams,
            eos_token_id=end,
            pad_token_id=model.tokens.pad,
            logits_processor=[draw] if decoding.temperature else [],
            stopping_criteria=[stop],
        ).tolist()
    text: list[int] = ids[begin:]
    text = text[: text.index(end)] if end in text else text
    while text and text[-1] == model.tokens.pad:  # fills a beam that a stop text ended
        text.pop()
    for count in range(1, 1 + len(text) * (decoding.num_beams > 1)):
        heard(text[:count])
    return text


def drawn(logits: Tensor, decoding: Decoding, generator: torch.Generator) -> int:
    """Return a token drawn from the softmax of logits ``(V,)`` / temperature, among the likeliest that make up ``top_p``."""
    logits = logits.double().cpu()
    logits = (logits - logits.max()) / decoding.temperature  # the largest is 0, which no temperature makes infinite
    probabilities, tokens = logits.softmax(0).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities
    kept = probabilities.where(before < decoding.top_p, 0.0)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])
