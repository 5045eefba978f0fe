"""The task of a row, inferred from θ_pre's features: compared with a slow loop, and kept across tasks and in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_gpu
import torch

from forgetfree import registry
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.results.run_folder import FEATURES
from forgetfree.training.task_features import SHRINKAGE, TaskFeatures

MakeStream = Callable[..., Any]
TASKS = ["qnli", "ag_news", "sst2"]


def learned(stream: Any, count: int = 3, **changes: Any) -> TaskFeatures:
    features = TaskFeatures(stream.model, **changes)
    for task in stream.tasks[:count]:
        features.learn(task.name, task.train)
    return features


def hidden(stream: Any, rows: Any) -> np.ndarray[Any, Any]:
    """Return for each row the mean over its tokens of the middle layer (the tiny model has two layers)."""
    found = []
    for row in range(len(rows)):
        inputs = stream.model.inputs(rows.batch([row])[0])
        with torch.no_grad():
            states = stream.model.eval().backbone(**inputs, output_hidden_states=True).hidden_states
        found.append(states[1][0].double().mean(0).numpy())
    return np.stack(found)


def test_rows_go_where_a_slow_discriminant_sends_them(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear")
    features = learned(stream)
    training = [hidden(stream, task.train) for task in stream.tasks]
    means = [rows.mean(0) for rows in training]
    inside = np.concatenate([rows - mean for rows, mean in zip(training, means, strict=True)])
    covariance = inside.T @ inside / (len(inside) - len(means))
    width = len(covariance)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.trace(covariance) / width * np.eye(width)
    inverse, chosen = np.linalg.inv(covariance), set()
    for task in stream.tasks:
        x = task.test.batch(range(len(task.test)))[0]
        got = features.nearest([x], TASKS)[0].tolist()
        for row, h in enumerate(hidden(stream, task.test)):
            distances = [float((h - mean) @ inverse @ (h - mean)) for mean in means]  # Mahalanobis, 1936
            assert got[row] == distances.index(min(distances))
        chosen |= set(got)
        assert features.nearest([x], TASKS[::-1])[0].tolist() == [2 - number for number in got]
    assert len(chosen) > 1


def test_a_new_task_leaves_earlier_means_and_the_model_as_they_were(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear")
    one, three = learned(stream, 1), learned(stream, 3)
    assert torch.equal(one.means["qnli"], three.means["qnli"])
    before = {name: mean.clone() for name, mean in three.means.items()}
    three.learn("qnli", stream.tasks[2].train)  # the name of a known task
    assert all(torch.equal(mean, before[name]) for name, mean in three.means.items())
    x = stream.tasks[0].test.batch(range(4))[0]
    expected = three.nearest([x], TASKS)[0]
    with torch.no_grad():
        for parameter in stream.model.parameters():
            parameter.add_(1)  # training may change the model in any way
    assert torch.equal(three.nearest([x], TASKS)[0], expected)
    assert one.nearest([x], ["qnli"])[0].tolist() == [0] * 4


def test_on_a_gpu_its_model_lies_there_while_it_computes_alone(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear")
    x = stream.tasks[0].test.batch(range(4))[0]
    expected = learned(stream).nearest([x], TASKS)
    with simulated_gpu.present():
        stream.model.to("cuda")
        features = learned(stream)
        assert {each.device.type for each in features._model.parameters()} == {"cpu"}
        assert torch.equal(features.nearest([x], TASKS)[0], expected[0])
        reading = features._features([x])
        next(reading)
        assert {each.device.type for each in features._model.parameters()} == {"cuda"}
        reading.close()
        assert {each.device.type for each in features._model.parameters()} == {"cpu"}
        stream.model.to("cpu")


def test_it_is_written_and_read_bit_for_bit_and_goes_on(tiny_stream: MakeStream, tmp_path: Path) -> None:
    stream = tiny_stream("bert", "linear")
    whole, part = learned(stream, 3, fingerprint="f"), learned(stream, 2, fingerprint="f")
    part.save(tmp_path)
    assert part.bytes_kept() == (tmp_path / FEATURES).stat().st_size
    again = TaskFeatures(stream.model, fingerprint="f")
    again.load(tmp_path)
    again.learn("sst2", stream.tasks[2].train)
    again.save(tmp_path)
    held = (tmp_path / FEATURES).read_bytes()
    whole.save(tmp_path)
    assert (tmp_path / FEATURES).read_bytes() == held


def test_what_does_not_fit_is_refused(tiny_stream: MakeStream, tmp_path: Path) -> None:
    stream = tiny_stream("bert", "linear")
    features = TaskFeatures(stream.model, fingerprint="f" * 64)
    assert features.bytes_kept() == 0
    with pytest.raises(RunError, match="cannot be read"):
        features.load(tmp_path)
    learned(stream, 2, fingerprint="f" * 64).save(tmp_path)
    with pytest.raises(RunError, match="made with another model"):
        TaskFeatures(stream.model, "e" * 64).load(tmp_path)
    data = bytearray((tmp_path / FEATURES).read_bytes())
    data[-1] ^= 1
    (tmp_path / FEATURES).write_bytes(data)
    with pytest.raises(RunError, match="do not match its checksum"):
        features.load(tmp_path)
    assert features.means == {}


def test_a_damaged_ledger_beside_them_changes_nothing(tiny_stream: MakeStream, tmp_path: Path) -> None:
    cls = registry.strategy("bitfit")

    def made() -> Any:
        stream = tiny_stream("bert", "linear", scenario="class", stream="qnli,ag_news")
        return cls(stream=stream, options=cls.Options(steps=1, task_inference="lda"), device="cpu")

    strategy = made()
    strategy.train(strategy.stream.benchmark.train_stream[0])
    strategy.save(tmp_path)
    for damaged in tmp_path.glob("*.safetensors"):
        whole = damaged.read_bytes()
        damaged.write_bytes(b"x")
        other = made()
        with pytest.raises(ForgetfreeError):
            other.load(tmp_path)
        assert not other.task_features.means and not other.learned
        damaged.write_bytes(whole)
    other.load(tmp_path)
    assert list(other.task_features.means) == ["qnli"]
