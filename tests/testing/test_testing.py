"""The public conformance checks: every registered strategy passes, and each check can fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_strategies import Plain
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import ModelStorage, Training
from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import TaskwiseOptions
from forgetfree.core.trained import WholeTensors
from forgetfree.errors import OptionError, UnknownNameError, UsageError
from forgetfree.ledger.ledger import Ledger
from forgetfree.strategies.continual_ft import ContinualFT
from forgetfree.testing import ConformanceError, check_strategy, check_stream, tiny_stream
from forgetfree.training.step import fine_tune
from forgetfree.training.training_options import TrainingOptions

#: Options for 24 rows and a model of width 16, for strategies that have them.
TINY = {"sparsity": 0.05, "mask_steps": 2, "mask_batch_size": 12, "delta_t": 1}


def tiny_options(cls: Any) -> dict[str, Any]:
    return {name: value for name, value in TINY.items() if name in cls.Options.model_fields}


@pytest.mark.long
@pytest.mark.sampled("fine-tune", "grafting-continual", "joint", "o-lora")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Avalanche's SI divides by zero on entries that never moved
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", registry.STRATEGIES)
def test_every_registered_strategy_keeps_the_contract(name: str) -> None:
    if name == "gem":
        pytest.importorskip("quadprog")
    cls = registry.strategy(name)
    check_strategy(cls, **tiny_options(cls))


def faults(cls: Any, **options: Any) -> list[str]:
    with pytest.raises(ConformanceError) as caught:
        check_strategy(cls, **options)
    return list(caught.value.faults)


# -- The class -------------------------------------------------------------------------------------------


def constructor(self: Any, **arguments: Any) -> None:
    ContinualStrategy.__init__(self, **arguments)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (dict, "class: expected a subclass of ContinualStrategy, got <class 'dict'>."),
        (
            type("Own", (Plain,), {"Options": dict}),
            "class: expected a subclass of TrainingOptions, got <class 'dict'>.",
        ),
        (
            type("Own", (Plain,), {"__init__": constructor}),
            "__init__: expected ContinualStrategy's own, got constructor. Drop",
        ),
        (
            type("Mixed", (type("Mixin", (), {"phase_seed": lambda self, *_: 0}), Plain), {}),
            "phase_seed: expected the contract's own, which is final, got another.",
        ),
    ],
)
def test_a_class_that_is_no_strategy_is_refused(cls: Any, message: str) -> None:
    (fault,) = faults(cls)
    assert fault.startswith(message)


def test_faults_are_reported_together() -> None:
    found = faults(type("Own", (Plain,), {"phase_seed": None, "__init__": constructor}))
    assert [fault.split(":")[0] for fault in found] == ["__init__", "phase_seed"]


def test_an_option_that_there_is_not_is_the_callers_error() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown option of ContinualFT 'setps'. Did you mean 'steps'"):
        check_strategy(ContinualFT, setps=3)


# -- Faults of a strategy --------------------------------------------------------------------------------

QUERY = "backbone.encoder.layer.0.attention.self.query.weight"
ALL = "the answers for qnli, ag_news, sst2"
ANOTHER = "from the global generators, on a used stream, and with evaluations during training, got others, the answers for qnli"
#: Each broken class with the messages of the check.
DAMAGE: dict[type[ContinualStrategy], tuple[str, ...]] = {}


def told(*messages: str) -> Callable[[Any], Any]:
    """Register a broken class; each message must be in exactly one fault."""

    def note(cls: Any) -> Any:
        DAMAGE[cls] = messages
        return cls

    return note


class Around:
    """Trained parameters with functions that are called before and after each update."""

    def __init__(self, trained: Any, before: Any = lambda: None, after: Any = lambda: None) -> None:
        self.parameters, self.touched = trained.parameters, trained.touched
        self.collect, self.write = before, after


@told("got ZeroDivisionError: by nothing (test_testing.py:")
class Raises(Plain):
    """Raises during training."""

    def begin(self, task: Any) -> Training:
        training = super().begin(task)
        return replace(training, trained=Around(training.trained, before=self._fail))

    def _fail(self) -> None:
        raise ZeroDivisionError("by nothing")


@told(f"evaluate: expected to find the model as it was before, got {QUERY}")
class MovesInEvaluation(Plain):
    """Changes the model in every evaluation."""

    @torch.no_grad()
    def answering(self, task: Any) -> Any:
        self.space.parameters(self.model.backbone)[0].add_(0.01)
        return nullcontext()


class Saying(ModelStorage):
    """Stores the model, and reports another size."""

    said: Any = 0

    def bytes_kept(self) -> Any:
        return self.said


@told(
    "bytes_kept: expected integers of at least 0, and above 0 once a task is learned, "
    "got 0, 0, 0, 0 before the first task and after each. Count in storage.bytes_kept()"
)
class KeepsNothing(Plain):
    """Reports that it stores nothing, though learning changes its predictions."""

    def setup(self) -> None:
        self.storage = Saying(self)


def embeddings(strategy: Any) -> Tensor:
    found: Tensor = strategy.model.backbone.embeddings.word_embeddings.weight
    return found


@told("lists as trained.touched and readout, got backbone.embeddings.word_embeddings")
class MovesWhatIsFrozen(Plain):
    """Moves an embedding at every step, and puts it back after the task."""

    def setup(self) -> None:
        self.before = embeddings(self).detach().clone()

    def begin(self, task: Any) -> Training:
        training = super().begin(task)
        return replace(training, trained=Around(training.trained, after=self._move))

    @torch.no_grad()
    def _move(self) -> None:
        embeddings(self)[7].add_(1)

    @torch.no_grad()
    def commit(self, task: Any, training: Training) -> None:
        embeddings(self).copy_(self.before)

    @contextmanager
    def answering(self, task: Any) -> Iterator[None]:
        moved = embeddings(self).detach().clone()
        embeddings(self).data.copy_(self.before)
        yield
        embeddings(self).data.copy_(moved)


@told("fresh start: expected the next strategy to find the pre-trained model, got backbone.embeddings.word_embeddings")
class LeavesAnEmbedding(Plain):
    """Moves an embedding that is never restored."""

    @torch.no_grad()
    def commit(self, task: Any, training: Training) -> None:
        embeddings(self)[7].fill_(1)


@told("fresh start: expected the next strategy to answer as the pre-trained model does, got other logits for qnli")
class LeavesAHook(Plain):
    """Leaves a hook in the model."""

    def commit(self, task: Any, training: Training) -> None:
        if task.label == 1:
            norm = next(each for each in self.model.backbone.modules() if isinstance(each, torch.nn.LayerNorm))
            norm.register_forward_hook(lambda module, inputs, output: output * 1.5)


@told("fresh start: expected parameters to require gradients again, got requires_grad = False for backbone.emb")
class LeavesItFrozen(Plain):
    """Freezes a layer permanently."""

    def setup(self) -> None:
        embeddings(self).requires_grad_(False)


@told(
    "evaluate: expected logits (n, n_labels) by task, {'qnli': (16, 2), 'ag_news': (8, 2), 'sst2': (16, 2)}, got {'qnli'"
)
class WidensLogits(Plain):
    """Returns logits with one label too many."""

    def answering(self, task: Any) -> Any:
        return nullcontext(lambda x, labels: torch.cat([logits := self.model(x, labels), logits[:, :1]], 1))


@told("evaluate: expected finite logits, got others for qnli, ag_news, sst2.")
class NotFinite(Plain):
    """Divides by zero."""

    def answering(self, task: Any) -> Any:
        return nullcontext(lambda x, labels: self.model(x, labels) / 0)


@told("training: expected other answers by learning a task than before, got the very same for qnli, ag_news, sst2.")
class LearnsNothing(Plain):
    """Takes no step of training."""

    def begin(self, task: Any) -> Training:
        return self.everything(task, steps=0)


@told(
    f"forget_free: claimed as True, but learning ag_news changed the answers for qnli (tensors that differ: {QUERY}, "
)
class ClaimsTooMuch(Plain):
    """Forgets, but claims not to."""

    forget_free: ClassVar[bool] = True


@told(
    "by learning qnli, got a list without qnli",
    "by learning ag_news, got a list without qnli, ag_news",
    f"by learning sst2, got a list without qnli, ag_news, sst2, though it changed {ALL} (tensors that differ: {QUERY}, ",
)
class AllFresh(Plain):
    """Claims that no prediction changes."""

    def changed_by(self, learned: Any) -> list[Any]:
        return []


@told("that do not, in encoder.layer.0.attention.self.query.weight, encoder.layer.0.attention.self.query.bias, ")
class EmptyLedger(Plain):
    """Trains everything, but records nothing in its ledger."""

    def setup(self) -> None:
        self.ledger = Ledger(self.space, self.stream.loaded.fingerprint)


@told(
    f"save and load: expected a new strategy to answer as the saved one did, got others, {ALL} (tensors that differ: "
)
class SavesNothing(Plain):
    """Saves no file."""

    class Storage(ModelStorage):
        def save(self, directory: Path) -> None:
            pass

        def load(self, directory: Path) -> None:
            pass

    def setup(self) -> None:
        self.storage = self.Storage(self)


@told("save and load: expected no error, got FileNotFoundError: elsewhere.pt (test_testing.py:")
class CannotLoad(Plain):
    """Loads a file that does not exist."""

    class Storage(ModelStorage):
        def load(self, directory: Path) -> None:
            raise FileNotFoundError("elsewhere.pt")

    def setup(self) -> None:
        self.storage = self.Storage(self)


@told(
    "scenario=class: save and load: expected a new strategy to answer as the saved one did, got others, the answers for "
    "qnli, ag_news (tensors that differ: readouts.0.layer.weight, readouts.0.layer.bias)."
)
class Forgetful(Plain):
    """Its `load` does not restore the learned tasks, so that their readouts are not found."""

    Options: ClassVar[type[TrainingOptions]] = TaskwiseOptions

    class Storage(ModelStorage):
        def load(self, directory: Path) -> None:
            super().load(directory)
            self._strategy.learned.clear()

    def setup(self) -> None:
        self.storage = self.Storage(self)


def nudge(strategy: Any, size: float) -> None:
    """Add a number to the first graftable tensor."""
    with torch.no_grad():
        strategy.space.parameters(strategy.model.backbone)[0].add_(size)


@told(f"seeds: expected the same result from the same seed, also after other draws {ANOTHER}")
class DrawsGlobally(Plain):
    """Draws from the global generators before they are seeded."""

    def setup(self) -> None:
        self.drawn = float(torch.rand(1)) + np.random.random() + random.random()

    def begin(self, task: Any) -> Training:
        nudge(self, self.drawn)
        return super().begin(task)


@told(ANOTHER)
class MarksTheStream(Plain):
    """Leaves a counter in the model that the next strategy reads."""

    def setup(self) -> None:
        self.model.uses = getattr(self.model, "uses", 0) + 1  # type: ignore[assignment]

    def begin(self, task: Any) -> Training:
        nudge(self, float(self.model.uses))  # type: ignore[arg-type]
        return super().begin(task)


@told(ANOTHER)
class DoesNotResume(Plain):
    """Loads θ_pre after an evaluation during training."""

    def answering(self, task: Any) -> Any:
        if self.training is not None:
            self.pre_trained.load_(self.model)
        return nullcontext()


@told(
    "seeds: expected seed=1 to give another result than seed=0, got the very same answers and tensors for qnli, ag_news, "
    "sst2. Draw from generators seeded by self.phase_seed(…)"
)
class OneSeed(Plain):
    """Ignores the seed."""

    def setup(self) -> None:
        self.seed = 0


@told(
    "rows: expected the same result of qnli with any rows of later tasks (ag_news, sst2), got others, the "
    f"answers for qnli (tensors that differ: {QUERY}, ",
    "rows: expected the same result of qnli, ag_news with any rows of later tasks (sst2), got others, the "
    f"answers for qnli, ag_news (tensors that differ: {QUERY}, ",
)
class ReadsLaterRows(Plain):
    """Takes a step on rows of the next task."""

    def begin(self, task: Any) -> Training:
        for later in self.stream.tasks[task.label + 1 : task.label + 2]:
            fine_tune(self.model, later.train, self.options, steps=1, seed=self.phase_seed("fine_tune", task))
        return super().begin(task)


@told("of qnli to be the same with any test rows, got others, the answers for qnli (tensors")
class CountsTestLabels(Plain):
    """Counts the test rows with the first label."""

    def commit(self, task: Any, training: Training) -> None:
        nudge(self, 1e-2 * float((task.test.labels == task.classes[0]).sum()))


@told(
    "readouts: expected learning ag_news to leave the readout that answers qnli, got "
    "readouts.0.layer.weight, readouts.0.layer.bias moved. Check begin(), commit() and answering()"
)
class MovesAnotherReadout(Plain):
    """Changes the readout of the first task when it learns the second."""

    @torch.no_grad()
    def commit(self, task: Any, training: Training) -> None:
        if task.label == 1:
            for parameter in self.model.readout_module(0).parameters():
                parameter.mul_(0.5)


@told("scenario=class: two tasks trained and evaluated: expected no error, got IndexError")
class NeedsTheTask(Plain):
    """Looks for a readout of each task's own, with its weight and bias."""

    def answering(self, task: Any) -> Any:
        _ = (tensors := self.model.learned_readouts()) and tensors[2 * task.label]
        return nullcontext()


