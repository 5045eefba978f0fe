"""Greedy decoding, and log-probabilities of allowed answers: the same result for any batch, order and padding.

Kernels add up in an order that depends on the shapes, so a row's logits differ in their last bits between batches of
different shapes. Where the two largest logits nearly agree, another token may win. Two methods prevent that:

- **Fixed shapes**, in half precision and on a GPU. Prompts are padded to one of a few lengths; each length has its number of
  rows, filled up with copies. Then neither the other rows nor its place in the batch changes a bit of a row's logits.
- **Float32 on a CPU**, where several threads share a product, and bits also depend on a row's place. A batch decides only where
  the two largest logits are clearly apart. Otherwise the row is read alone, without padding or cache, and that decides.

Some models do not compute rows independently: experts compute the rows that chose them together, and LongRoPE's factors depend
on the longest row. There, each row is read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from forgetfree.core.families import even_length_of, has_experts, positions_of
from forgetfree.core.readout_model import autocast, evaluating
from forgetfree.data.prompts import EncodedTexts
from forgetfree.data.rows import by_length
from forgetfree.kinds.kind import Wrote
from forgetfree.models.task_model import TaskModel
from forgetfree.tasks import TaskDefinition

#: A function from marked ids and task labels to logits, which answers in the model's place.
Answer = Callable[[Tensor, Any], Tensor]
#: A function from prompts and a batch size to groups of prompts that are answered together: the numbers of the prompts, and the
#: function that answers them, or ``None`` for the model, whose weights may change from group to group.
Turns = Callable[[Sequence[Sequence[int]], int], Iterable[tuple[Sequence[int], Answer | None]]]
#: The largest difference of a row's float32 logits between batches, as a share of the largest logit: far more than is measured.
_DOUBTFUL = 1e-3
#: The most rows and tokens of a fixed shape: on a CPU, copies of a single prompt take long.
_ON_CPU, _ELSEWHERE = (8, 512), (32, 2**14)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Options of the passes that answer rows.

    Attributes:
        batch_size: the most rows at once; for texts, only in float32 on a CPU: fixed shapes have their own number.
        precision: the precision of forward passes.
        answer: the function that answers in the model's place, if any.
        turns: the function that groups rows, where not all are answered by the same function.
    """

    batch_size: int
    precision: str
    answer: Answer | None = None
    turns: Turns | None = None

    def together(self, prompts: Sequence[Sequence[int]]) -> Iterable[tuple[Sequence[int], Answer | None]]:
        """Return groups of prompts that are answered together, each with the function that answers them: see `Turns`."""
        return self.turns(prompts, self.batch_size) if self.turns else [(range(len(prompts)), self.answer)]


def write(
    task: TaskDefinition, model: TaskModel, rows: EncodedTexts, passes: Passes, wrote: Wrote | None = None
) -> list[list[int]]:
    """Return the token ids that a model writes after each prompt, in the rows' order.

    Args:
        task: the task, with the maximum length of a text and the texts that end it.
        model: the model.
        rows: the rows; only their prompts are read.
        passes: the options of the forward passes.
        wrote: called after each batch, see `Wrote`.
    """
    prompts = rows.prompts
    written: list[list[int]] = [[] for _ in prompts]
    with evaluating(model, passes.precision):
        for together, answering in passes.together(prompts):
            for places in batches_of(model, [len(prompts[i]) for i in together], passes.batch_size):
                batch = [together[place] for place in places]
                texts = write_greedily(
                    model,
                    [prompts[i] for i in batch],
                    task=rows.task,
                    most=task.max_new_tokens,
                    ends=partial(stops, rows.tokenizer, stop=task.stop),
                    end=rows.end,
                    answer=answering,
                )
                for number, text in zip(batch, texts, strict=True):
                    written[number] = text
                if wrote is not None:
                    wrote(sum(map(len, written)), len(prompts) * task.max_new_tokens)
    return written


