"""Texts that a language model writes, the same for any batch, order and padding.

Sums in another order round otherwise, so logits of a row that is read beside others differ in their last bits, and where the
two largest nearly agree, the other may win. Hence a batch decides only where they are clearly apart; else the row is read
alone, without padding and without a cache, and that decides. So a text depends on its row and on nothing else. What is not
written greedily is written alone in any case: see `forgetfree.models.decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgetfree.core.readout_model import autocast
from forgetfree.data.prompts import EncodedTexts
from forgetfree.data.sampling import by_length
from forgetfree.errors import UsageError
from forgetfree.models.decoding import write_alone
from forgetfree.parallel.exchange import gathered, own_items
from forgetfree.tasks import TaskDefinition

if TYPE_CHECKING:
    from forgetfree.models.task_model import TaskModel

#: From marked ids and task labels to logits: what answers in the model's place.
Answer = Callable[[Tensor, Any], Tensor]
#: From prompts and a batch size to the numbers of those that are answered together, each time with what answers them, if it is
#: not the model; the model may be another each time.
Turns = Callable[[Sequence[Sequence[int]], int], Iterable[tuple[Sequence[int], Answer | None]]]
#: How far logits of one row may differ between batches, as a share of the largest: far more than is measured.
_FLOAT32, _HALF = 1e-3, 2**-4


def write(
    task: TaskDefinition,
    model: TaskModel,
    rows: EncodedTexts,
    *,
    batch_size: int,
    precision: str,
    answer: Answer | None = None,
    turns: Turns | None = None,
) -> list[list[int]]:
    """Return the token ids that a model writes after each prompt, in the rows' order; each process writes batches of its own.

    Args:
        task: whose rows; it says how long a text may be, and what ends it.
        model: the model.
        rows: the rows; what stands there after the prompts is not read.
        batch_size: rows at once, at most.
        precision: of forward passes.
        answer: what answers in the model's place, if anything.
        turns: which rows are answered together, where not all are answered alike.
    """
    prompts, before = rows.prompts, (model.training, model.precision)

    written: list[list[int]] = [[] for _ in prompts]
    model.eval()
    model.precision = precision
    try:
        for together, answering in turns(prompts, batch_size) if turns else [(range(len(prompts)), answer)]:
            # Of each batch the ids of all texts, how many each text has, and the number of each row.
            found = list[tuple[Tensor, Tensor, Tensor]]()
            for places in own_items(by_length([len(prompts[i]) for i in together], batch_size)):
                batch = [together[place] for place in places]
                asked: list[list[int]] = [prompts[i] for i in batch]
                how: dict[str, Any] = {
                    "most": task.max_new_tokens,
                    "ends": partial(stops, rows.tokenizer, stop=task.stop),
                    "end": rows.end,
                }
                if task.decoding.is_greedy:
                    texts = write_greedily(model, asked, task=rows.task, answer=answering, **how)
                elif answering is None:
                    texts = [write_alone(model, prompt, task.decoding, **how) for prompt in asked]
                else:
                    raise UsageError(
                        "The strategy answers by a function in the model's place, and by such texts are written greedily "
                        "alone. Leave num_beams and sampling_temperature out."
                    )
                ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
                found.append((ids, torch.tensor([len(text) for text in texts]), torch.tensor(batch)))
            for ids, lengths, numbers in gathered(found):
                for number, text in zip(numbers.tolist(), torch.split(ids, lengths.tolist()), strict=True):
                    written[number] = text.tolist()
    finally:
        model.train(before[0])
        model.precision = before[1]
    return written


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


def plain_generation(tokenizer: Any, pad: int, config: Any) -> Any:
    """Return transformers' configuration of what is written, without what a model's own says of temperature or repetition.

    Args:
        tokenizer: which token ends a text.
        pad: the id that fills short rows.
        config: the model's; of an encoder-decoder it says what its decoder begins with.
    """
    from transformers import GenerationConfig

    start = getattr(config, "decoder_start_token_id", None)
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
        decoder_start_token_id=start,
    )


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
    on_token: Callable[[int], object] = lambda count: None,
) -> list[list[int]]:
    """Return the ids that a model writes after each prompt, without the token that ends a text.

    Args:
        model: in evaluation mode.
        prompts: token ids, of one batch.
        task: the label of the prompts' task.
        most: the most tokens of a text; fewer where the model has fewer positions.
        ends: whether a text is at its end, by its ids.
        end: the token that ends a text.
        answer: from marked ids and task labels to logits, what answers in the model's place, if anything.
        on_token: hears of tokens as they are decided.
    """
    read = answer or model
    texts = [list[int]() for _ in prompts]
    limits = [min(most, model.most_after(prompt)) for prompt in prompts]
    unfinished = [i for i in range(len(prompts)) if limits[i] > 0]
    while unfinished:
        before = sum(map(len, texts))
        still = list[int]()
        for batch in _together(model, unfinished, texts):
            drafts: list[list[tuple[int, bool]]] = [[] for _ in batch]
            if answer is None:
                rows = [(prompts[i], texts[i]) for i in batch]
                wanted = max(limits[i] - len(texts[i]) for i in batch)
                room = min(model.most_after(prompt) - len(text) for prompt, text in rows)
                drafts = _drafts(model, rows, min(wanted, room), end)
            for i, draft in zip(batch, drafts, strict=True):
                alone = partial(_alone, read, model, prompts[i], task)
                if not _settle(texts[i], draft, limits[i], alone, ends, end):
                    still.append(i)
        on_token(sum(map(len, texts)) - before)
        unfinished = still
    return texts


def _together(model: TaskModel, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the rows that are drafted in one batch: all, or for a decoder apart those whose texts are equally long so far."""
    lengths = {i: len(texts[i]) if model.writes_apart else 0 for i in rows}
    return [[i for i in rows if lengths[i] == length] for length in sorted(set(lengths.values()))]


