"""Texts that a language model writes, and which of the allowed ones it finds likely: the same for any batch, order and padding.

Kernels add up in an order that depends on the shapes, and so logits of a row that is read in a batch of another shape differ
in their last bits; where the two largest nearly agree, the other may win. Hence the shapes of all passes follow from the row
alone: prompts are filled to one of a few lengths, and each length has its number of rows, which copies fill. Then neither the
rows beside it nor its place among them changes a bit of a row's logits. Where rows are not read independently of each other,
each is read alone: by experts, which compute the rows that chose them together, and by the factors of LongRoPE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgetfree.core.readout_model import autocast, evaluating
from forgetfree.data.prompts import EncodedTexts
from forgetfree.kinds.kind import Wrote
from forgetfree.tasks import TaskDefinition

if TYPE_CHECKING:
    from forgetfree.models.task_model import TaskModel

#: From marked ids and task labels to logits: what answers in the model's place.
Answer = Callable[[Tensor, Any], Tensor]
#: From prompts and a batch size to the numbers of those that are answered together, each time with what answers them, if it is
#: not the model; the model may be another each time.
Turns = Callable[[Sequence[Sequence[int]], int], Iterable[tuple[Sequence[int], Answer | None]]]
#: Rows and tokens, at most, that a pass reads: a CPU would take long for the copies beside a single prompt.
_ON_CPU, _ELSEWHERE = (8, 512), (32, 2**14)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Options of the passes that answer rows.

    Attributes:
        batch_size: rows at once, at most.
        precision: of forward passes.
        answer: what answers in the model's place, if anything.
        turns: which rows are answered together, where not all are answered alike.
    """

    batch_size: int
    precision: str
    answer: Answer | None = None
    turns: Turns | None = None

    def together(self, prompts: Sequence[Sequence[int]]) -> Iterable[tuple[Sequence[int], Answer | None]]:
        """Return the numbers of prompts that are answered together, each time with what answers them: see `Turns`."""
        return self.turns(prompts, self.batch_size) if self.turns else [(range(len(prompts)), self.answer)]


def write(
    task: TaskDefinition, model: TaskModel, rows: EncodedTexts, passes: Passes, wrote: Wrote | None = None
) -> list[list[int]]:
    """Return the token ids that a model writes after each prompt, in the rows' order.

    Args:
        task: whose rows; it says how long a text may be, and what ends it.
        model: the model.
        rows: the rows; what stands there after the prompts is not read.
        passes: how they are read, but for the number of rows at once: see `rows_at_once`.
        wrote: told after each batch, see `Wrote`.
    """
    prompts = rows.prompts
    written: list[list[int]] = [[] for _ in prompts]
    tokens = 0

    def told(more: int) -> None:
        nonlocal tokens
        tokens += more
        if wrote is not None:
            wrote(tokens, len(prompts) * task.max_new_tokens)

    with evaluating(model, passes.precision):
        for together, answering in passes.together(prompts):
            texts = write_greedily(
                model,
                [prompts[i] for i in together],
                task=rows.task,
                most=task.max_new_tokens,
                ends=partial(stops, rows.tokenizer, stop=task.stop),
                end=rows.end,
                answer=answering,
                wrote=told,
            )
            for number, text in zip(together, texts, strict=True):
                written[number] = text
    return written


