"""Closed answers: the likeliest is found by the log-probability of the whole text, for any batch, order and padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forgetfree.data.prompts import EncodedTexts, PromptEncoder
from forgetfree.errors import ModelError
from forgetfree.kinds import decoding
from forgetfree.kinds.decoding import Passes, log_probabilities
from forgetfree.models.loading import LoadedModel
from forgetfree.tasks import TaskDefinition

TASK = TaskDefinition("own", "generation", (), metric="exact_match")
PROMPTS = [[5], [6, 7, 8, 9, 10], [11, 12], [5, 9, 13, 17]]
ALLOWED = [[5], [6, 7], [6, 7, 8], [9, 10, 11, 12]]


def found(loaded: LoadedModel, prompts: Sequence[Sequence[int]], batch_size: int = 64) -> Tensor:
    rows = EncodedTexts.of([[*row[:-1], ~row[-1]] for row in prompts], [[0]] * len(prompts), 0, loaded.pad)
    rows = replace(rows, tokenizer=loaded.tokenizer, end=int(loaded.tokenizer.eos_token_id), allowed=ALLOWED)
    model: Any = loaded.model
    return log_probabilities(model, rows, Passes(batch_size=batch_size, precision="fp32"))


@torch.no_grad()
def slow(loaded: LoadedModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """By transformers' own classes alone, one text at a time, with the token that ends it."""
    backbone: Any = loaded.model.backbone.eval()
    ids = [*answer, int(loaded.tokenizer.eos_token_id)]
    if loaded.writes_apart:
        begun = torch.tensor([[backbone.config.decoder_start_token_id, *answer]])
        logits = backbone(input_ids=torch.tensor([prompt]), decoder_input_ids=begun).logits[0]
    else:
        logits = backbone(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :]
    return float(logits.log_softmax(-1)[range(len(ids)), ids].sum())


@pytest.mark.parametrize("family", ["Llama", "GPT2", "T5", "Bart"])
def test_it_is_the_sum_over_the_tokens_and_depends_on_the_row_alone(
    family: str, loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(family)
    whole = found(model, PROMPTS)
    expected = [[slow(model, prompt, answer) for answer in ALLOWED] for prompt in PROMPTS]
    assert torch.allclose(whole, torch.tensor(expected), atol=1e-4)
    assert torch.equal(found(model, PROMPTS[::-1], 2).flip(0), whole)
    assert torch.equal(torch.cat([found(model, [prompt]) for prompt in PROMPTS]), whole)
    monkeypatch.setattr(decoding, "_TOGETHER", 3)
    assert torch.allclose(found(model, PROMPTS), whole, atol=1e-5)


def test_a_prompt_leaves_room_for_the_longest_answer(loaded: Callable[[str], LoadedModel]) -> None:
    """However short the right one is, and what ``max_new_tokens`` says."""
    from forgetfree.data.rows import Rows

    tokenizer = loaded("Llama").tokenizer
    task = replace(TASK, closed_answers=("great", "great great great great film"), max_new_tokens=1)
    encoder = PromptEncoder(tokenizer, task, 16)
    longest = max(map(len, encoder.allowed))
    rows = Rows(("film " * 30,) * 2, (), (("great",), ("great great great great film",)))
    lengths = [sum(token >= 0 for token in ids) + 1 for ids in encoder(rows)]
    assert lengths == [16 - longest] * 2
    with pytest.raises(ModelError, match="nothing is left for a prompt and its answer"):
        PromptEncoder(tokenizer, replace(task, closed_answers=("great", "great " * 20 + "film")), 16)
    with pytest.raises(ModelError, match="makes the same tokens of two closed_answers"):
        PromptEncoder(loaded("T5").tokenizer, replace(task, closed_answers=("漢", "字")), 16, closed=True)
