"""Generated texts and chosen closed answers are the same for any batch, order and padding."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from forgetfree.core.families import positions_of
from forgetfree.core.readout_model import evaluating
from forgetfree.data.prompts import EncodedTexts, PromptEncoder
from forgetfree.data.rows import Rows
from forgetfree.errors import ModelError
from forgetfree.kinds import decoding
from forgetfree.kinds.decoding import Passes, log_probabilities, padded_length, write, write_greedily
from forgetfree.kinds.generation import text_of
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.task_model import TaskModel
from forgetfree.models.token_inputs import TokenLayout
from forgetfree.tasks import TaskDefinition

#: Causal language models, and encoder-decoders.
WRITERS = [name for name, each in families.FAMILIES.items() if each.readout == "causal" or "Seq2Seq" in each.head]
MOST = 8


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """Return a function that loads a family's model with one task: ``loaded("Llama")``."""
    made: dict[str, LoadedModel] = {}

    def load(family: str) -> LoadedModel:
        if family not in made:
            made[family] = load_model(str(families.write(family, tmp_path_factory.mktemp(family))), "generate")
            made[family].add_task(task())
        return made[family]

    return load


def task(**fields: Any) -> TaskDefinition:
    return TaskDefinition("own", "generation", (), metric="exact_match", **({"max_new_tokens": MOST} | fields))


def prompts(loaded: LoadedModel, count: int = 6) -> list[list[int]]:
    """Return prompts of one to nine tokens, none of them special."""
    draw = random.Random(0)
    ids = [i for i in range(len(loaded.tokenizer)) if i not in loaded.tokenizer.all_special_ids]
    return [[draw.choice(ids) for _ in range(draw.choice([1, 2, 5, 9]))] for _ in range(count)]


def end_of(loaded: LoadedModel) -> int:
    return int(loaded.tokenizer.eos_token_id)


