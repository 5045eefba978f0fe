"""Streams of what a program holds: a loaded model, rows, a model of transformers, tensors for any network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from forgetfree import load_model, registry
from forgetfree.continual.streams import Stream, load_stream, make_stream
from forgetfree.data.sources import load_tasks
from forgetfree.errors import DataError, ModelError, UsageError
from forgetfree.strategies.avalanche_baselines import LwF
from forgetfree.strategies.continual_ft import ContinualFT
from forgetfree.strategies.grafting_continual import GraftingContinual

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
    assert "note: Task 'mood' has " in (told := capsys.readouterr().err) and "fewer than --shots 1000: all of" in told


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
    assert given.loaded.binding("fp32") == read.loaded.binding("fp32")
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
    for given in ({"model": model}, {"model": str(directory), "tokenizer": tokenizer}):
        with pytest.raises(UsageError, match="A model in memory is a PreTrainedModel and its tokenizer"):
            load_stream(data={"mood": ROWS}, **given)
    with pytest.raises(UsageError, match="A Linear reads tensors: give them as data="):
        load_stream("sst2", data="demo", model=nn.Linear(2, 2))
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(ModelError, match="BertModel"):
        load_stream(data={"mood": ROWS}, model=model, tokenizer=tokenizer)


def test_a_model_in_memory_that_is_frozen_in_part_is_not_trained_in_silence(model_directory: Any) -> None:
    directory = model_directory("bert")
    model = AutoModel.from_pretrained(directory, add_pooling_layer=False)
    given = {"data": {"mood": ROWS}, "model": model, "tokenizer": AutoTokenizer.from_pretrained(directory)}
    model.embeddings.requires_grad_(False)  # which are never trained
    load_stream(**given)
    model.encoder.layer[0].requires_grad_(False)
    with pytest.raises(ModelError, match=r"'encoder\.layer\.0\.[\w.]+' of BertModel is frozen .* as graftable="):
        load_stream(**given)
    assert load_stream(**given, graftable=r"layer\.1\.").model.space().tensors[0].name.startswith("encoder.layer.1.")
    model.requires_grad_(False)  # for inference: nothing was chosen
    load_stream(**given)


# -- A loaded model ----------------------------------------------------------------------------------------


def test_a_stream_is_made_of_any_loaded_model(model_directory: Any, data_directory: Path) -> None:
    """Strategies of ours and of Avalanche's learn it as they learn what `load_stream` loads."""

    def matrix(stream: Any, cls: Any) -> list[dict[str, Any]]:
        options = cls.Options(steps=3, learning_rate=0.1, **({"sparsity": 0.05} if cls is GraftingContinual else {}))
        strategy = cls(stream=stream, options=options, seed=0)
        rows = []
        for experience in stream.benchmark.train_stream:
            strategy.train(experience)
            rows.append({task: answers.logits.tolist() for task, answers in strategy.evaluate().items()})
        return rows

    model, tasks = str(model_directory("bert")), "qnli,sst2"
    for cls in (LwF, GraftingContinual):
        made = make_stream(tasks, load_tasks(tasks, str(data_directory)), load_model(model, graftable="layer"), shots=4)
        loaded = load_stream(tasks, data=str(data_directory), model=model, graftable="layer", shots=4)
        assert made.model.space() == loaded.model.space()
        assert matrix(made, cls) == matrix(loaded, cls)


def test_a_loaded_model_serves_several_streams_until_it_is_trained(model_directory: Any, data_directory: Path) -> None:
    loaded = load_model(str(model_directory("bert")), "linear")
    rows = load_tasks("sst2,qnli", str(data_directory))
    first = make_stream("one", rows, loaded, shots=4)
    second = make_stream("other", rows[::-1], loaded, shots=4, scenario="class")
    assert [head.name for head in first.model.heads] == ["sst2", "qnli"]
    assert (first.model.shared_readout, second.model.shared_readout) == (False, True)
    assert loaded.model.heads == [] and not list(loaded.model.linears)
    strategy = ContinualFT(stream=first, options=ContinualFT.Options(steps=2, learning_rate=0.1), seed=0)
    strategy.train(first.benchmark.train_stream[0])
    with pytest.raises(
        UsageError, match=r"are no longer those that were loaded.*Load the model again for each stream\."
    ):
        make_stream("late", rows, loaded)


# -- Tensors -----------------------------------------------------------------------------------------------


def points(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, outputs))