def filled(length: int) -> int:
    """Return the length to which prompts of a length are filled: the next of 16, 32, 48, 64, 96, 128, 192, 256 and so on.

    It is longer than theirs: where nothing fills any row of a batch, another kernel reads them.
    """
    step = 16
    while length >= 4 * step:
        step *= 2
    return (length // step + 1) * step


def rows_at_once(model: TaskModel, length: int) -> int:
    """Return how many prompts a pass reads that are filled to a length."""
    if has_experts(model.backbone.config):
        return 1
    rows, tokens = _ON_CPU if model.device.type == "cpu" else _ELSEWHERE
    return max(1, min(rows, tokens // max(length, 1)))


def has_experts(config: Any) -> bool:
    """Return whether a Hugging Face model has experts that rows choose, by its config."""
    named = config.get_text_config().to_dict()
    return any(re.search(r"experts$", name) and isinstance(n, int) and n > 1 for name, n in named.items())


def stops(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Return whether token ids hold one of the texts that end a text."""
    if not stop:
        return False
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    return any(end in text for end in stop) or not special_stops(tokenizer, stop).isdisjoint(ids)


def special_stops(tokenizer: Any, stop: Sequence[str]) -> set[int]:
    """Return the ids of those texts that are special tokens, which are left out where ids become a text."""
    special = {*tokenizer.all_special_tokens} if stop else set()
    return {int(tokenizer.convert_tokens_to_ids(end)) for end in stop if end in special}


class _Text:
    """A text that is being written, a token at a time.

    Attributes:
        ids: its tokens so far.
        ended: whether it is at its end.
    """

    def __init__(self, limit: int, end: int, ends: Callable[[Sequence[int]], bool]) -> None:
        self.ids = list[int]()
        self.ended = limit < 1
        self._limit, self._end, self._ends = limit, end, ends

    @property
    def room(self) -> int:
        """The number of tokens that may still come."""
        return self._limit - len(self.ids)

    def add(self, token: int) -> None:
        """Add a token, unless it is that which ends texts."""
        self.ended = token == self._end
        if not self.ended:
            self.ids.append(token)
            self.ended = not self.room or self._ends(self.ids)


@torch.no_grad()
def write_greedily(
    model: TaskModel,
    prompts: Sequence[Sequence[int]],
    *,
    task: int,
    most: int,
    ends: Callable[[Sequence[int]], bool],
    end: int,
    answer: Answer | None = None,
    wrote: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Return the ids that a model writes after each prompt, without the token that ends a text.

    Args:
        model: in evaluation mode.
        prompts: token ids.
        task: the label of the prompts' task.
        most: the most tokens of a text; fewer where the model has fewer positions.
        ends: whether a text is at its end, by its ids.
        end: the token that ends a text.
        answer: from marked ids and task labels to logits, what answers in the model's place, if anything: each row alone.
        wrote: told after each batch how many tokens its texts have.
    """
    rows = [(prompt, _Text(min(most, model.most_after(prompt)), end, ends)) for prompt in prompts]
    longest = model.even_length if answer is None else 0

    def shape(row: tuple[Sequence[int], _Text]) -> tuple[int, bool]:
        """Return what rows that are read together have in common: the length, and whether there is room for any text."""
        prompt, text = row
        return (filled(len(prompt)), text.room == most) if len(prompt) + text.room <= longest else (0, False)

    for (length, has_room), group in groupby(sorted(rows, key=shape), shape):
        alike = list(group)
        # The passes of a batch go on where one of its texts is at the model's last position.
        size = rows_at_once(model, length) if has_room else 1
        for batch in (alike[start : start + size] for start in range(0, len(alike), size)):
            if length:
                _write_together(model, batch, length, end)
            for prompt, text in batch:
                while not text.ended:
                    text.add(_alone(answer or model, model.device, task, prompt, text.ids))
            if wrote is not None:
                wrote(sum(len(text.ids) for _, text in batch))
    return [text.ids for _, text in rows]


def _alone(read: Answer, device: torch.device, task: int, prompt: Sequence[int], text: Sequence[int]) -> int:
    """Return the token that follows, by one row alone, without a cache."""
    ids = [*prompt[:-1], ~prompt[-1], *(~token for token in text)]
    labels = torch.full((len(text) + 1,), task, device="cpu")
    return int(read(torch.tensor([ids], device=device), labels)[-1].argmax())


def _write_together(model: TaskModel, rows: Sequence[tuple[Sequence[int], _Text]], length: int, end: int) -> None:
    """Write texts side by side, until each is at its end, after prompts that are filled to a length."""
    backbone: Any = model.backbone
    prompts, texts = zip(*rows, strict=True)
    size = rows_at_once(model, length)

    def ended(ids: Tensor, _: Any) -> Tensor:
        """Add the token that each text got, and return which texts are at their end; copies are."""
        for text, token in zip(texts, ids[:, -1].tolist(), strict=False):
            if not text.ended:
                text.add(token)
        return torch.tensor([text.ended for text in texts] + [True] * (size - len(texts)), device=ids.device)

    with autocast(model.precision, model.device.type):
        backbone.generate(
            **model.to_continue([*prompts, *[prompts[0]] * (size - len(prompts))], length),
            max_new_tokens=max(text.room for text in texts),
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=end,
            pad_token_id=model.tokens.pad,
            stopping_criteria=[ended],
        )


# -- Which of the allowed answers ------------------------------------------------------------------------


#: How many answers are read in one forward pass.
_TOGETHER = 64


@torch.no_grad()
def log_probabilities(model: TaskModel, rows: EncodedTexts, passes: Passes) -> Tensor:
    """Return the log-probability of each allowed answer after each prompt, in nats ``(rows, answers)``, float32.

    It is that of the whole text: the sum over its tokens and the one that ends it, not divided by their number.

    Args:
        model: the model.
        rows: the rows, with the allowed answers.
        passes: how they are read; the answers to one row are read together.
    """
    found = torch.empty(len(rows), len(rows.allowed), device="cpu")
    prompts = rows.prompts
    with evaluating(model, passes.precision):
        for together, answering in passes.together(prompts):
            for i in together:
                found[i] = _of_row(answering or model, model, rows, prompts[i])
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
