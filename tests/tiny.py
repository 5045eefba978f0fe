"""Tiny pre-trained models and data on disk: built from a config and a seed, never downloaded.

Every model directory has Hugging Face layout, so that it loads by `forgetfree.models.loading.load_model`
as a model from the hub would. The tasks can be learned by keyword.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizerFast,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 16, 2, 2, 32, 48
#: Larger than the usual 0.02, so that so narrow a model tells its inputs apart.
SPREAD = 0.2

_FILLER = [
    "a",
    "the",
    "it",
    "was",
    "is",
    "this",
    "that",
    "film",
    "story",
    "very",
    "and",
    "of",
    "in",
    "on",
    "to",
    "with",
    "by",
    "for",
    "who",
    "what",
    "when",
    "film",
]
#: Label words and keywords of each task, by label.
_LABEL_WORDS = ["terrible", "great", "Yes", "No", "World", "Sports", "Business", "Tech", "Topic", "Answer"]
KEYWORDS: dict[str, list[list[str]]] = {
    "qnli": [["river", "city"], ["moon", "paper"]],
    "ag_news": [["war", "treaty"], ["goal", "match"], ["bank", "shares"], ["chip", "software"]],
    "sst2": [["awful", "dull"], ["lovely", "bright"]],
}
STREAM = "qnli,ag_news,sst2"
LABELS = {
    "qnli": ["entailment", "not_entailment"],
    "ag_news": ["World", "Sports", "Business", "Sci/Tech"],
    "sst2": ["negative", "positive"],
}
_PUNCTUATION = [".", ",", "?", ":"]


def words() -> list[str]:
    """Every word that the tasks and their prompts use, once."""
    keywords = [word for by_label in KEYWORDS.values() for group in by_label for word in group]
    plain = [*_FILLER, *keywords, *_LABEL_WORDS]
    return list(dict.fromkeys([*plain, *(word.lower() for word in plain), "It", "This"]))


# -- Tokenizers ------------------------------------------------------------------------------------------


def wordpiece() -> BertTokenizerFast:
    """BERT's tokenizer, lower-casing, with one piece a word."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_PUNCTUATION, *words()]
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = dict.fromkeys([*(p.lower() if p[0] != "[" else p for p in pieces), *letters])
    vocabulary |= dict.fromkeys(f"##{letter}" for letter in letters)
    return BertTokenizerFast(vocab={piece: i for i, piece in enumerate(vocabulary)}, do_lower_case=True)


def byte_level(*, causal: bool) -> PreTrainedTokenizerFast:
    """The byte-level BPE of RoBERTa, or GPT-2's if ``causal``: every word is one token after a space."""
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


# -- Models ----------------------------------------------------------------------------------------------


def bert_config(vocabulary: int, **changes: Any) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=POSITIONS,
        initializer_range=SPREAD,
        **changes,
    )


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


def gpt2_config(vocabulary: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=INNER,
        n_positions=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=SPREAD,
    )


def build(kind: str) -> tuple[torch.nn.Module, Any]:
    """The model and the tokenizer of one of `KINDS`, the same at every call."""
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = KINDS[kind](config)
        with torch.no_grad():  # biases and LayerNorms, which start at 0 and 1, get values of their own
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.01)
    return model.eval(), tokenizer


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
    """One of `KINDS` as a directory in Hugging Face layout."""
    model, tokenizer = build(kind)
    model.save_pretrained(directory)  # type: ignore[operator]
    tokenizer.save_pretrained(directory)
    return directory


# -- Data ------------------------------------------------------------------------------------------------


def _row(task: str, label: int, draw: random.Random) -> dict[str, Any]:
    def text(keyword: str) -> str:
        body = [draw.choice(_FILLER) for _ in range(draw.randint(2, 9))]
        body.insert(draw.randrange(len(body) + 1), keyword)
        return " ".join(body)

    keyword = draw.choice(KEYWORDS[task][label])
    if task == "qnli":
        return {"text_a": text("who") + " ?", "text_b": text(keyword) + " .", "label": label}
    return {"text": text(keyword) + " .", "label": label}


def write_data(directory: Path, *, train: int = 24, validation: int = 12, test: int = 16) -> Path:
    """Three tasks as a data directory: `STREAM`, of ``train``, ``validation`` and ``test`` rows each."""
    for task, labels in LABELS.items():
        folder = directory / task
        folder.mkdir(parents=True)
        draw = random.Random(task)
        for split, count in (("train", train), ("validation", validation), ("test", test)):
            rows = [_row(task, i % len(labels), draw) for i in range(count)]
            draw.shuffle(rows)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        (folder / "source.json").write_text(json.dumps({"label_names": labels}), encoding="utf-8")
    return directory
