"""A task that is inferred at evaluation is trained among its own labels: training, plug-ins and shared models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import small_vision as vision
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import ReplayPlugin
from compared import learn, logits
from torch import Tensor
from withheld import INFERENCE, model_of, text_stream

from forgetfree import registry
from forgetfree.continual.task_inference import answer_for
from forgetfree.core.fingerprint import fingerprint_of
from forgetfree.core.readout_model import LOWEST
from forgetfree.models.state import ModelState, StateStore

MakeStream = Callable[..., Any]


def in_float64(stream: Any) -> Any:
    stream.model.double()
    loaded = replace(stream.loaded, fingerprint=fingerprint_of(stream.model.backbone))
    return replace(stream, loaded=loaded, pre_trained=ModelState.of(stream.model))


@pytest.mark.sampled("fine-tune-last", "grafting-continual-router")
@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("name", ["fine-tune", "grafting-continual", "packnet"])
def test_where_the_task_is_found_it_is_learned_as_where_it_is_given(
    tiny_stream: MakeStream, name: str, inference: str
) -> None:
    """Equal readouts lead to equal weights up to rounding, unless one model answers with the labels of all tasks.

    In float64, rounding does not decide which of two entries PackNet or a mask keeps.
    """
    given, withheld = in_float64(tiny_stream("bert", "linear")), in_float64(text_stream(tiny_stream, "class"))
    for task in withheld.tasks:
        for part, tensor in given.pre_trained.readouts[task.name].items():
            tensor.copy_(withheld.pre_trained.readouts[task.name][part][list(task.classes)])
    cls = registry.strategy(name)
    how: dict[str, Any] = {"steps": 4, "learning_rate": 0.05, "dropout": False}
    how |= {"sparsity": 0.05, "mask_steps": 1} if name == "grafting-continual" else {}
    told = learn(cls(stream=given, options=cls.Options(**how), device="cpu"))
    found = learn(cls(stream=withheld, options=cls.Options(**how, task_inference=inference), device="cpu"))
    same = [
        torch.allclose(found.readouts[task.name][part][list(task.classes)], tensor, rtol=0, atol=1e-9)
        for task in withheld.tasks
        for part, tensor in told.readouts[task.name].items()
    ]
    models = zip(
        *([tensor for task in each.stream.tasks for tensor in model_of(each, task).values()] for each in (told, found)),
        strict=True,
    )
    same += [torch.allclose(ours, theirs, rtol=0, atol=1e-9) for ours, theirs in models]
    assert all(same) == (inference != "last")


def test_models_that_are_learned_among_other_labels_are_not_taken_for_one_another(tiny_stream: MakeStream) -> None:
    """A shared store makes one fine-tuned model for router and lda, and another for inference by the last model."""
    cls, store = registry.strategy("grafting-continual"), StateStore()
    made = []
    for inference in INFERENCE:
        stream = text_stream(tiny_stream, "class")
        options = cls.Options(steps=2, sparsity=0.05, mask_steps=1, task_inference=inference)
        strategy = learn(cls(stream=stream, options=options, device="cpu", store=store), 1)
        made.append("fine_tune" in strategy.seconds)
    assert made == [True, True, False]


@pytest.mark.sampled("lda")
@pytest.mark.parametrize("inference", ["router", "lda"])
def test_plugins_see_all_labels_and_evaluate_earlier_tasks_by_their_own(
    tiny_stream: MakeStream, inference: str
) -> None:
    """While the second task trains, its loss sees only its labels; plug-ins and rows of the first task see all labels."""
    cls = registry.strategy("fine-tune")
    stream = text_stream(tiny_stream, "class")
    strategy = cls(stream=stream, options=cls.Options(steps=2, task_inference=inference), device="cpu")
    learn(strategy, 1)
    first, second = stream.tasks[:2]
    x, _, labels = first.test.batch(range(len(first.test)))
    at_rest = torch.as_tensor(strategy.evaluate([first])["qnli"].logits)
    seen: list[tuple[bool, bool]] = []

    class Asks(SupervisedPlugin[Any]):
        def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
            strategy.model.eval()
            with answer_for(strategy, first, [(x, labels)]) as answer, torch.no_grad():
                found = answer(x, labels)
            strategy.model.train()
            own = found[:, 0] > LOWEST  # rows that the first task answers; the second's model has changed since
            seen.append((torch.allclose(found[own], at_rest[own], atol=1e-5), bool(own.any())))

        def after_forward(self, strategy: Any, **kwargs: Any) -> None:
            lowest = (strategy.mb_output == LOWEST).all(0).nonzero().flatten().tolist()
            assert lowest == [label for label in range(8) if label not in second.classes]
            assert strategy.model.answered_labels is None
            assert bool((strategy.model(strategy.mb_x, 0) > LOWEST).all())

    strategy.plugins.append(Asks())
    strategy.train(stream.benchmark.train_stream[1])
    assert len(seen) == 2 and all(same and some for same, some in seen)


def test_a_task_that_is_broken_off_is_not_told_from_the_others(tiny_stream: MakeStream) -> None:
    """The features of learned tasks stay unchanged, and once the task is trained, equal those of an undisturbed run."""
    cls = registry.strategy("fine-tune")

    class Breaks(SupervisedPlugin[Any]):
        def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    def made() -> Any:
        return cls(stream=text_stream(tiny_stream, "class"), options=cls.Options(steps=2, task_inference="lda"))

    strategy, twin, breaks = learn(made(), 2), learn(made()), Breaks()
    before, third = strategy.task_features._bytes(), strategy.stream.benchmark.train_stream[2]
    strategy.plugins.append(breaks)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(third)
    assert strategy.task_features._bytes() == before
    strategy.plugins.remove(breaks)
    strategy.train(third)
    assert strategy.task_features._bytes() == twin.task_features._bytes() != before


@pytest.mark.parametrize("inference", ["router", "lda"])
def test_a_strategy_may_evaluate_earlier_tasks_where_it_commits(tiny_stream: MakeStream, inference: str) -> None:
    answered: list[dict[str, Tensor]] = []

    class Looks(registry.strategy("fine-tune")):  # type: ignore[misc]
        def commit(self, task: Any, training: Any) -> None:
            super().commit(task, training)
            answered.append(logits(self))

    stream = text_stream(tiny_stream, "class")
    strategy = Looks(stream=stream, options=Looks.Options(steps=2, task_inference=inference), device="cpu")
    learn(strategy)
    for learned, found in zip(stream.tasks, answered, strict=True):
        first = found["qnli"]
        assert bool((first.max(1).values > LOWEST).all()), learned.name
    assert set(answered[1]["qnli"].argmax(1).tolist()) & {0, 1}


@pytest.mark.sampled("fine-tune-router")
@pytest.mark.parametrize("inference", ["router", "lda"])
@pytest.mark.parametrize("name", ["fine-tune", "packnet"])
def test_rows_of_other_tasks_that_a_plugin_adds_count_with_their_labels(name: str, inference: str) -> None:
    cls = registry.strategy(name)
    options = cls.Options(steps=4, learning_rate=0.01, task_inference=inference)
    strategy = cls(
        stream=vision.stream("class", "conv"), options=options, device="cpu", plugins=[ReplayPlugin(mem_size=20)]
    )
    losses: list[float] = []

    class Notes(SupervisedPlugin[Any]):
        def after_backward(self, strategy: Any, **kwargs: Any) -> None:
            losses.append(float(strategy.loss.detach()))

    strategy.plugins.append(Notes())
    learn(strategy)
    assert losses and max(losses) < 20