def batches_of(model: TaskModel, lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Return the numbers of the prompts of each batch for `write_greedily`; with fixed shapes, ``size`` is not used."""
    if not _has_fixed_shapes(model):
        yield from by_length(lengths, size)
        return
    for length, group in groupby(
        sorted(range(len(lengths)), key=lengths.__getitem__), lambda i: padded_length(lengths[i])
    ):
        numbers, size = list(group), rows_at_once(model, length)
        yield from (numbers[start : start + size] for start in range(0, len(numbers), size))


def _has_fixed_shapes(model: TaskModel) -> bool:
    """Return whether the shape of a pass depends on one row alone."""
    backbone: Any = model.backbone
    return model.device.type != "cpu" or model.precision != "fp32" or backbone.dtype != torch.float32


def padded_length(length: int) -> int:
    """Return the length to which prompts of a length are padded: the next of 32, 64, 128, 256 and so on.

    It is longer than the prompts: a batch without any padding is computed by another kernel.
    """
    return max(32, 1 << length.bit_length())


def rows_at_once(model: TaskModel, length: int) -> int:
    """Return the number of prompts in a pass where they are padded to a length."""
    rows, tokens = _ON_CPU if model.device.type == "cpu" else _ELSEWHERE
    return max(1, min(rows, tokens // length))


def stops(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Return whether token ids contain one of the ``stop`` texts."""
    if not stop:
        return False
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    return any(end in text for end in stop) or not special_stops(tokenizer, stop).isdisjoint(ids)


def special_stops(tokenizer: Any, stop: Sequence[str]) -> set[int]:
    """Return the ids of the ``stop`` texts that are special tokens: decoding leaves these out of a text."""
    special = {*tokenizer.all_special_tokens} if stop else set()
    return {int(tokenizer.convert_tokens_to_ids(end)) for end in stop if end in special}


class _Text:
    """A text that is being written, one token at a time.

    Attributes:
        ids: its tokens so far.
        ended: whether it is complete.
    """

    def __init__(self, limit: int, end: int, ends: Callable[[Sequence[int]], bool]) -> None:
        self.ids = list[int]()
        self.ended = limit < 1
        self._limit, self._end, self._ends = limit, end, ends

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self._limit - len(self.ids)

    def add(self, token: int) -> None:
        """Add a token, unless it is the token that ends texts."""
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
) -> list[list[int]]:
    """Return the ids that a model writes after each prompt, without the token that ends a text.

    Args:
        model: the model, in evaluation mode.
        prompts: token ids.
        task: the label of the prompts' task.
        most: the most tokens of a text; fewer where the model has fewer positions.
        ends: returns whether a text is complete, from its ids.
        end: the token that ends a text.
        answer: the function from marked ids and task labels to logits that answers in the model's place, if any.
    """
    alone = partial(_alone, answer or model, model.device, task)
    rows = [(prompt, _Text(min(most, model.most_after(prompt)), end, ends)) for prompt in prompts]
    longest = even_length_of(model.backbone.config) if answer is None else 0  # a row that may get longer is read alone
    while unfinished := [row for row in rows if not row[1].ended]:
        even = [(prompt, text) for prompt, text in unfinished if len(prompt) + len(text.ids) + text.room <= longest]
        for batch, length in _alike(model, even, most):
            _write_on(model, batch, length, alone, end)
        if not even:
            for prompt, text in unfinished:
                text.add(alone(prompt, text.ids))
    return [text.ids for _, text in rows]


def _alike(
    model: TaskModel, rows: Sequence[tuple[Sequence[int], _Text]], most: int
) -> Iterator[tuple[list[tuple[Sequence[int], _Text]], int]]:
    """Return the batches of rows, each with the length to which prompts are padded; 0 for the length of the longest."""
    if not _has_fixed_shapes(model):
        yield from [([*rows], 0)] if rows else []
        return
    positions, experts = positions_of(model.backbone), has_experts(model.backbone.config)

    def length_of(row: tuple[Sequence[int], _Text]) -> int:
        """Return the length to which a prompt is padded; 0 if the model has too few positions for it, or experts."""
        prompt, text = row
        length = padded_length(len(prompt))
        fits = length + (0 if model.writes_apart else most) <= positions
        return length if fits and text.room == most and not experts else 0

    for length, group in groupby(sorted(rows, key=length_of), length_of):
        alike, size = list(group), rows_at_once(model, length) if length else 1
        yield from ((alike[start : start + size], length) for start in range(0, len(alike), size))


