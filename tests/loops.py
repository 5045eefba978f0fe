"""Ordinary models and training loops, in which tests graft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from compared import different, state_of
from torch import Tensor, nn
from transformers import BertForSequenceClassification, GPT2LMHeadModel

from forgetfree import Ledger
from forgetfree.errors import ForgetfreeError, TrainingError
from forgetfree.testing.tiny import bert_config, pre_trained
from forgetfree.trainers.learning import Skill, answering, learning


def language_model(dtype: torch.dtype = torch.float32) -> Any:
    return pre_trained(lambda: GPT2LMHeadModel(tiny.gpt2_config(60))).to(dtype)


def classifier() -> Any:
    return pre_trained(lambda: BertForSequenceClassification(bert_config(60)))


def texts(seed: int, count: int = 3) -> list[dict[str, Tensor]]:
    """Return batches for the loss of a language model."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 60, (4, 9), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def labelled(seed: int, count: int = 3) -> list[dict[str, Tensor]]:
    """Return batches for the loss of a classifier with two labels."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randint(5, 60, (4, 9), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each[:, 1] % 2} for each in draws]


def train(model: nn.Module, batches: list[dict[str, Tensor]], make: Callable[..., Any] | None = None) -> list[float]:
    """Train the model's trainable parameters in an ordinary loop with weight decay and gradient clipping; return the losses."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)))(trainable)
    model.train()
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def logits(model: nn.Module, ledger: Ledger, task: str, batch: dict[str, Tensor]) -> Tensor:
    with answering(model, ledger, task), torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"]).logits.clone()


class Ended(Exception):
    """Ends a `learning` block, so that its task is not recorded."""


def begun(model: nn.Module, ledger: Ledger, **arguments: Any) -> Skill:
    """Return the skill that a `learning` block would train."""
    with pytest.raises(Ended), learning(model, ledger, "begun", **arguments) as skill:
        raise Ended
    return skill


@contextmanager
def refusing(model: nn.Module, *words: str, of: dict[str, Any] | None = None, **how: Any) -> Iterator[Skill]:
    """Check that a block ends in an error with these words, restores the model, and leaves the ledger without a task.

    Args:
        model: the model to train.
        words: parts of the message.
        of: arguments of the ledger.
        how: arguments of the block.
    """
    ledger, before = Ledger.of_model(model, **of or {}), state_of(model)
    with pytest.raises(TrainingError) as raised, learning(model, ledger, "one", **how) as skill:
        yield skill
    text = str(raised.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert_same(model, before)
    assert ledger.tasks == []


def assert_same(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert different(model.state_dict(), before) == []
    assert all(type(each) is nn.Parameter and each.requires_grad for each in model.parameters())


def refused(action: Callable[[], Any], error: type[ForgetfreeError], *words: str) -> None:
    """Check that an action is refused with one paragraph that contains these words."""
    with pytest.raises(error) as raised:
        action()
    text = str(raised.value)
    assert "\n" not in text and all(word in text for word in words), text