@pytest.mark.sampled(
    "ClaimsTooMuch",
    "DrawsGlobally",
    "EmptyLedger",
    "KeepsNothing",
    "MovesWhatIsFrozen",
    "NeedsTheTask",
    "SavesNothing",
    "WidensLogits",
    share=0.1,
)
@pytest.mark.parametrize("cls", DAMAGE, ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_strategy_is_told_what_is_wrong(cls: Any) -> None:
    found = faults(cls)
    for message in DAMAGE[cls]:
        assert sum(message in fault for fault in found) == 1, "\n".join(found)


@pytest.mark.sampled(share=0.15)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_memory_of_few_rows_passes() -> None:
    """A full memory may get shorter rows, so `bytes_kept` may fall."""
    check_strategy(registry.strategy("gdumb"), mem_size=8)


@pytest.mark.parametrize(("name", "rows", "why"), [("replay", 2, "for 3 tasks"), ("gdumb", 5, "for 6 labels")])
def test_an_option_that_the_tiny_tasks_are_too_many_for_is_the_callers_error(name: str, rows: int, why: str) -> None:
    with pytest.raises(OptionError, match=f"got mem_size={rows} {why}. Set mem_size="):
        check_strategy(registry.strategy(name), mem_size=rows)


class Selective(Plain):
    """Trains readouts alone, and refuses streams for which it is not made."""

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        if stream.model.readout != "linear" or stream.scenario != "task":
            raise UsageError("Selective trains the linear readout of each task. Give a stream that has them.")

    def begin(self, task: Any) -> Training:
        return self.everything(task, trained=WholeTensors([]))


def test_a_stream_may_be_refused() -> None:
    """A strategy that forgets nothing need not claim it: only a false claim is a fault."""
    check_strategy(Selective, dropout=False)


# -- Streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"scenario": "class"}, {"readout": "generate"}], ids=str)
def test_the_tiny_stream_passes(how: Any) -> None:
    check_stream(tiny_stream(**how))


def test_named_streams_pass(data_directory: Path) -> None:
    check_stream("qnli-agnews-sst2", data=str(data_directory), shots=4)
    check_stream("sst2", data="demo")


def stream_with(**changes: Any) -> Stream:
    """Return the tiny stream with a changed second task."""
    stream = tiny_stream()
    return replace(stream, tasks=(stream.tasks[0], replace(stream.tasks[1], **changes)))


def stream_faults(stream: Any, **arguments: Any) -> list[str]:
    with pytest.raises(ConformanceError) as caught:
        check_stream(stream, **arguments)
    return list(caught.value.faults)


@cache
def broken_streams() -> dict[str, tuple[Stream, str]]:
    whole, texts = tiny_stream(), tiny_stream(["qnli"], readout="generate")
    task = whole.tasks[1]
    zeros, beyond = torch.zeros(16, dtype=torch.int64), task.test.labels + 3
    nothing = replace(task.train, tokens=task.train.tokens.clone().clamp_(max=4))
    repeated = "expected no test row among the training rows, got 24 of 24. Drop them from the training rows."
    return {
        "no tasks": (replace(whole, tasks=()), "tasks: expected one at least, got none."),
        "metric": (
            stream_with(definition=replace(task.definition, metric="f1")),
            "ag_news: metric must be 'accuracy' or 'macro_f1' for 4 labels: 'f1' is that of label 1 of two.",
        ),
        "empty": (stream_with(test=task.test.subset([])), "ag_news: expected rows in the test split, got none."),
        "missing": (
            stream_with(test=replace(task.test, labels=zeros)),
            "ag_news: expected rows of every label in the test split, got none of [1, 2, 3].",
        ),
        "beyond": (
            stream_with(test=replace(task.test, labels=beyond)),
            "ag_news: expected labels of (0, 1, 2, 3) in the test split, got [4, 5, 6] too.",
        ),
        "unread": (
            stream_with(test=replace(task.test, tokens=task.test.tokens + 10_000)),
            "ag_news: its test rows read by the model: expected no error, got",
        ),
        "words": (
            stream_with(train=nothing),
            "ag_news: expected words that the tokenizer knows in every row, got 24 of 24 train rows without any.",
        ),
        "repeated": (stream_with(test=task.train), f"ag_news: {repeated}"),
        "repeated prompts": (
            replace(texts, tasks=(replace(texts.tasks[0], test=texts.tasks[0].train),)),
            f"qnli: {repeated}",
        ),
    }


@pytest.mark.parametrize("name", broken_streams())
def test_a_broken_stream_is_told_what_is_wrong(name: str) -> None:
    stream, message = broken_streams()[name]
    found = stream_faults(stream)
    assert sum(fault.startswith(message) for fault in found) == 1, "\n".join(found)
