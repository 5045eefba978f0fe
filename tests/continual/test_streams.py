"""A stream over a model that is loaded already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgetfree import load_model, load_stream
from forgetfree.continual.streams import make_stream
from forgetfree.data.sources import load_tasks
from forgetfree.errors import UsageError
from forgetfree.strategies.avalanche_baselines import LwF
from forgetfree.strategies.continual_ft import ContinualFT
from forgetfree.strategies.grafting_continual import GraftingContinual


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
