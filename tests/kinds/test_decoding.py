"""Texts by beams and drawn at a temperature are the same for any batch, order and padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forgetfree import registry
from forgetfree.data.prompts import EncodedTexts
from forgetfree.kinds.decoding import Passes, drawn, write, write_alone
from forgetfree.models.loading import LoadedModel
from forgetfree.tasks import Decoding, TaskDefinition

MOST = 6
TASK = TaskDefinition("own", "generation", (), metric="exact_match", max_new_tokens=MOST)
PROMPTS = [[5], [6, 7, 8, 9, 10], [11, 12], [5, 9, 13, 17]]
BEAMS, DRAWN = Decoding(num_beams=4), Decoding(temperature=1.5, top_p=0.9, seed=3)


def written(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], decoding: Decoding, batch_size: int = 64, **changes: Any
) -> list[list[int]]:
    rows = EncodedTexts.of([[*row[:-1], ~row[-1]] for row in prompts], [[0]] * len(prompts), 0, loaded.pad)
    more = {"right": [["x"]] * len(prompts), "tokenizer": loaded.tokenizer, "end": loaded.tokenizer.eos_token_id}
    rows = type(rows)(**(vars(rows) | more))
    task = replace(TASK, decoding=decoding, **changes)
    model: Any = loaded.model
    return write(task, model, rows, Passes(batch_size=batch_size, precision="fp32"))


@pytest.mark.parametrize("decoding", [BEAMS, DRAWN], ids=["beams", "drawn"])
@pytest.mark.parametrize("family", ["Llama", "GPT2", "T5", "Bart"])
def test_a_text_depends_on_its_row_alone(family: str, decoding: Decoding, loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded(family)
    texts = written(model, PROMPTS, decoding)
    assert written(model, PROMPTS[::-1], decoding, 2) == texts[::-1]
    assert [written(model, [prompt], decoding)[0] for prompt in PROMPTS] == texts
    assert texts != written(model, PROMPTS, Decoding())
    assert all(0 < len(text) <= MOST for text in texts)


@torch.no_grad()
def score(model: LoadedModel, prompt: Sequence[int], text: Sequence[int]) -> float:
    """The mean log-probability of a text's tokens, by transformers alone."""
    backbone: Any = model.model.backbone
    logits = backbone(input_ids=torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(text)), list(text)].mean())


def test_as_many_beams_as_tokens_find_the_likeliest_text_of_two(loaded: Callable[[str], LoadedModel]) -> None:
    """All are tried, where texts do not end before."""
    model = loaded("GPT2")
    end, vocabulary = int(model.tokenizer.eos_token_id), model.head(TASK).n_labels
    network: Any = model.model
    network.eval()
    for prompt in PROMPTS:
        how: dict[str, Any] = {"most": 2, "ends": lambda ids: False, "end": -1}
        found = write_alone(network, prompt, Decoding(num_beams=64), **how)
        with torch.no_grad():
            first = network.backbone(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
            firsts = torch.tensor([[*prompt, token] for token in range(vocabulary)])
            second = network.backbone(input_ids=firsts).logits[:, -1].log_softmax(-1)
        best = int((first[:, None] + second).argmax())
        assert found == [best // vocabulary, best % vocabulary]
        assert end not in found


def test_beams_find_texts_that_are_likelier_than_greedy_ones(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("Llama")
    pairs = zip(PROMPTS, written(model, PROMPTS, BEAMS), written(model, PROMPTS, Decoding()), strict=True)
    scores = [(score(model, prompt, beam), score(model, prompt, greedy)) for prompt, beam, greedy in pairs]
    assert sum(beam > greedy for beam, greedy in scores) > sum(beam < greedy for beam, greedy in scores)


def test_a_seed_gives_the_same_text_and_another_another(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("Llama")
    texts = [written(model, PROMPTS, replace(DRAWN, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert written(model, PROMPTS, replace(DRAWN, temperature=1e-6)) == written(model, PROMPTS, Decoding())


def test_a_text_ends_at_a_stop_text(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("GPT2")
    for decoding in (BEAMS, DRAWN):
        (whole,) = written(model, PROMPTS[1:2], decoding)
        stop = model.tokenizer.decode(whole[:2])
        (cut,) = written(model, PROMPTS[1:2], decoding, stop=(stop,))
        assert stop in model.tokenizer.decode(cut) or decoding is BEAMS  # another beam may win then
    assert cut == whole[: len(cut)]
    assert len(cut) <= 2


def test_tokens_are_drawn_by_their_probabilities_among_the_likeliest() -> None:
    logits, generator = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.Generator().manual_seed(0)
    found = Counter(drawn(logits, Decoding(temperature=1.0), generator) for _ in range(4000))
    assert [found[token] / 4000 for token in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    found = Counter(drawn(logits, Decoding(temperature=1.0, top_p=0.7), generator) for _ in range(4000))
    assert [found[token] / 4000 for token in range(4)] == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    found = Counter(drawn(logits, Decoding(temperature=0.5), generator) for _ in range(4000))
    expected = (squared / squared.sum()).tolist()
    assert [found[token] / 4000 for token in range(4)] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("decoding", "fault"),
    [
        (Decoding(num_beams=0), "num_beams must be from 1 to 64, got 0"),
        (Decoding(temperature=-1.0), "temperature must be 0, or from 1e-06 to 100, got -1.0"),
        (Decoding(temperature=1.0, top_p=0.0), "top_p must be above 0, and at most 1, got 0.0"),
        (Decoding(seed=-1), "seed must be from 0 to 2^63 - 1, got -1"),
        (Decoding(temperature=1e-310), "temperature must be 0, or from 1e-06 to 100, got 1e-310"),
        (
            Decoding(num_beams=2, temperature=1.0),
            "num_beams must be 1 where temperature draws texts, got num_beams 2 and temperature 1.0: leave one of them out",
        ),
        (
            Decoding(top_p=0.5),
            "top_p must be 1 where texts are not drawn, got 0.5: give temperature, too, or leave it out",
        ),
    ],
)
def test_what_cannot_be_is_told(decoding: Decoding, fault: str) -> None:
    assert fault in decoding.faults()[0]
    assert fault in registry.faults_of(replace(TASK, decoding=decoding))[0]


def test_no_temperature_is_too_low_to_draw_at() -> None:
    """Nor any logit too large: divided by it, most are infinite."""
    for temperature in (1e-6, 1e-300, 5e-324):
        generator = torch.Generator().manual_seed(0)
        assert drawn(torch.tensor([3e38, 1e38, -3e38]), Decoding(temperature=temperature), generator) == 0


def test_what_is_asked_for_replaces_what_is_usual() -> None:
    assert DRAWN.otherwise(seed=5) == replace(DRAWN, seed=5)
    assert DRAWN.otherwise(temperature=0.0) == Decoding()
    assert DRAWN.otherwise(num_beams=2) == Decoding(num_beams=2)
    assert BEAMS.otherwise(temperature=0.5) == Decoding(temperature=0.5)
    assert BEAMS.otherwise(temperature=None, num_beams=None) == BEAMS
