"""Tiny pre-trained models and data on disk: built from a config and a seed, never downloaded.

Every model directory has Hugging Face layout, so that `forgetfree.models.loading.load_model` loads it
like a model from the hub. The tasks can be learned by keyword.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertForMaskedLM,
    BertModel,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)

from forgetfree.tasks import TaskDefinition
from forgetfree.testing.tiny import (
    HEADS,
    HIDDEN,
    INNER,
    LABELS,
    LAYERS,
    POSITIONS,
    SIZES,
    SPREAD,
    bert_config,
    gpt2_config,
    pre_trained,
    tiny_rows,
    wordpiece,
    words,
)

STREAM = "qnli,ag_news,sst2"
#: A task with label words that every tiny tokenizer knows.
TASK = TaskDefinition(
    "own",
    "single",
    ("negative", "positive"),
    template="{text} It was {mask}.",
    label_words=("terrible", "great"),
    causal_template="{text} It was",
)


# -- Tokenizers ------------------------------------------------------------------------------------------


def byte_level(*, causal: bool) -> PreTrainedTokenizerFast:
    """Return the byte-level BPE of RoBERTa, or GPT-2's if ``causal``: every word after a space is one token."""
    special = ["<|endoftext|>"] if causal else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        min_frequency=1,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([f"x {word}" for word in words()] * 3, trainer)
    if causal:
        end = "<|endoftext|>"
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    names = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names.items()}
    )


#: Special tokens of SentencePiece tokenizers, as T5, ALBERT, XLNet, Llama and Gemma name them.
_SPECIAL = ["<pad>", "</s>", "<unk>", "<mask>", "<s>", "<cls>", "<sep>", "[CLS]", "[SEP]", "[MASK]", "<bos>", "<eos>"]


def unigrams() -> list[tuple[str, float]]:
    """Return a vocabulary with ▁ for spaces, like those of T5 and XLM-R: every word after a space is one token."""
    letters = dict.fromkeys("▁.?:," + "".join(words()))
    scores = {**dict.fromkeys(letters, -6.0), **{f"▁{word}": -2.0 for word in words()}}
    return [(token, 0.0) for token in _SPECIAL] + list(scores.items())


def merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the same words in the form of Llama and Gemma: ids by token, and the pairs to merge."""
    letters = dict.fromkeys("▁.?:," + "".join(words()))
    pairs = dict.fromkeys((f"▁{word[:i]}", word[i]) for word in words() for i in range(len(word)))
    tokens = dict.fromkeys([*_SPECIAL, *letters, *("".join(pair) for pair in pairs)])
    return {token: i for i, token in enumerate(tokens)}, list(pairs)


def metaspace(kind: str, scheme: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes spaces as ▁, and ends a text as T5's does.

    Args:
        kind: ``unigram`` or ``bpe``.
        scheme: when the tokenizer puts a ▁ before a text: ``always``, ``first`` (not after a special token), ``never``;
            or ``legacy``: always, also before a text that begins with a ▁.
    """
    vocabulary, pairs = merges()
    model: Any = models.BPE(vocabulary, pairs, unk_token="<unk>")
    if kind == "unigram":
        model = models.Unigram(unigrams(), unk_id=_SPECIAL.index("<unk>"))
    tokenizer = Tokenizer(model)
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind == "unigram")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


# -- Models ----------------------------------------------------------------------------------------------


def roberta_config(vocabulary: int) -> RobertaConfig:
    return RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=POSITIONS + 2,  # positions start after the padding index, 1
        type_vocab_size=1,
        initializer_range=SPREAD,
    )


def build(kind: str) -> tuple[torch.nn.Module, Any]:
    """Return the model and the tokenizer of one of `KINDS`, the same at every call."""
    family = kind.split("-")[0]
    if family == "bert":
        tokenizer: Any = wordpiece()
        config: Any = bert_config(len(tokenizer))
    elif family == "roberta":
        tokenizer = byte_level(causal=False)
        config = roberta_config(len(tokenizer))
    else:
        tokenizer = byte_level(causal=True)
        config = gpt2_config(len(tokenizer))
    return pre_trained(lambda: KINDS[kind](config)), tokenizer


KINDS: dict[str, Any] = {
    "bert": lambda config: BertModel(config, add_pooling_layer=False),
    "bert-pooler": BertModel,
    "bert-mlm": BertForMaskedLM,
    "roberta": lambda config: RobertaModel(config, add_pooling_layer=False),
    "roberta-mlm": RobertaForMaskedLM,
    "gpt2": GPT2Model,
    "gpt2-lm": GPT2LMHeadModel,
}


def write_model(kind: str, directory: Path) -> Path:
    """Write one of `KINDS` as a directory in Hugging Face layout."""
    model, tokenizer = build(kind)
    model.save_pretrained(directory)  # type: ignore[operator]
    tokenizer.save_pretrained(directory)
    return directory


# -- Arguments -------------------------------------------------------------------------------------------


def last_of_each(words: list[str], *flags: str) -> list[str]:
    """Return arguments with only the last value of each of ``flags`` and of each key of ``--set``: each may be given once."""
    kept: dict[str, tuple[int, int]] = {}
    for i, word in enumerate(words):
        if word in (*flags, "--set"):
            kept[words[i + 1].partition("=")[0] if word == "--set" else word] = (i, i + 1)
    held = {i for pair in kept.values() for i in pair}
    asked = {i for i, word in enumerate(words) if word in (*flags, "--set")}
    return [word for i, word in enumerate(words) if i in held or (i not in asked and i - 1 not in asked)]


# -- Data ------------------------------------------------------------------------------------------------


def write_data(
    directory: Path,
    *,
    train: int = SIZES["train"],
    validation: int = SIZES["validation"],
    test: int = SIZES["test"],
) -> Path:
    """Write the three tasks of `STREAM` as a data directory, with this number of rows in each split."""
    for task, labels in LABELS.items():
        folder = directory / task
        folder.mkdir(parents=True)
        for split, rows in tiny_rows(task, train=train, validation=validation, test=test).items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        (folder / "source.json").write_text(json.dumps({"label_names": labels}), encoding="utf-8")
    return directory