def _settle(
    text: list[int],
    draft: Sequence[tuple[int, bool]],
    limit: int,
    alone: Callable[[Sequence[int]], int],
    ends: Callable[[Sequence[int]], bool],
    end: int,
) -> bool:
    """Add the tokens of a draft to a text up to the first that turns out otherwise; return whether the text is at its end."""
    for token, doubtful in draft or [(-1, True)]:
        decided = alone(text) if doubtful else token
        if decided == end:
            return True
        text.append(decided)
        if len(text) == limit or ends(text):
            return True
        if decided != token:
            return False
    return False


def _alone(
    read: Callable[[Tensor, Any], Tensor], model: TaskModel, prompt: Sequence[int], task: int, text: Sequence[int]
) -> int:
    """Return the token that follows, by one row alone."""
    ids = [*prompt[:-1], ~prompt[-1], *(~token for token in text)]
    x = torch.tensor([ids], device=model.device)
    labels = torch.full((len(text) + 1,), task, device=model.device)
    return int(read(x, labels)[-1].argmax())


def _drafts(
    model: TaskModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], most: int, end: int
) -> list[list[tuple[int, bool]]]:
    """Return what a batch writes after prompts and the texts so far: each token, and whether another was nearly as likely."""
    backbone: Any = model.backbone
    steps = list[tuple[Tensor, Tensor]]()

    def note(_: Tensor, logits: Tensor) -> Tensor:
        largest, tokens = logits.float().topk(2, dim=-1)
        steps.append((largest, tokens))
        return logits

    with autocast(model.precision, model.device.type):
        backbone.generate(
            **model.to_continue(rows),
            max_new_tokens=most,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=end,
            pad_token_id=model.tokens.pad,
            logits_processor=[note],
        )
    largest = torch.stack([values for values, _ in steps], dim=1)  # (rows, new tokens, 2)
    tokens = torch.stack([best[:, 0] for _, best in steps], dim=1)
    share = _FLOAT32 if model.precision == "fp32" and backbone.dtype == torch.float32 else _HALF
    doubtful = largest[..., 0] - largest[..., 1] <= share * largest[..., 0].abs().clamp(min=1)
    drafts = []
    for of_row, doubts in zip(tokens.tolist(), doubtful.tolist(), strict=True):
        stop = of_row.index(end) + 1 if end in of_row else len(of_row)
        drafts.append(list(zip(of_row[:stop], doubts[:stop], strict=True)))
    return drafts
