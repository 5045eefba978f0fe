"""Streams from Python objects: a loaded model, rows, a model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from forgetfree import load_model, registry
from forgetfree.continual.stream import Stream, load_stream, make_stream
from forgetfree.data.sources import load_tasks
from forgetfree.errors import ModelError, UsageError
from forgetfree.strategies.continual_ft import ContinualFT

ROWS = [{"sentence": f"word {i} and more" * (i % 3 + 1), "category": ["no", "yes"][i % 3 > 0]} for i in range(30)]


def same_rows(a: Stream, b: Stream) -> bool:
    return all(
        torch.equal(getattr(getattr(x, split), part), getattr(getattr(y, split), part))
        for x, y in zip(a.tasks, b.tasks, strict=True)
        for split in ("train", "validation", "test")
        for part in ("tokens", "offsets", "labels")
    )


def test_rows_in_memory_are_encoded_as_those_of_a_file(
    tmp_path: Path, model_directory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas.DataFrame(ROWS).to_csv(tmp_path / "mood.csv", index=False)
    model = str(model_directory("bert"))
    common: dict[str, Any] = {"model": model, "readout": "linear", "shots": 4}
    file = load_stream(data=str(tmp_path / "mood.csv"), **common)
    assert "note: Task 'mood'" in capsys.readouterr().err
    memory = load_stream(data={"mood": pandas.DataFrame(ROWS)}, **common)
    assert (file.name, memory.name) == ("mood", "mood")
    assert same_rows(file, memory) and file.tasks[0].fingerprint == memory.tasks[0].fingerprint
    assert memory.tasks[0].definition.labels == ("no", "yes")
    two = load_stream(["b", "a"], data={"a": ROWS, "b": ROWS[::-1]}, text_column="sentence", **common)
    assert two.name == "b,a" and [task.name for task in two.tasks] == ["b", "a"]
    load_stream(data={"mood": ROWS}, **common | {"shots": 1000})
    assert "note: Task 'mood' has " in (told := capsys.readouterr().err) and "fewer than --shots 1000: using" in told


@pytest.mark.parametrize(("kind", "auto"), [("bert", AutoModelForMaskedLM), ("bert", AutoModel)])
def test_a_model_in_memory_is_that_of_its_directory(tmp_path: Path, model_directory: Any, kind: str, auto: Any) -> None:
    directory = model_directory(kind)
    model, tokenizer = auto.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    common: dict[str, Any] = {"data": {"mood": {"train": ROWS, "test": ROWS[:9]}}, "readout": "linear"}
    given = load_stream(model=model, tokenizer=tokenizer, **common)
    read = load_stream(model=str(directory), **common)
    assert given.loaded.fingerprint == read.loaded.fingerprint
    assert given.loaded.tokenizer_digest == read.loaded.tokenizer_digest
    assert given.loaded.binding() == read.loaded.binding()
    assert same_rows(given, read)
    strategy = registry.strategy("continual-ft")
    learner = strategy(stream=given, options=strategy.Options(steps=2, learning_rate=0.5))
    for experience in given.benchmark.train_stream:
        learner.train(experience)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    moved = {name: tensor.cpu() for name, tensor in given.model.state_dict().items() if tensor.is_floating_point()}
    assert any(not torch.equal(tensor, read.model.state_dict()[name]) for name, tensor in moved.items())


def test_a_model_in_memory_needs_its_tokenizer(model_directory: Any) -> None:
    directory = model_directory("bert")
    model, tokenizer = AutoModel.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    for given in ({"model": model}, {"model": str(directory), "tokenizer": tokenizer}, {"model": nn.Linear(2, 2)}):
        with pytest.raises(UsageError, match="A model in memory is a PreTrainedModel and its tokenizer"):
            load_stream(data={"mood": ROWS}, **given)
    with pytest.raises(UsageError, match="Any other network learns an Avalanche benchmark"):
        load_stream(data={"mood": (torch.zeros(4, 2), torch.arange(4) % 2)}, model=nn.Linear(2, 2))
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(ModelError, match="BertModel"):
        load_stream(data={"mood": ROWS}, model=model, tokenizer=tokenizer)


def test_a_model_in_memory_that_is_frozen_in_part_is_not_trained_in_silence(model_directory: Any) -> None:
    directory = model_directory("bert")
    model = AutoModel.from_pretrained(directory, add_pooling_layer=False)
    given = {"data": {"mood": ROWS}, "model": model, "tokenizer": AutoTokenizer.from_pretrained(directory)}
    model.embeddings.requires_grad_(False)  # embeddings are never trained
    load_stream(**given)
    model.encoder.layer[0].requires_grad_(False)
    with pytest.raises(ModelError, match=r"'encoder\.layer\.0\.[\w.]+' of BertModel is frozen .* as graftable="):
        load_stream(**given)
    assert load_stream(**given, graftable=r"layer\.1\.").model.space().tensors[0].name.startswith("encoder.layer.1.")
    model.requires_grad_(False)  # a model frozen for inference: nothing was chosen
    load_stream(**given)


# -- A loaded model ----------------------------------------------------------------------------------------


def test_a_loaded_model_serves_several_streams_until_it_is_trained(model_directory: Any, data_directory: Path) -> None:
    loaded = load_model(str(model_directory("bert")), "linear")
    rows = load_tasks("sst2,qnli", str(data_directory))
    first = make_stream("one", rows, loaded, shots=4)
    second = make_stream("other", rows[::-1], loaded, shots=4, scenario="class")
    assert first.model.task_names == ["sst2", "qnli"]
    assert (first.model.shared_readout, second.model.shared_readout) == (False, True)
    assert loaded.model.task_names == []
    strategy = ContinualFT(stream=first, options=ContinualFT.Options(steps=2, learning_rate=0.1), seed=0)
    strategy.train(first.benchmark.train_stream[0])
    with pytest.raises(UsageError, match=r"have changed since it was loaded.*Load the model again for each stream\."):
        make_stream("late", rows, loaded)
