"""Grafts applied to their base model permanently: the written files, their predictions, and refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cards import card_code
from safetensors.torch import load_file
from torch import Tensor

from forgetfree.core.readout_model import body_of
from forgetfree.core.selection import most_moved
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_tasks
from forgetfree.errors import GraftError, ModelError, UsageError
from forgetfree.ledger.graft import Graft
from forgetfree.models.loading import load_model
from forgetfree.serve.apply import WrittenModel, apply_graft
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import TrainingOptions

ModelDirectory = Callable[[str], Path]

#: Texts that are longer than the models read, empty, with spaces, punctuation, capitals, and special tokens as text.
TEXTS = (
    "a lovely film .",
    "",
    "  The story was AWFUL!  ",
    "was it dull?",
    "the film " * 40,
    "[SEP] a [MASK] film </s> <mask>",
)
#: Model, readout, task; the architecture that is written and the class that loads it.
CASES = [
    ("bert-pooler", "linear", "qnli", "BertForSequenceClassification", "AutoModelForSequenceClassification"),
    ("roberta-mlm", "linear", "sst2", "RobertaForSequenceClassification", "AutoModelForSequenceClassification"),
    ("gpt2", "linear", "qnli", "GPT2Model", "AutoModel"),  # its head has no bias
    ("bert-mlm", "prompt", "qnli", "BertForMaskedLM", "AutoModelForMaskedLM"),
    ("roberta-mlm", "prompt", "ag_news", "RobertaForMaskedLM", "AutoModelForMaskedLM"),
    ("gpt2-lm", "causal", "qnli", "GPT2LMHeadModel", "AutoModelForCausalLM"),
]


class Made:
    """A graft on a tiny model, loaded from its file; our own model's logits; and the model written by `apply_graft`."""

    def __init__(self, root: Path, model: Path, data: Path, readout: str, task: str) -> None:
        self.root, self.model = root, model
        self.single = SingleTask.of(load_model(str(model), readout), load_tasks(task, str(data))[0])
        self.fine_tuned = self.single.fine_tuned(TrainingOptions(steps=2, learning_rate=0.5))
        region = most_moved(self.single.pre.theta, self.fine_tuned.theta, 60)
        self.single.graft(self.fine_tuned, region, 0.02).save(root / "graft.safetensors")
        self.graft = Graft.load(root / "graft.safetensors")

    def apply(self) -> WrittenModel:
        if not (self.root / "out").exists():
            self.written = apply_graft(self.graft, str(self.model), self.root / "out")
        return self.written

    @property
    def pair(self) -> bool:
        return len(self.single.task.definition.text_columns) == 2

    def rows(self) -> Rows:
        return Rows(TEXTS, TEXTS[::-1] if self.pair else (), (0,) * len(TEXTS))

    def logits(self) -> Tensor:
        """Return the logits of our own model, grafted by eq. 1, one row at a time."""
        state = self.single.grafted(self.fine_tuned, self.graft.region)
        return torch.from_numpy(self.single.answers(state, self.single.encode(self.rows()), ONE_BY_ONE).logits)


ONE_BY_ONE = TrainingOptions(evaluation_batch_size=1)


@pytest.fixture(scope="module")
def made(
    model_directory: ModelDirectory, data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Made]:
    known: dict[tuple[str, str, str], Made] = {}

    def make(kind: str, readout: str, task: str) -> Made:
        key = (kind, readout, task)
        if key not in known:
            root = tmp_path_factory.mktemp("-".join(key))
            known[key] = Made(root, model_directory(kind), data_directory, readout, task)
        return known[key]

    return make


# -- Written files ---------------------------------------------------------------------------------------


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize(("kind", "readout", "task", "architecture", "loader"), CASES)
def test_the_model_is_the_grafted_one_bit_for_bit(
    made: Callable[..., Made], kind: str, readout: str, task: str, architecture: str, loader: str
) -> None:
    """All tensors of the body are equal, loaded with its head and without; BERT's pooler may hold the readout instead."""
    own = made(kind, readout, task)
    written = own.apply()
    usual = "ForSequence" in architecture
    assert (written.directory, written.architecture, written.loader) == (own.root / "out", architecture, loader)
    assert bool(written.call) == usual
    expected = transformers.AutoModel.from_pretrained(own.model)
    own.graft.apply_(expected)
    pooled = "pooler" in kind
    for load in (loader, "AutoModel"):
        model, info = getattr(transformers, load).from_pretrained(written.directory, output_loading_info=True)
        assert all("pooler" in key and not pooled for key in info["missing_keys"])
        got = body_of(model).state_dict()
        same = {
            name for name, tensor in expected.state_dict().items() if name in got and torch.equal(tensor, got[name])
        }
        # BERT's pooler is the inner layer of the classifier's head, and may hold the readout.
        assert same >= {name for name in expected.state_dict() if "pooler" not in name}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("kind", "readout", "task"), [case[:3] for case in CASES if "ForSequence" not in case[3]])
