"""A model's tokenizer must exist, fit, and have a token to fill rows with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch

from forgetfree.data.rows import Rows
from forgetfree.errors import ModelError
from forgetfree.models.loading import load_model
from forgetfree.tasks import TaskDefinition

ModelDirectory = Callable[[str], Path]
TASK = TaskDefinition("own", "single", ("negative", "positive"))


@pytest.fixture
def copy(model_directory: ModelDirectory, tmp_path: Path) -> ModelDirectory:
    """A model directory that a test may change."""
    return lambda kind: Path(shutil.copytree(model_directory(kind), tmp_path / kind))


def message(directory: Path) -> str:
    """The one paragraph that loading ends with."""
    with pytest.raises(ModelError) as caught:
        load_model(str(directory))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["bert-mlm", "gpt2-lm"])
def test_a_model_without_its_tokenizer_is_refused(copy: ModelDirectory, kind: str) -> None:
    directory = copy(kind)
    for path in directory.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    assert "has no tokenizer" in message(directory)


def test_a_tokenizer_of_another_model_is_refused(copy: ModelDirectory, model_directory: ModelDirectory) -> None:
    directory = copy("bert")
    for path in model_directory("roberta").iterdir():
        if "token" in path.name or "vocab" in path.name:
            shutil.copy(path, directory)
    assert ", and the model has embeddings for" in message(directory)


def test_a_token_id_without_an_embedding_is_refused(copy: ModelDirectory) -> None:
    """This holds even if unused ids leave no more tokens than embeddings."""
    directory = copy("bert")
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    rows = len(vocabulary)
    vocabulary["film"] = rows + 7
    file.write_text(json.dumps(content))
    assert (
        f"The tokenizer of model '{directory}' has ids up to {rows + 7}, and the model has embeddings for {rows}. Put back"
    ) in message(directory)


def test_rows_are_filled_with_a_token_that_no_row_ends_with(copy: ModelDirectory) -> None:
    """The end of a row is where this token begins."""
    for kind, changes, expected in (
        ("bert", {}, "[PAD]"),
        ("bert", {"pad_token": "[SEP]"}, "[UNK]"),  # [SEP] ends every row
        ("bert", {"pad_token": "[UNK]"}, "[UNK]"),  # it may end a text, but not a row
        ("gpt2-lm", {"pad_token": "!", "unk_token": "!"}, "<|endoftext|>"),  # it may end a text, and ends a row
        ("gpt2-lm", {}, "<|endoftext|>"),  # GPT-2's only special token, which no text produces
    ):
        tokenizer = tiny.build(kind)[1]
        for name, token in changes.items():
            setattr(tokenizer, name, token)
        directory = copy(kind)
        tokenizer.save_pretrained(directory)
        loaded = load_model(str(directory), "linear")
        assert loaded.tokenizer.convert_ids_to_tokens(loaded.pad) == expected
        rows = loaded.encoder(TASK)(Rows(("a film 東", "a very dull film"), (), (0, 1)))
        x = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for ids in rows], batch_first=True, padding_value=float(loaded.pad)
        )
        assert loaded.model.tokens.attention_mask(x).sum(1).tolist() == [len(ids) for ids in rows]
        shutil.rmtree(directory)


def test_a_tokenizer_without_a_token_to_fill_rows_with_is_refused(copy: ModelDirectory) -> None:
    directory = copy("gpt2")
    tokenizer = tiny.byte_level(causal=True)
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.unk_token = None
    tokenizer.save_pretrained(directory)
    assert "has no token to fill short rows with: expected a special token that no row ends with" in message(directory)
