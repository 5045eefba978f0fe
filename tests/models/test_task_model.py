"""Logits are compared with plain transformers forward passes, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from forgetfree.errors import TaskError
from forgetfree.models.task_model import TaskModel
from forgetfree.models.token_inputs import TokenLayout

#: Arguments of `add_task`.
Task = tuple[Any, ...]
SINGLE: Task = ("first", 2)
TRIPLE: Task = ("second", 3)
TEXTS = ["the film was great .", "story", "who was it ? the river and the city were bright"]


def layout(tokenizer: Any, *, types: bool) -> TokenLayout:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TokenLayout(pad, tokenizer.mask_token_id, tokenizer.sep_token_id if types else None)


def make(kind: str, readout: str, *tasks: Task, causal: bool = False) -> tuple[TaskModel, Any]:
    """Return a model of `tiny.KINDS` in evaluation mode, and its tokenizer."""
    backbone, tokenizer = tiny.build(kind)
    tokens = layout(tokenizer, types=kind.startswith("bert"))
    model = TaskModel(backbone, tokens, readout, pooling="last" if causal else "first")  # type: ignore[arg-type]
    for task in tasks:
        model.add_task(*task)
    return model.eval(), tokenizer


def batch(tokenizer: Any, texts: list[str], pad: int | None = None) -> Tensor:
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    pad = layout(tokenizer, types=False).pad if pad is None else pad
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=float(pad))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- The three readouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "position"), [("bert", 0), ("roberta", 0), ("gpt2", -1)])
@torch.no_grad()
def test_linear_reads_the_first_token_or_the_last_of_a_causal_model(kind: str, position: int) -> None:
    model, tokenizer = make(kind, "linear", SINGLE, causal=position < 0)
    x = batch(tokenizer, TEXTS)
    got = model(x, 0)
    assert torch.equal(got, model(x, torch.zeros(len(x), dtype=torch.int64)))  # one task label, or one for each row
    for row, text in zip(got, TEXTS, strict=True):
        hidden = model.backbone(**tokenizer(text, return_tensors="pt")).last_hidden_state
        close(row, model.readouts[0](hidden[0, position]))


@torch.no_grad()
def test_linear_reads_pairs_with_their_token_types() -> None:
    model, tokenizer = make("bert", "linear", SINGLE)
    encoded = tokenizer("who was it ?", "the river", return_tensors="pt")
    assert int(encoded["token_type_ids"].sum()) > 0
    close(model.features(encoded["input_ids"]), model.backbone(**encoded).last_hidden_state[:, 0])


@pytest.mark.parametrize("kind", ["bert-mlm", "roberta-mlm"])
@torch.no_grad()
def test_prompt_reads_the_label_words_at_the_mask(kind: str) -> None:
    model, tokenizer = make(kind, "prompt", ("first", 2, (11, 7)))
    texts = [f"{text} it was {tokenizer.mask_token} ." for text in TEXTS]
    got = model(batch(tokenizer, texts), 0)
    for row, text in zip(got, texts, strict=True):
        encoded = tokenizer(text, return_tensors="pt")
        mask = encoded["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        close(row, model.backbone(**encoded).logits[0, mask, [11, 7]])


@torch.no_grad()
def test_causal_reads_the_label_words_after_the_last_token() -> None:
    model, tokenizer = make("gpt2-lm", "causal", ("first", 3, (9, 3, 12)))
    got = model(batch(tokenizer, TEXTS), 0)
    for row, text in zip(got, TEXTS, strict=True):
        close(row, model.backbone(**tokenizer(text, return_tensors="pt")).logits[0, -1, [9, 3, 12]])


@torch.no_grad()
def test_a_head_whose_logits_the_model_caps_is_read_with_the_cap() -> None:
    """Gemma 2 caps its logits after the head: cap · tanh(logits / cap)."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    backbone = Gemma2ForCausalLM(config).eval()
    model = TaskModel(backbone, TokenLayout(pad=0), "causal").eval()
    model.add_task("first", 3, (9, 3, 12))
    x = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    close(model(x, 0)[0], backbone(input_ids=x[:1]).logits[0, -1, [9, 3, 12]])
    close(model(x, 0)[1], backbone(input_ids=x[1:, :2]).logits[0, -1, [9, 3, 12]])
    assert float(model(x, 0).abs().max()) <= 0.5


# -- Padding and mixed batches -----------------------------------------------------------------------------


@torch.no_grad()
def test_padding_changes_no_logits_of_an_empty_text() -> None:
    """GPT-2 uses the same token for padding and for an empty text."""
    model, tokenizer = make("gpt2", "linear", SINGLE, causal=True)
    alone = torch.tensor([[tokenizer.eos_token_id]])
    wide = torch.full((2, 6), tokenizer.eos_token_id)
    close(model(wide, 0), model(alone, 0).expand(2, -1))


@pytest.mark.parametrize("readout", ["linear", "prompt"])
@torch.no_grad()
def test_a_mixed_batch_answers_every_row_for_its_own_task(readout: str) -> None:
    kind = "bert" if readout == "linear" else "bert-mlm"
    tasks = (SINGLE, TRIPLE) if readout == "linear" else (("first", 2, (8, 9)), ("second", 3, (10, 11, 12)))
    model, tokenizer = make(kind, readout, *tasks)
    x = batch(tokenizer, [f"{text} [MASK]" for text in TEXTS])
    got = model(x, torch.tensor([1, 0, 1]))
    assert got.shape == (3, 3)
    close(got[[0, 2]], model(x, 1)[[0, 2]])
    close(got[1, :2], model(x, 0)[1])
    assert got[1, 2] == torch.finfo(got.dtype).min
    assert got[1].argmax() < 2


@torch.no_grad()
def test_a_mixed_batch_in_half_precision_stays_finite() -> None:
    model, tokenizer = make("bert", "linear", SINGLE, TRIPLE)
    got = model.bfloat16()(batch(tokenizer, TEXTS), torch.tensor([0, 1, 0]))
    assert got.dtype == torch.float32
    assert bool(got.isfinite().all())


# -- Tasks -----------------------------------------------------------------------------------------------


def test_a_readout_depends_on_its_seed_and_name_and_not_on_the_stream() -> None:
    def weight(*tasks: Task, seed: int = 0) -> Tensor:
        model, _ = make("bert", "linear")
        for name, labels in tasks:
            model.add_task(name, labels, seed=seed)
        return model.readout_module(len(tasks) - 1).weight  # type: ignore[return-value]

    assert torch.equal(weight(SINGLE), weight(TRIPLE, SINGLE))
    assert not torch.equal(weight(SINGLE), weight(SINGLE, seed=1))
    assert not torch.equal(weight(SINGLE), weight(("other", 2)))


@pytest.mark.parametrize("task", [-1, 1])
def test_an_unknown_task_label_is_refused(task: int) -> None:
    model, tokenizer = make("bert", "linear", SINGLE)
    for labels in (task, torch.tensor([task, task, task]), torch.tensor([0, task, 0])):
        with pytest.raises(TaskError, match=f"no task label {task}; it has 1 task"):
            model(batch(tokenizer, TEXTS), labels)
