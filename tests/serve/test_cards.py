"""The python in a model card."""

from __future__ import annotations

import string
from typing import Any

import pytest
from spaced import EVERY

from forgetfree.data.encoding import Encoder
from forgetfree.data.rows import Rows
from forgetfree.serve.cards import encode_source


@pytest.mark.sampled(share=0.25)
@EVERY
@pytest.mark.parametrize(
    "template",
    [
        None,
        "{text_a:bare}? {mask}, {text_b:lower}",
        "{text_b} {mask}: {text_a:lower}",
        "{text_a:lower} and {text_b:bare}",
    ],
)
def test_its_source_encodes_as_it_does(tokenizer: Any, template: str | None) -> None:
    """Pairs of all lengths, empty ones, odd ends and special tokens; also where the second text comes first."""
    if template and tokenizer.mask_token_id is None:
        template = template.replace("{mask}", "")
    encoder = Encoder(tokenizer, template, max_length=19)
    namespace: dict[str, Any] = {"tokenizer": tokenizer, "string": string}
    exec(encode_source(encoder, pair=True), namespace)
    texts = [
        "",
        " ",
        "A film .",
        "was it Dull?!",
        "the film " * 12,
        "a river in the city",
        "[SEP] <mask>",
        "story",
        "film " * 8,
    ]
    pairs = [(a, b) for a in texts for b in texts]
    rows = Rows(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), (0,) * len(pairs))
    assert [namespace["encode"](*each) for each in pairs] == encoder(rows)


@EVERY
@pytest.mark.parametrize("template", [None, "It was {text:lower}", "{text:bare}"])
def test_its_source_encodes_single_texts_as_it_does(tokenizer: Any, template: str | None) -> None:
    encoder = Encoder(tokenizer, template, max_length=9)
    namespace: dict[str, Any] = {"tokenizer": tokenizer, "string": string}
    exec(encode_source(encoder, pair=False), namespace)
    texts = ["", "A film.", " was it Dull?! ", "the film " * 12, "</s> [MASK]"]
    assert [namespace["encode"](text) for text in texts] == encoder(Rows(tuple(texts), (), (0,) * len(texts)))
