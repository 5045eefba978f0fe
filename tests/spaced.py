"""Tokenizers that write spaces as ▁: in all ways there are, and of the families that have them."""

from __future__ import annotations

from typing import Any

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