def test_any_network_learns_rows_of_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    (x, y), net = points(120, 0), network()
    before = [parameter.clone() for parameter in net.parameters()]
    data = {"first": (x, y), "second": {"train": TensorDataset(x, 2 - y), "dev": (x[:30], 2 - y[:30])}}
    stream = load_stream(data=data, model=net)
    assert "note: Task 'first': 25 test and 10 validation rows held out from the 120" in capsys.readouterr().err
    assert (stream.name, stream.scenario) == ("first,second", "task")
    sizes = [(len(task.train), len(task.validation), len(task.test)) for task in stream.tasks]
    assert sizes == [(85, 10, 25), (108, 12, 30)]
    for task, (inputs, labels) in zip(stream.tasks, ((x, y), (x, 2 - y)), strict=True):
        for part in (task.train, task.validation, task.test):  # each row is one of those given, with its label
            got, targets, where = part.batch(range(len(part)))
            assert all(
                int(labels[(inputs == row).all(1).nonzero()[0, 0]]) == int(t)
                for row, t in zip(got, targets, strict=True)
            )
            assert set(where.tolist()) == {task.label}
    strategy = registry.strategy("grafting-continual")
    options = strategy.Options(steps=60, sparsity=0.4, learning_rate=0.2, mask_steps=4, schedule="constant")
    learner = strategy(stream=stream, options=options)
    for experience in stream.benchmark.train_stream:
        learner.train(experience)
    scores = [answers.score("accuracy") for answers in learner.evaluate().values()]
    assert min(scores) > 0.6  # the largest label has half of the rows
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_tasks_of_tensors_are_named_once_and_have_rows() -> None:
    data = {"a": points(120, 0), "b": points(60, 1)}
    with pytest.raises(UsageError, match="The stream names 'c', and the data given hold a, b"):
        load_stream("a,c", data=data, model=network())
    with pytest.raises(UsageError, match="The stream names 'a' twice"):
        load_stream("a,b,a", data=data, model=network())


def test_shots_limits_and_scenarios_hold_for_tensors() -> None:
    x, y = points(120, 1)
    stream = load_stream(data={"a": (x, y)}, model=network(), shots=4, test_limit=6, seed=3)
    assert (len(stream.tasks[0].train), len(stream.tasks[0].test)) == (12, 6)
    few = (torch.cat((x, x[y == 0][:3])), torch.cat((y, torch.full((3,), 3))))
    task = load_stream(data={"a": few}, model=network(4), shots=4).tasks[0]
    assert sorted(task.train.labels.tolist()) == [0] * 4 + [1] * 4 + [2] * 4 + [3]
    assert task.shots == 4
    data = {"a": (x[y < 2], y[y < 2]), "b": (x[y > 0], y[y > 0] + 1)}
    assert load_stream(data=data, model=network(4), scenario="class").scenario == "class"
    with pytest.raises(UsageError, match="domain does not fit these labels"):
        load_stream(data=data, model=network(4), scenario="domain")
    assert load_stream(data={"a": (x, y), "b": (x, y)}, model=network(), scenario="domain").scenario == "domain"


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([1], r"data\['a'\]: expected two tensors \(x, y\) or a TensorDataset, got a list"),
        (
            (torch.zeros(3, 5), torch.zeros(3)),
            "expected a whole number as label of each of the 3 rows, got torch.float32",
        ),
        ((torch.zeros(3, 5), torch.zeros(2).long()), "as label of each of the 3 rows"),
        ((torch.zeros(4, 5), torch.tensor([0, 1, -1, 0])), r"data\['a'\], row 2: expected a label from 0, got -1"),
        ((torch.full((4, 5), float("nan")), torch.tensor([0, 1, 1, 0])), "not finite"),
        ((torch.zeros(4, 5), torch.zeros(4).long()), "every row has label 0"),
        ({"tst": points(9, 0), "train": points(9, 0)}, "'tst' is no split"),
        (
            {"train": points(9, 0), "test": (torch.zeros(1, 5), torch.tensor([7]))},
            "label 7 is none of the training rows'",
        ),
    ],
)
def test_tensors_that_are_no_rows_are_refused(rows: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        load_stream(data={"a": rows}, model=network())
    with pytest.raises(UsageError, match="The stream names 'b', and the data given hold a"):
        load_stream("b", data={"a": rows}, model=network())


def test_rows_that_the_network_cannot_read_are_told_with_their_dtype() -> None:
    x, y = points(120, 0)
    with pytest.raises(
        ModelError, match=r"Sequential cannot read rows of torch\.float64 and shape \(5,\): mat1 and mat2"
    ):
        load_stream(data={"a": (x.double(), y)}, model=network())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_other_floats_and_of_a_graph_have_their_bytes_as_fingerprint(dtype: torch.dtype) -> None:
    x, y = points(120, 0)
    x = x.to(dtype)
    plain, of_graph = (
        load_stream(data={"a": (rows, y)}, model=network().to(dtype)).tasks[0]
        for rows in (x, x.clone().requires_grad_())
    )
    assert plain.train.digest == of_graph.train.digest != plain.test.digest
    assert not of_graph.train.batch([0])[0].requires_grad


def test_load_tasks_takes_the_same_data() -> None:
    assert load_tasks("a", {"a": ROWS})[0].fingerprint() == load_tasks(None, {"a": ROWS})[0].fingerprint()
