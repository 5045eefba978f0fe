"""Texts that a language model writes, and which of the allowed ones it finds likely: the same for any batch, order and padding.

Kernels add up in an order that depends on the shapes, so logits of a row that is read in a batch of another shape differ in
their last bits, and where the two largest nearly agree, the other may win. Two ways keep a text from that:

- **Fixed shapes**, in half precision and on a GPU. Prompts are padded to one of a few lengths, and each length has its number
  of rows, which copies fill. Then neither the rows beside it nor its place among them changes a bit of a row's logits.
- **Float32 on a CPU**, where several threads share a product, and bits depend on a row's place, too. A batch decides only where
  the two are clearly apart. Else the row is read alone, without padding and without a cache, and that decides.

Where rows are not read independently of each other, each is read alone: by experts, which compute the rows that chose them
together, and by the factors of LongRoPE.
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

#: From marked ids and task labels to logits: what answers in the model's place.
Answer = Callable[[Tensor, Any], Tensor]
#: From prompts and a batch size to the numbers of those that are answered together, each time with what answers them, if it is
#: not the model; the model may be another each time.
Turns = Callable[[Sequence[Sequence[int]], int], Iterable[tuple[Sequence[int], Answer | None]]]
#: How far float32 logits of one row may differ between batches, as a share of the largest: far more than is measured.
_DOUBTFUL = 1e-3
#: Rows and tokens, at most, of fixed shapes: a CPU would take long for the copies beside a single prompt.
_ON_CPU, _ELSEWHERE = (8, 512), (32, 2**14)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Options of the passes that answer rows.

    Attributes:
        batch_size: rows at once, at most; of texts in float32 on a CPU. Fixed shapes have their own.
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
        passes: how they are read.
        wrote: told after each batch, see `Wrote`.
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
    """Return the numbers of prompts that are given to `write_greedily` together; of fixed shapes, the size does not count."""
    if not _has_fixed_shapes(model):
        yield from by_length(lengths, size)
        return
    for length, group in groupby(
        sorted(range(len(lengths)), key=lengths.__getitem__), lambda i: padded_length(lengths[i])
    ):
        numbers, size = list(group), rows_at_once(model, length)
        yield from (numbers[start : start + size] for start in range(0, len(numbers), size))


def _has_fixed_shapes(model: TaskModel) -> bool:
    """Return whether the shapes of passes follow from a row alone."""
    backbone: Any = model.backbone
    return model.device.type != "cpu" or model.precision != "fp32" or backbone.dtype != torch.float32


def padded_length(length: int) -> int:
    """Return the length to which prompts of a length are padded: the next of 32, 64, 128, 256 and so on.

    It is longer than theirs: where no row of a batch has padding, another kernel reads them.
    """
    return max(32, 1 << length.bit_length())


def rows_at_once(model: TaskModel, length: int) -> int:
    """Return how many prompts a pass reads that are padded to a length."""
    rows, tokens = _ON_CPU if model.device.type == "cpu" else _ELSEWHERE
    return max(1, min(rows, tokens // length))


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
) -> list[list[int]]:
    """Return the ids that a model writes after each prompt, without the token that ends a text.

    Args:
        model: in evaluation mode.
        prompts: token ids.
        task: the label of the prompts' task.
        most: the most tokens of a text; fewer where the model has fewer positions.
        ends: whether a text is at its end, by its ids.
        end: the token that ends a text.
        answer: from marked ids and task labels to logits, what answers in the model's place, if anything.
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
    """Return rows in the batches in which they are read, and the length to which prompts are padded; 0: the longest's."""
    if not _has_fixed_shapes(model):
        yield from [([*rows], 0)] if rows else []
        return
    positions, experts = positions_of(model.backbone), has_experts(model.backbone.config)

    def length_of(row: tuple[Sequence[int], _Text]) -> int:
        """Return the length to which a prompt is padded; 0 where the model may not have positions for that and any text."""
        prompt, text = row
        length = padded_length(len(prompt))
        fits = length + (0 if model.writes_apart else most) <= positions
        return length if fits and text.room == most and not experts else 0

    for length, group in groupby(sorted(rows, key=length_of), length_of):
        alike, size = list(group), rows_at_once(model, length) if length else 1
        yield from ((alike[start : start + size], length) for start in range(0, len(alike), size))


def _alone(read: Answer, device: torch.device, task: int, prompt: Sequence[int], text: Sequence[int]) -> int:
    """Return the token that follows, by one row alone."""
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
    """Write texts on side by side, until each is at its end, or the longest row at the model's last position."""
    backbone: Any = model.backbone
    given = [(prompt, text.ids) for prompt, text in rows]
    if length:
        given += given[:1] * (rows_at_once(model, length) - len(rows))
    share = 0.0 if _has_fixed_shapes(model) else _DOUBTFUL

    def decide(_: Tensor, logits: Tensor) -> Tensor:
        """Return logits with one possible token for each row."""
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
    """Return the likeliest token of each row ``(B, V)``, and whether another is nearly as likely: within a share of it."""
    if not share:
        return [(token, False) for token in logits.argmax(-1).tolist()]
    largest, tokens = logits.float().topk(2, dim=-1)
    doubtful = largest[:, 0] - largest[:, 1] <= share * largest[:, 0].abs().clamp(min=1)
    return list(zip(tokens[:, 0].tolist(), doubtful.tolist(), strict=True))


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
