"""Loading a model by a name or from a directory, and the error messages."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import model_files
import pytest
import torch
from model_files import change_config

from forgetfree import recipes
from forgetfree.data.rows import Rows
from forgetfree.errors import ModelError, UnknownNameError, UsageError
from forgetfree.models import loading, location
from forgetfree.models.loading import load_model
from forgetfree.tasks import TaskDefinition

ModelDirectory = Callable[[str], Path]

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(location.MINILM_PACKAGE) is None, reason="needs the extra forgetfree[minilm]"
)


def message(name: str | Path, readout: str = "auto", kind: type[Exception] = ModelError) -> str:
    return model_files.message(lambda: load_model(str(name), readout), kind)


# -- Readouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "readout"), [("bert", "linear"), ("bert-mlm", "prompt"), ("gpt2-lm", "causal")])
def test_the_readout_follows_from_what_the_model_has(model_directory: ModelDirectory, kind: str, readout: str) -> None:
    loaded = load_model(str(model_directory(kind)))
    assert loaded.readout == loaded.model.readout == readout
    assert loaded.model.task_names == []
    assert all(p.dtype == torch.float32 for p in loaded.model.parameters())


def test_the_dropout_is_that_of_the_models_own_classifier(copy: ModelDirectory) -> None:
    directory = copy("bert")
    change_config(directory, classifier_dropout=0.25)
    assert load_model(str(directory)).model.dropout == 0.25
    change_config(directory, classifier_dropout=None, hidden_dropout_prob=0.0)
    assert load_model(str(directory)).model.dropout == 0.0


# -- Faults ----------------------------------------------------------------------------------------------


def test_an_unknown_readout_is_refused(model_directory: ModelDirectory) -> None:
    assert message(model_directory("bert"), "cls", UsageError).startswith("Unknown readout 'cls'. Known: auto, linear,")


@pytest.mark.parametrize(
    ("kind", "readout", "expected"),
    [
        ("bert", "prompt", "The readout 'prompt' needs a masked language model, and "),
        ("gpt2-lm", "prompt", "The readout 'prompt' needs a masked language model, and "),
        ("bert-mlm", "causal", "The readout 'causal' needs a causal language model, and "),
        ("gpt2", "causal", "is GPT2Model. Give one, or another readout."),
    ],
)
def test_a_readout_that_the_model_cannot_have_is_refused(
    model_directory: ModelDirectory, kind: str, readout: str, expected: str
) -> None:
    assert expected in message(model_directory(kind), readout)


@pytest.mark.sampled("vocab_size-1000000000")
@pytest.mark.parametrize(("key", "size"), [("vocab_size", 10**9), ("hidden_size", 10**6), ("num_hidden_layers", 1000)])
def test_a_config_that_asks_for_more_than_its_weights_hold_is_refused_with_the_size(
    copy: ModelDirectory, key: str, size: int
) -> None:
    directory = copy("bert")
    change_config(directory, **{key: size})
    stored = (directory / "model.safetensors").stat().st_size
    assert re.search(
        rf"cannot be loaded: its config.json asks for [\d,]{{9,}} parameters, and its weights have {stored:,} bytes\.",
        message(directory),
    )


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    assert message(tmp_path).startswith(f"{str(tmp_path)!r} is no model directory: it holds no config.json. Save")


@pytest.mark.parametrize("name", ["minlm", "nowhere"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    text = message(name, kind=UnknownNameError)
    assert text.startswith(f"Unknown model {name!r}.")
    assert all(known in text for known in recipes.MODELS)
    assert "hub name OWNER/NAME" in text
    assert ("Did you mean 'minilm'?" in text) == (name == "minlm")


@pytest.mark.parametrize("name", ["./nowhere", "nowhere/", "owner/name/", "/nowhere/at/all", "a/b/c", "~/models/bert"])
def test_a_name_that_can_only_be_a_directory_is_reported_as_one(name: str) -> None:
    text = message(name, kind=UsageError)
    assert text.startswith(f"The model directory {name!r} does not exist. Give one in Hugging Face layout")


# -- The embedded model ----------------------------------------------------------------------------------


@needs_minilm
def test_minilm_reads_linearly_and_stays_the_same() -> None:
    loaded = load_model("minilm")
    assert (loaded.name, loaded.readout) == ("minilm", "linear")
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 22_565_376
    assert loaded.tokenizer.tokenize("Forgotten nothing") == ["forgotten", "nothing"]
    assert loaded.model.tokens == loading.TokenLayout(pad=0, mask=103, separator=102)

    # Ledgers and grafts on disk are bound to its weights and to its space.
    assert loaded.fingerprint == "3be19220b5b900c4fd50bcd090382715395110b5c5516b74f7e058fff9c4c124"
    space = loaded.model.space()
    assert (len(space.tensors), len(space)) == (96, 10_646_784)
    assert space.layout_hash == "5a686aff8e3c9835663fc1578756d18bba984fc63cd5ce9aa97e6ae376394d40"


def test_a_missing_minilm_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, location.MINILM_PACKAGE, None)
    assert "Install it with: pip install 'forgetfree[minilm]', or give another model to --model" in message("minilm")


@pytest.mark.parametrize(("kind", "readout"), [("bert-mlm", "prompt"), ("gpt2-lm", "causal")])
def test_a_task_without_label_words_needs_the_linear_readout(
    kind: str, readout: str, model_directory: ModelDirectory
) -> None:
    task = TaskDefinition("mine", "single", ("a", "b"))
    loaded = load_model(str(model_directory(kind)))
    name = "template" if readout == "prompt" else "causal_template"
    expected = rf"the readout {readout!r}: label_words must be as many as labels.*{name} must hold each of {{text}}"
    for read in (loaded.add_task, loaded.encoder):
        with pytest.raises(UsageError, match=expected):
            read(task)
    loaded = load_model(str(model_directory(kind)), "linear")
    assert loaded.model.readout_of(loaded.add_task(task)).n_labels == 2
    assert len(loaded.encoder(task)(Rows(("the film",), (), (0,)))) == 1
