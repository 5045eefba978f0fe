"""The tokenizers of the tests: those of tiny models, and some that write spaces as ▁, by scheme and by family."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import transformers

SPACED: dict[str, Any] = {
    f"{kind}-{scheme}": tiny.metaspace(kind, scheme)
    for kind in ("unigram", "bpe")
    for scheme in ("always", "first", "never", "legacy")
}
UNIGRAMS, (BPE, MERGES) = tiny.unigrams(), tiny.merges()
FAMILIES: dict[str, Any] = {
    "llama-legacy": transformers.LlamaTokenizer(vocab=BPE, merges=MERGES, legacy=True),
    "llama": transformers.LlamaTokenizer(vocab=BPE, merges=MERGES, legacy=False),
    "gemma": transformers.GemmaTokenizer(vocab=BPE, merges=MERGES),
    "t5": transformers.T5Tokenizer(vocab=UNIGRAMS),
    "xlm-roberta": transformers.XLMRobertaTokenizer(vocab=UNIGRAMS),
    "albert": transformers.AlbertTokenizer(vocab=UNIGRAMS, do_lower_case=False),
    "xlnet": transformers.XLNetTokenizer(vocab=UNIGRAMS),
}
BERT: Any = tiny.wordpiece()
ROBERTA: Any = tiny.byte_level(causal=False)
GPT2: Any = tiny.byte_level(causal=True)
ALL = pytest.mark.parametrize("tokenizer", [BERT, ROBERTA, GPT2], ids=["bert", "roberta", "gpt2"])
EVERY = pytest.mark.parametrize(
    "tokenizer",
    [BERT, ROBERTA, GPT2, *SPACED.values(), *FAMILIES.values()],
    ids=["bert", "roberta", "gpt2", *SPACED, *FAMILIES],
)