@torch.no_grad()
def logits_after(loaded: LoadedModel, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Return one row's logits after the prompt and after each token, by transformers alone, without cache and padding."""
    backbone: Any = loaded.model.backbone.eval()
    if loaded.writes_apart:
        begun = torch.tensor([[backbone.config.decoder_start_token_id, *text]])
        logits: torch.Tensor = backbone(input_ids=torch.tensor([prompt]), decoder_input_ids=begun).logits[0]
        return logits
    logits = backbone(input_ids=torch.tensor([[*prompt, *text]])).logits[0]
    return logits[len(prompt) - 1 :]


def slow(loaded: LoadedModel, prompt: Sequence[int], most: int = MOST) -> list[int]:
    """Generate a text token by token, as a reference."""
    text: list[int] = []
    while len(text) < most:
        token = int(logits_after(loaded, prompt, text)[-1].argmax())
        if token == end_of(loaded):
            break
        text.append(token)
    return text


def written(loaded: LoadedModel, rows: Sequence[Sequence[int]], **changes: Any) -> list[list[int]]:
    loaded.model.eval()
    how: dict[str, Any] = {"task": 0, "most": MOST, "ends": lambda ids: False, "end": end_of(loaded)}
    return write_greedily(loaded.model, rows, **(how | changes))


@pytest.mark.sampled("GPT2", "Llama", "Bart", "T5", share=0.15)
@pytest.mark.parametrize("family", WRITERS)
@torch.no_grad()
def test_a_batch_writes_what_each_row_gets_alone(family: str, loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded(family)
    rows = prompts(model)
    model.model.eval()
    expected = [slow(model, row) for row in rows]
    assert written(model, rows) == expected
    assert written(model, rows[::-1]) == expected[::-1]
    assert [written(model, [row])[0] for row in rows] == expected
    assert written(model, rows, answer=model.model) == expected


@torch.no_grad()
def test_a_long_row_changes_no_positions_of_another(tmp_path: Path) -> None:
    """LongRoPE changes its factors for a whole batch if the longest row, with its text, exceeds 12 tokens (here)."""
    directory = families.write("Phi3", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    pairs = tiny.HIDDEN // tiny.HEADS // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [9.0] * pairs}
    config["original_max_position_embeddings"] = 12
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
    (directory / "config.json").write_text(json.dumps(config))
    model = load_model(str(directory), "generate")
    model.add_task(task())
    rows = [*prompts(model, 3), list(range(20, 29)), list(range(20, 34))]
    model.model.eval()
    expected = [slow(model, row) for row in rows]
    assert [written(model, [row])[0] for row in rows] == written(model, rows) == expected
    assert written(model, rows, answer=model.model) == expected


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("family", ["GPT2", "Bart"])
@torch.no_grad()
def test_of_two_tokens_that_nearly_agree_the_row_alone_decides(
    family: str, every: int, loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token, or one in three, is reported as doubtful, and the batch proposes a wrong token for it."""
    model = loaded(family)
    rows = prompts(model)
    expected = [slow(model, row) for row in rows]
    likeliest, calls = decoding._likeliest, list[int]()

    def wrong(logits: torch.Tensor, share: float) -> list[tuple[int, bool]]:
        calls.append(len(logits))
        right = likeliest(logits, share)
        return [(7, True) if (len(calls) + i) % every == 0 else each for i, each in enumerate(right)]

    monkeypatch.setattr(decoding, "_likeliest", wrong)
    assert written(model, rows) == expected
    assert max(calls) == len(rows)


@pytest.mark.parametrize("family", ["GPT2", "Llama", "T5"])
@torch.no_grad()
def test_rounding_between_batches_is_far_below_what_is_doubted(
    family: str, loaded: Callable[[str], LoadedModel]
) -> None:
    """A row's logits in a padded batch and alone differ by less than a hundredth of the threshold for doubt."""
    model = loaded(family)
    rows = prompts(model)
    model.model.eval()
    backbone: Any = model.model.backbone

    def logits_of(batch: Sequence[Sequence[int]]) -> torch.Tensor:
        begun = model.model.to_continue([(row, [5, 6]) for row in batch])
        how = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
        logits: torch.Tensor = backbone.generate(**begun, **how).logits[0]
        return logits

    for row, logits in zip(rows, logits_of(rows), strict=True):
        (alone,) = logits_of([row])
        assert float((alone - logits).abs().max()) < 1e-2 * decoding._DOUBTFUL * max(1.0, float(alone.abs().max()))


def model_of(family: str, dtype: torch.dtype) -> TaskModel:
    """Return a model with random weights, wide enough that kernels work in blocks and sum in their own order."""
    ids: dict[str, Any] = {"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 288, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 768}
    made: Any = {
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(**ids, **sizes, num_key_value_heads=2)),
        "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**ids, **sizes, num_key_value_heads=2)),
        "GPT2": lambda: GPT2LMHeadModel(GPT2Config(**ids, n_embd=288, n_layer=3, n_head=6)),
        "T5": lambda: T5ForConditionalGeneration(
            T5Config(**ids, d_model=288, d_kv=48, d_ff=768, num_layers=3, num_heads=6, decoder_start_token_id=0)
        ),
    }
    torch.manual_seed(0)
    backbone = made[family]().to(dtype).eval()
    backbone.generation_config.eos_token_id = None
    model = TaskModel(backbone, TokenLayout(0), "generate")
    model.add_task("own", 2048)
    return model


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2", "T5"])
@torch.no_grad()
def test_a_text_has_the_same_bits_alone_among_others_and_at_another_place(
    family: str, precision: str, threads: int
) -> None:
    """In half precision, all logits are the same, too; in float32, products split over two threads depend on a row's place."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _compare(family, precision)
    finally:
        torch.set_num_threads(before)


def _compare(family: str, precision: str) -> None:
    model = model_of(family, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    draw = random.Random(0)
    row = draw.choices(range(3, 2048), k=40)

    def logits(prompts: list[list[int]]) -> tuple[torch.Tensor, list[int], int]:
        place, passes = prompts.index(row), list[torch.Tensor]()
        hook = model.backbone.register_forward_hook(lambda m, args, out: passes.append(out.logits[:, -1]))
        with evaluating(model, "bf16" if precision == "autocast" else "fp32"):
            text = write_greedily(model, prompts, task=0, most=12, ends=lambda ids: False, end=-1)[place]
        hook.remove()
        half = precision != "float32"
        return torch.stack([each[place] for each in passes]) if half else torch.empty(0), text, len(passes)

    def others(count: int) -> list[list[int]]:
        return [draw.choices(range(3, 2048), k=draw.randint(33, 47)) for _ in range(count)]

    alone, text, passes = logits([row])
    assert passes == len(text) == 12 or precision == "float32"
    for before in (0, 3, 7):
        found, again, _ = logits([*others(before), row, *others(7 - before)])
        assert torch.equal(found, alone)
        assert again == text


@pytest.mark.parametrize("family", ["GPT2", "GPTNeo", "Mpt", "Bart", "OPT"])
@torch.no_grad()
def test_prompts_are_padded_within_the_positions_of_a_model(family: str, loaded: Callable[[str], LoadedModel]) -> None:
    """Some families count padding as positions; a row too long to be padded is generated alone."""
    model = loaded(family)
    most = positions_of(model.model.backbone)
    ids = [token for row in prompts(model, 40) for token in row]
    rows = [ids[:length] for length in (5, most - MOST - 3, most - 2, most)]
    half = copy.deepcopy(model.model)
    half.backbone.to(torch.bfloat16)
    how: dict[str, Any] = {"task": 0, "most": MOST, "ends": lambda ids: False, "end": -1}
    texts = write_greedily(half, rows, **how)
    assert [len(text) for text in texts] == [min(MOST, half.most_after(row)) for row in rows]
    assert [write_greedily(half, [row], **how)[0] for row in rows] == texts


def test_prompts_are_padded_to_a_few_lengths() -> None:
    assert [padded_length(length) for length in (1, 31, 32, 63, 64, 200)] == [32, 32, 64, 64, 128, 256]


@torch.no_grad()
def test_a_decoder_apart_has_positions_of_its_own(loaded: Callable[[str], LoadedModel]) -> None:
    """Texts end at the decoder's last position, regardless of the prompt's length."""
    model = loaded("Bart")
    row = prompts(model)[1]
    assert written(model, [row], most=1000)[0] == slow(model, row, tiny.POSITIONS - 1)


@torch.no_grad()
def test_a_text_ends_where_the_model_has_no_more_positions(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("GPT2")
    row = (prompts(model)[0] * tiny.POSITIONS)[: tiny.POSITIONS - 3]
    text = written(model, [row], most=20)[0]
    assert text == slow(model, row, 3)
    assert written(model, [row, [5]], most=20)[0] == text


@torch.no_grad()
def test_a_text_ends_at_a_stop_string_and_at_its_longest(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("GPT2")
    row = prompts(model)[1]
    whole = slow(model, row)
    assert len(whole) == MOST
    stop = model.tokenizer.decode(whole[:3])
    rows = EncodedTexts.of([[*row[:-1], ~row[-1]]], [[0]], 0, model.pad)
    rows = type(rows)(**(vars(rows) | {"right": [["x"]], "tokenizer": model.tokenizer}))
    ended = write(task(stop=(stop,)), model.model, rows, Passes(batch_size=4, precision="fp32"))[0]
    assert stop in model.tokenizer.decode(ended)
    assert ended == whole[: len(ended)]
    assert len(ended) <= 3
    assert write(task(max_new_tokens=2), model.model, rows, Passes(batch_size=4, precision="fp32")) == [whole[:2]]


@torch.no_grad()
def test_a_text_ends_at_a_special_token_that_is_a_stop_text(loaded: Callable[[str], LoadedModel]) -> None:
    """The stop token is left out when ids are decoded."""
    model = loaded("Llama")
    tokenizer = model.tokenizer
    special = tokenizer.all_special_tokens[0]
    plain = tokenizer("great", add_special_tokens=False)["input_ids"]
    ids = [*plain, tokenizer.convert_tokens_to_ids(special), *plain]
    assert not decoding.stops(tokenizer, plain, (special,))
    assert decoding.stops(tokenizer, ids, (special,))
    assert text_of(tokenizer, ids, (special,)) == text_of(tokenizer, plain)
    assert text_of(tokenizer, ids) != text_of(tokenizer, plain)


def test_a_decoder_that_begins_with_nothing_is_refused(tmp_path: Path) -> None:
    directory = families.write("T5", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["decoder_start_token_id"] = None
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="does not say which token its decoder begins with"):
        load_model(str(directory), "generate")


def test_temperature_and_penalties_of_a_model_do_not_count(tmp_path: Path) -> None:
    """A model's generation_config may sample or forbid repetitions; decoding stays greedy."""
    directory = families.write("GPT2", tmp_path)
    plain = load_model(str(directory), "generate")
    (directory / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 5.0, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "eos_token_id": 3}'
    )
    other = load_model(str(directory), "generate")
    for each in (plain, other):
        each.add_task(task())
    assert written(plain, prompts(plain)) == written(other, prompts(other))


# -- Closed answers -----------------------------------------------------------------------------------------

PROMPTS = [[5], [6, 7, 8, 9, 10], [11, 12], [5, 9, 13, 17]]
ALLOWED = [[5], [6, 7], [6, 7, 8], [9, 10, 11, 12]]


def found(loaded: LoadedModel, prompts: Sequence[Sequence[int]], batch_size: int = 64) -> torch.Tensor:
    rows = EncodedTexts.of([[*row[:-1], ~row[-1]] for row in prompts], [[0]] * len(prompts), 0, loaded.pad)
    rows = replace(rows, tokenizer=loaded.tokenizer, end=end_of(loaded), allowed=ALLOWED)
    model: Any = loaded.model
    return log_probabilities(model, rows, Passes(batch_size=batch_size, precision="fp32"))


@pytest.mark.parametrize("family", ["Llama", "GPT2", "T5", "Bart"])
def test_it_is_the_sum_over_the_tokens_and_depends_on_the_row_alone(
    family: str, loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probability of a closed answer includes the token that ends a text."""
    model = loaded(family)
    whole = found(model, PROMPTS)
    for prompt, row in zip(PROMPTS, whole, strict=True):
        for answer, got in zip(ALLOWED, row, strict=True):
            ids = [*answer, end_of(model)]
            expected = logits_after(model, prompt, answer).log_softmax(-1)[range(len(ids)), ids].sum()
            assert torch.allclose(got, expected, atol=1e-4)
    assert torch.equal(found(model, PROMPTS[::-1], 2).flip(0), whole)
    assert torch.equal(torch.cat([found(model, [prompt]) for prompt in PROMPTS]), whole)
    monkeypatch.setattr(decoding, "_TOGETHER", 3)
    assert torch.allclose(found(model, PROMPTS), whole, atol=1e-5)


def test_a_prompt_leaves_room_for_the_longest_answer(loaded: Callable[[str], LoadedModel]) -> None:
    """The room does not depend on the row's right answer or on ``max_new_tokens``."""
    tokenizer = loaded("Llama").tokenizer
    closed = task(closed_answers=("great", "great great great great film"), max_new_tokens=1)
    encoder = PromptEncoder(tokenizer, closed, 16)
    rows = Rows(("film " * 30,) * 2, (), (("great",), ("great great great great film",)))
    lengths = [sum(token >= 0 for token in ids) + 1 for ids in encoder(rows)]
    assert lengths == [16 - max(map(len, encoder.allowed))] * 2
    with pytest.raises(ModelError, match="no tokens are left for a prompt and its answer"):
        PromptEncoder(tokenizer, replace(closed, closed_answers=("great", "great " * 20 + "film")), 16)
    with pytest.raises(ModelError, match=r"Two closed_answers of task .* have the same tokens"):
        PromptEncoder(loaded("T5").tokenizer, replace(closed, closed_answers=("漢", "字")), 16, closed=True)