def _alone(read: Answer, device: torch.device, task: int, prompt: Sequence[int], text: Sequence[int]) -> int:
    """Return the next token of one row, which is read alone."""
    ids = [*prompt[:-1], ~prompt[-1], *(~token for token in text)]
    labels = torch.full((len(text) + 1,), task, device="cpu")
    return int(read(torch.tensor([ids], device=device), labels)[-1].argmax())


def _write_on(
    model: TaskModel,
    rows: Sequence[tuple[Sequence[int], _Text]],
    length: int,
    alone: Callable[[Sequence[int], Sequence[int]], int],
    end: int,
) -> None:
    """Continue texts in one batch until each is complete, or the longest row is at the model's last position."""
    backbone: Any = model.backbone
    given = [(prompt, text.ids) for prompt, text in rows]
    if length:
        given += given[:1] * (rows_at_once(model, length) - len(rows))
    share = 0.0 if _has_fixed_shapes(model) else _DOUBTFUL

    def decide(_: Tensor, logits: Tensor) -> Tensor:
        """Return logits that allow one token for each row."""
        tokens = []
        for i, (token, doubtful) in enumerate(_likeliest(logits, share)):
            if i < len(rows) and not rows[i][1].ended:
                prompt, text = rows[i]
                token = alone(prompt, text.ids) if doubtful else token
                text.add(token)
            tokens.append(token)
        chosen = torch.tensor(tokens, device=logits.device)
        return torch.full_like(logits, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def ended(ids: Tensor, _: Any) -> Tensor:
        copies = [True] * (len(given) - len(rows))
        return torch.tensor([text.ended for _, text in rows] + copies, device=ids.device)

    with autocast(model.precision, model.device.type):
        backbone.generate(
            **model.to_continue(given, length or None),
            max_new_tokens=min(
                max(text.room for _, text in rows),
                min(model.most_after(prompt) - len(text.ids) for prompt, text in rows),
            ),
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=end,
            pad_token_id=model.tokens.pad,
            logits_processor=[decide],
            stopping_criteria=[ended],
        )


def _likeliest(logits: Tensor, share: float) -> list[tuple[int, bool]]:
    """Return the likeliest token of each row ``(B, V)``, and whether another logit is within ``share`` of its own."""
    if not share:
        return [(token, False) for token in logits.argmax(-1).tolist()]
    largest, tokens = logits.float().topk(2, dim=-1)
    doubtful = largest[:, 0] - largest[:, 1] <= share * largest[:, 0].abs().clamp(min=1)
    return list(zip(tokens[:, 0].tolist(), doubtful.tolist(), strict=True))


# -- Allowed answers -------------------------------------------------------------------------------------


#: The number of answers in one forward pass.
_TOGETHER = 64


@torch.no_grad()
def log_probabilities(model: TaskModel, rows: EncodedTexts, passes: Passes) -> Tensor:
    """Return the log-probability of each allowed answer after each prompt, in nats ``(rows, answers)``, float32.

    It is that of the whole text: the sum over its tokens and the token that ends it, not divided by their number.

    Args:
        model: the model.
        rows: the rows, with the allowed answers.
        passes: the options of the forward passes; the answers to one row are read together.
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
    """Return the log-probabilities of some answers after one prompt, from one forward pass."""
    marked = [[*prompt[:-1], *(~token for token in (prompt[-1], *ids))] for ids in answers]
    longest = max(map(len, marked))
    x = torch.tensor([[*ids, *[model.tokens.pad] * (longest - len(ids))] for ids in marked], device=model.device)
    learned = torch.tensor([token for ids in answers for token in (*ids, rows.end)], device=model.device)
    logits = read(x, torch.full_like(learned, rows.task))
    each = logits.float().log_softmax(-1).gather(1, learned[:, None]).squeeze(1)
    return torch.stack([part.sum() for part in torch.split(each, [len(ids) + 1 for ids in answers])]).cpu()