def test_what_is_no_sequence_classifier_does_not_answer_by_a_random_head(
    made: Callable[..., Made], kind: str, readout: str, task: str
) -> None:
    written = made(kind, readout, task).apply()
    assert not written.call
    classify = transformers.pipeline("text-classification", model=str(written.directory))
    with pytest.raises(ValueError, match="empty sequence"):
        classify("a film")
    assert classify("a film", top_k=None) == []
    assert "no sequence classifier" in (written.directory / "README.md").read_text()


@pytest.mark.sampled(share=0.15)
def test_nothing_of_ours_is_needed(made: Callable[..., Made]) -> None:
    written = made("roberta-mlm", "linear", "sst2").apply()
    code = card_code(written.directory)
    code += "\nimport sys\nassert not [name for name in sys.modules if name.startswith('forgetfree')]\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=written.directory, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "negative" in done.stdout or "positive" in done.stdout


def test_the_model_card_says_what_it_is(made: Callable[..., Made]) -> None:
    own = made("bert-mlm", "prompt", "qnli")
    card = (own.apply().directory / "README.md").read_text()
    assert own.graft.origin is not None
    facts = ["60 of 4,448 parameters", "`qnli`: entailment, not\\_entailment", "0.02", str(own.model)]
    assert [fact for fact in [*facts, own.graft.origin.fingerprint] if fact not in card] == []
    assert sorted(path.name for path in own.written.directory.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert len({path.stat().st_mode for path in own.written.directory.iterdir()}) == 1  # all have the same permissions


def test_an_architecture_without_a_sequence_classifier_gets_its_readout_as_a_file(
    made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*_: object, **__: object) -> None:
        raise ValueError("Unrecognized configuration class")

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_config", none)
    own = made("bert-pooler", "linear", "qnli")
    written = apply_graft(own.graft, str(own.model), tmp_path / "out")
    assert (written.architecture, written.loader, written.call) == ("BertModel", "AutoModel", "")
    assert "the readout is in readout.safetensors" in written.note
    assert torch.equal(load_file(tmp_path / "out" / "readout.safetensors")["weight"], own.graft.readout["weight"])
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


# -- Refusals --------------------------------------------------------------------------------------------


def refused(graft: Graft, model: Path | str, out: Path, kind: type[Exception], match: str) -> None:
    beside = sorted(out.parent.iterdir())
    with pytest.raises(kind, match=match) as caught:
        apply_graft(graft, str(model), out)
    assert "\n" not in str(caught.value)
    assert sorted(out.parent.iterdir()) == beside  # no partial files are left


def test_what_does_not_fit_is_refused_and_nothing_is_written(
    made: Callable[..., Made], model_directory: ModelDirectory, tmp_path: Path
) -> None:
    own, out = made("bert-pooler", "linear", "qnli"), tmp_path / "out"
    origin = own.graft.origin
    assert origin is not None
    refused(own.graft, model_directory("roberta"), out, GraftError, "a model that computes otherwise: .*model_type")
    refused(own.graft, model_directory("gpt2"), out, GraftError, "another layout")
    refused(own.graft, tmp_path / "none", out, UsageError, "The model directory .* does not exist")
    refused(replace(own.graft, origin=None), own.model, out, GraftError, "does not say for which task")
    refused(replace(own.graft, readout={}), own.model, out, GraftError, "linear readout does not fit")
    prompt = replace(own.graft, origin=replace(origin, binding=replace(origin.binding, readout="prompt")))
    refused(prompt, own.model, out, ModelError, "needs a masked language model")
    for architecture, error, match in (
        ("NoSuchForSequenceClassification", ModelError, "does not have"),
        ("BertModel", ModelError, "Expected a …ForSequenceClassification"),
        ("GPT2ForSequenceClassification", ModelError, "the model is of type 'bert'"),
        ("BertForSequenceClassification", GraftError, "is no head of this .*: 'classifier.bias' is not in it"),
    ):
        bound = replace(origin.binding, readout="classifier", architecture=architecture)
        other = replace(own.graft, origin=replace(origin, binding=bound))
        refused(other, own.model, out, error, match)
    out.mkdir()
    (out / "held").touch()
    refused(own.graft, own.model, out, UsageError, "exists and is not an empty directory")
    refused(own.graft, own.model, out / "held", UsageError, "exists and is not an empty directory")


def test_what_was_written_is_held_against_what_was_meant(
    made: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = transformers.BertForSequenceClassification
    save = network.save_pretrained

    def spoil(self: Any, directory: Path, state_dict: dict[str, Tensor]) -> None:
        name = "bert.encoder.layer.0.output.dense.bias"
        save(self, directory, state_dict=state_dict | {name: state_dict[name] + 1})

    monkeypatch.setattr(network, "save_pretrained", spoil)
    own = made("bert-pooler", "linear", "qnli")
    refused(own.graft, own.model, tmp_path / "out", ModelError, "The exported files differ from the grafted model")
