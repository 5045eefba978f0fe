"""The public conformance checks: every registered strategy passes, and each check can fail."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import forgetfree.testing
from forgetfree import registry
from forgetfree.errors import OptionError, UnknownNameError
from forgetfree.ledger import Ledger
from forgetfree.options import option
from forgetfree.strategies.continual_ft import ContinualFT
from forgetfree.strategy import ContinualStrategy, TaskwiseOptions
from forgetfree.streams import Stream
from forgetfree.testing import ConformanceError, check_strategy, check_stream, tiny_stream
from forgetfree.training import TrainingOptions

#: What suits 24 rows and a model of width 16, for strategies that have such options.
TINY = {"sparsity": 0.05, "mask_steps": 2, "mask_batch_size": 12, "mask_evaluations": 2, "delta_t": 1}


def tiny_options(cls: Any) -> dict[str, Any]:
    return {name: value for name, value in TINY.items() if name in cls.Options.__dataclass_fields__}


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


def test_what_is_no_strategy_is_refused() -> None:
    (fault,) = faults(dict)
    assert fault == "class: expected a subclass of forgetfree.strategy.ContinualStrategy, got <class 'dict'>."


def test_a_constructor_is_refused() -> None:
    class Own(ContinualStrategy):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)

    (fault,) = faults(Own)
    assert fault.startswith("__init__: expected ContinualStrategy's own, got ") and "Own.__init__. Drop it" in fault


def test_a_strategy_of_a_strategy_is_refused() -> None:
    (fault,) = faults(type("Own", (ContinualFT,), {}))
    assert "strategies are final, got a subclass of ContinualFT, which is the strategy 'continual-ft'" in fault


@dataclass(frozen=True, kw_only=True)
class Silent(TrainingOptions):
    strength: float = 1.0


@dataclass(frozen=True, kw_only=True)
class OutOfBounds(TrainingOptions):
    strength: float = option(-1.0, "how much", above=0)


class Bare(TrainingOptions):
    pass


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"Options": dict}, "Options: expected a subclass of TrainingOptions, got <class 'dict'>."),
        ({"taskwise": True}, "Options: with taskwise = True, expected a subclass of TaskwiseOptions"),
        ({"Options": Bare}, "Options: expected a frozen dataclass, got Bare, which is none. Decorate it"),
        ({"Options": Silent}, "Options: expected a help text for every field, got none for strength. Make it by"),
        ({"Options": OutOfBounds}, "Options: constructed from their defaults: expected no error, got OptionError"),
    ],
)
def test_options_that_are_none_are_refused(members: dict[str, Any], message: str) -> None:
    (fault,) = faults(type("Own", (ContinualStrategy,), members))
    assert fault.startswith(message)


def test_faults_are_reported_together() -> None:
    found = faults(type("Own", (ContinualFT,), {"Options": Silent, "__init__": lambda self: None}))
    assert [fault.split(":")[0] for fault in found] == ["__init__", "class", "Options"]


def test_an_option_that_there_is_not_is_the_callers_error() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown option of ContinualFT 'setps'. Did you mean 'steps'"):
        check_strategy(ContinualFT, setps=3)


class Picky(ContinualStrategy):
    """Its defaults do not suit the tiny model."""

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        if options.batch_size > 7:
            raise OptionError("batch_size must be less than 8.")


def test_defaults_must_do_unless_others_are_given() -> None:
    (fault,) = faults(Picky)
    assert fault.startswith(
        "defaults: constructed without options: expected no error, got OptionError: batch_size must"
    )
    check_strategy(Picky, batch_size=3)


# -- What a strategy does --------------------------------------------------------------------------------


class Raises(ContinualStrategy):
    """In the midst of it all."""

    def before_step(self) -> None:
        raise ZeroDivisionError("by nothing")


class MovesInEvaluation(ContinualStrategy):
    """Leaves a trace of every evaluation."""

    @torch.no_grad()
    def enter_evaluation(self, task: Any) -> None:
        self.space.parameters(self.task_model.backbone)[0].add_(0.01)


class Remembers(ContinualStrategy):
    """Answers by what it was asked before."""

    def setup(self) -> None:
        self.asked = 0

    def enter_evaluation(self, task: Any) -> None:
        self.asked += 1

    def forward(self) -> Tensor:
        return super().forward() + (0 if self.is_training else self.asked)


class Shrinks(ContinualStrategy):
    """Says that it keeps less and less."""

    def bytes_kept(self) -> int:
        return 10 - len(self.learned)


class Halves(ContinualStrategy):
    """Keeps half a byte."""

    def bytes_kept(self) -> Any:
        return 0.5


def embeddings(strategy: Any) -> Tensor:
    found: Tensor = strategy.task_model.backbone.embeddings.word_embeddings.weight
    return found


class MovesWhatIsFrozen(ContinualStrategy):
    """Moves an embedding at every step, and puts it back after the task."""

    @torch.no_grad()
    def after_step(self) -> None:
        embeddings(self)[7].add_(1)

    @torch.no_grad()
    def commit(self, task: Any) -> None:
        embeddings(self)[7].sub_(float(self.steps(task)))
        embeddings(self).copy_(self.kept)

    def setup(self) -> None:
        self.kept = embeddings(self).detach().clone()

    def suspend(self) -> None:
        self.moved = embeddings(self).detach().clone()
        embeddings(self).data.copy_(self.kept)

    def resume(self, snapshot: Any) -> None:
        super().resume(snapshot)
        embeddings(self).data.copy_(self.moved)


class LeavesAnEmbedding(ContinualStrategy):
    """Moves what nobody puts back."""

    @torch.no_grad()
    def commit(self, task: Any) -> None:
        embeddings(self)[7].fill_(1)


class LeavesAHook(ContinualStrategy):
    """Leaves code in the model."""

    def commit(self, task: Any) -> None:
        if task.label == 1:
            self.task_model.dropout.register_forward_hook(lambda module, inputs, output: output * 1.5)


class LeavesItFrozen(ContinualStrategy):
    """Freezes a layer for good."""

    def setup(self) -> None:
        embeddings(self).requires_grad_(False)


class UnknownPhase(ContinualStrategy):
    """Dreams of no task, and says nothing."""

    def prepare(self, task: Any) -> None:
        with self.phase("dream", replace(task, definition=replace(task.definition, name="nothing")), 3):  # type: ignore[arg-type]
            pass


class Miscounts(ContinualStrategy):
    """Announces more than it does."""

    @contextmanager
    def phase(self, name: Any, task: Any, steps: int) -> Iterator[Any]:
        with super().phase(name, task, steps + (name == "train")) as on_step:
            yield on_step


class Mute(ContinualStrategy):
    """Says nothing of its training."""

    @contextmanager
    def phase(self, name: Any, task: Any, steps: int) -> Iterator[Any]:
        if name == "train":
            yield lambda step, loss: None
            return
        with super().phase(name, task, steps) as on_step:
            yield on_step


class WidensLogits(ContinualStrategy):
    """Answers for a label too many."""

    def forward(self) -> Tensor:
        logits = super().forward()
        return logits if self.is_training else torch.cat([logits, logits[:, :1]], 1)


class NotFinite(ContinualStrategy):
    """Divides by zero."""

    def forward(self) -> Tensor:
        logits = super().forward()
        return logits if self.is_training else logits / 0


class LearnsNothing(ContinualStrategy):
    """Takes no step."""

    def steps(self, task: Any) -> int:
        return 0


class ClaimsTooMuch(ContinualStrategy):
    """Forgets, and says that it does not."""

    forget_free: ClassVar[bool] = True


class AllFresh(ContinualStrategy):
    """Says that no answer changes."""

    def stale(self, learned: Any) -> list[Any]:
        return []


class EmptyLedger(ContinualStrategy):
    """Trains everything, and records nothing."""

    def setup(self) -> None:
        self.ledger = Ledger(self.space, self.stream.loaded.fingerprint)


class SavesNothing(ContinualStrategy):
    """Leaves nothing behind."""

    def save(self, directory: Path) -> None:
        pass

    def load(self, directory: Path) -> None:
        pass


class CannotLoad(ContinualStrategy):
    """Looks for another file."""

    def load(self, directory: Path) -> None:
        raise FileNotFoundError("elsewhere.pt")


class Forgetful(ContinualStrategy):
    """Its `load` does not say which tasks it can answer, so that their readouts are not found."""

    Options: ClassVar[type[TrainingOptions]] = TaskwiseOptions
    taskwise: ClassVar[bool] = True

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.learned.clear()


def nudge(strategy: Any, size: float) -> None:
    """Change what is learned."""
    with torch.no_grad():
        strategy.space.parameters(strategy.task_model.backbone)[0].add_(size)


class DrawsAnew(ContinualStrategy):
    """By a generator that nobody seeds."""

    def prepare(self, task: Any) -> None:
        nudge(self, random.SystemRandom().random())


class DrawsGlobally(ContinualStrategy):
    """By the global generator, before it is seeded."""

    def setup(self) -> None:
        self.drawn = float(torch.rand(1)) + np.random.random() + random.random()

    def prepare(self, task: Any) -> None:
        nudge(self, self.drawn)


class MarksTheStream(ContinualStrategy):
    """Leaves a note in the model for the next one."""

    def setup(self) -> None:
        self.task_model.uses = getattr(self.task_model, "uses", 0) + 1  # type: ignore[assignment]

    def prepare(self, task: Any) -> None:
        nudge(self, float(self.task_model.uses))  # type: ignore[arg-type]


class DoesNotResume(ContinualStrategy):
    """Goes on from θ_pre after others were evaluated."""

    def suspend(self) -> None:
        self.pristine.load_(self.task_model)

    def resume(self, snapshot: Any) -> None:
        pass


class NeedsTheTask(ContinualStrategy):
    """Looks for a readout by the task."""

    def enter_evaluation(self, task: Any) -> None:
        _ = self.task_model.linears[str(task.label)]


@pytest.mark.parametrize(
    ("cls", "messages"),
    [
        (Raises, ["got ZeroDivisionError: by nothing (test_testing.py:"]),
        (
            MovesInEvaluation,
            [
                "evaluate: expected to find the model as it was before, got backbone.",
                "evaluate: expected the same answers in",
            ],
        ),
        (Remembers, ["evaluate: expected the same answers in any order of the tasks, got others for qnli, ag_news."]),
        (Shrinks, ["bytes_kept: expected whole numbers from 0 that never fall from task to task, got 10, 9, 8 before"]),
        (
            Halves,
            ["bytes_kept: expected whole numbers from 0 that never fall from task to task, got 0.5, 0.5, 0.5 before"],
        ),
        (
            MovesWhatIsFrozen,
            [
                "expected an update to move nothing but what parameters(task) lists, got backbone.embeddings.word_embeddings"
            ],
        ),
        (
            LeavesAnEmbedding,
            [
                "fresh start: expected the next strategy to find the pre-trained model, got backbone.embeddings.word_embeddings"
            ],
        ),
        (LeavesAHook, ["fresh start: expected the next strategy to answer as the pre-trained model does"]),
        (
            LeavesItFrozen,
            ["fresh start: expected parameters to ask for gradients again, got requires_grad = False for"],
        ),
        (
            UnknownPhase,
            [
                "expected a phase of fine_tune, localize, train, evaluate, got 'dream'",
                "expected a task of the stream, got 'nothing'",
                "expected to hear of each step of dream that was announced, 1 to 3, got 0: none",
            ],
        ),
        (Miscounts, ["expected to hear of each step of train that was announced, 1 to 4, got 3: 1, 2, 3."]),
        (Mute, ["progress: expected to hear of training, got no step of it."]),
        (
            WidensLogits,
            ["evaluate: expected logits (n, n_labels) by task, {'qnli': (16, 2), 'ag_news': (16, 4)}, got {'qnli'"],
        ),
        (NotFinite, ["evaluate: expected finite logits, got others for qnli, ag_news."]),
        (LearnsNothing, ["training: expected other answers than before, got the very same for qnli, ag_news."]),
        (ClaimsTooMuch, ["forget_free: claimed as True, but learning ag_news changed the logits of qnli"]),
        (
            AllFresh,
            ["by learning qnli, got a list without qnli", "by learning ag_news, got a list without qnli, ag_news"],
        ),
        (EmptyLedger, ["ledger: expected entries that no task owns to hold θ_pre, got "]),
        (
            SavesNothing,
            ["save and load: expected a new strategy to answer as the saved one did, got other logits for qnli"],
        ),
        (CannotLoad, ["save and load: expected no error, got FileNotFoundError: elsewhere.pt (test_testing.py:"]),
        (Forgetful, ["save and load with scenario=class: expected a new strategy to answer as the saved one did"]),
        (
            DrawsAnew,
            ["seeds: expected the same result from the same seed, got another in the answers for qnli, ag_news"],
        ),
        (
            DrawsGlobally,
            ["after the last task after other draws from the global generators. Draw from generators of your"],
        ),
        (
            MarksTheStream,
            ["fresh start: expected a new strategy on a used stream to learn as on a fresh one, got another"],
        ),
        (
            DoesNotResume,
            ["evaluation: expected the same result with an evaluation after each step as with one after each"],
        ),
        (NeedsTheTask, ["scenario=class: two tasks trained and evaluated: expected no error, got KeyError"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_strategy_is_told_what_is_wrong(cls: Any, messages: list[str]) -> None:
    """Each message is that of one fault, so that no other check is needed to find it."""
    found = faults(cls)
    for message in messages:
        assert sum(message in fault for fault in found) == 1, "\n".join(found)


def test_a_strategy_that_forgets_nothing_need_not_say_so() -> None:
    """Only the false claim is a fault."""
    cls = type("Modest", (ContinualStrategy,), {"parameters": lambda self, task: ([], [*self._own(task)])})
    cls._own = lambda self, task: self.task_model.readout_module(task.label).parameters()  # type: ignore[attr-defined]
    check_strategy(cls, dropout=False)


def test_the_callers_generators_are_left_alone() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    check_strategy(ContinualFT)
    drawn = float(torch.rand(1)), random.random(), np.random.random()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert drawn == (float(torch.rand(1)), random.random(), np.random.random())


def test_the_error_reads_as_a_list() -> None:
    error = ConformanceError("Own does not keep the contract of a strategy", ["one thing.", "another."])
    assert str(error) == "Own does not keep the contract of a strategy (2 faults):\n- one thing.\n- another."
    assert error.faults == ("one thing.", "another.")


def test_the_public_names() -> None:
    assert forgetfree.testing.__all__ == ["ConformanceError", "check_strategy", "check_stream", "tiny_stream"]
    assert all(getattr(forgetfree.testing, name).__name__ == name for name in forgetfree.testing.__all__)
    with pytest.raises(AttributeError, match=r"module 'forgetfree.testing' has no attribute 'check'"):
        _ = forgetfree.testing.check


# -- Streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_the_tiny_stream_passes(scenario: Any) -> None:
    check_stream(tiny_stream(scenario=scenario))


def test_named_streams_pass(data_directory: Path, model_directory: Any) -> None:
    check_stream("qnli-agnews-sst2", data=str(data_directory))
    check_stream("qnli,sst2", data=str(data_directory), model=str(model_directory("roberta-mlm")), shots=4)
    check_stream("sst2", data="demo")


def stream_with(**changes: Any) -> Stream:
    """The tiny stream with another second task."""
    stream = tiny_stream()
    return replace(stream, tasks=(stream.tasks[0], replace(stream.tasks[1], **changes)))


def stream_faults(stream: Any, **arguments: Any) -> list[str]:
    with pytest.raises(ConformanceError) as caught:
        check_stream(stream, **arguments)
    return list(caught.value.faults)


def relabelled(rows: Any, labels: Tensor) -> Any:
    return replace(rows, labels=labels)


class Restless:
    """Rows that are never read the same way twice."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.count = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)

    def batch(self, indices: Any) -> Any:
        self.count += 1
        x, y, t = self.rows.batch(indices)
        return x.clone().index_fill_(1, torch.tensor([1]), 10 + self.count % 7), y, t


def broken_streams() -> dict[str, tuple[Stream, str]]:
    whole = tiny_stream()
    task = whole.tasks[1]
    definition = task.definition
    empty = task.test.subset([])
    zeros, beyond = torch.zeros(16, dtype=torch.int64), task.test.labels + 3
    nothing = replace(task.train, tokens=task.train.tokens.clone().clamp_(max=4))
    first, second = whole.benchmark.train_stream
    turned = SimpleNamespace(train_stream=[second, first], test_stream=whole.benchmark.test_stream)
    other = tiny_stream(("ag_news", "qnli")).benchmark
    shared = tiny_stream(scenario="class").benchmark
    return {
        "no tasks": (replace(whole, tasks=()), "tasks: expected one at least, got none."),
        "twice": (replace(whole, tasks=(task, task)), "tasks: expected each once, got ag_news more than once."),
        "label": (stream_with(label=0), "tasks: expected labels 0, 1, … by position, got [0, 0]."),
        "metric": (
            stream_with(definition=replace(definition, metric="f1")),
            "ag_news: expected the metric accuracy, or f1 for two labels, got 'f1' for 4.",
        ),
        "classes": (stream_with(classes=(0, 1, 2, 3, 4)), "ag_news: expected a class a label, got (0, 1, 2, 3, 4) for"),
        "empty": (stream_with(test=empty), "ag_news: expected rows in the test split, got none."),
        "missing": (
            stream_with(test=relabelled(task.test, zeros)),
            "ag_news: expected rows of every label in the test split, got none of [1, 2, 3].",
        ),
        "beyond": (
            stream_with(test=relabelled(task.test, beyond)),
            "ag_news: expected labels of (0, 1, 2, 3) in the test split, got [4, 5, 6] too.",
        ),
        "unread": (
            stream_with(test=replace(task.test, tokens=task.test.tokens + 10_000)),
            "ag_news: its test rows read by the model: expected no error, got",
        ),
        "restless": (
            stream_with(train=Restless(task.train)),
            "ag_news: expected to read the same train row twice, got two.",
        ),
        "words": (
            stream_with(train=nothing),
            "ag_news: expected words that the tokenizer knows in every row, got 24 of 24 train rows without any.",
        ),
        "repeated": (
            stream_with(test=task.train),
            "ag_news: expected no test row among the training rows, got 24 of 24. Drop them from the training rows.",
        ),
        "order": (
            replace(whole, benchmark=turned),
            "benchmark: expected one train experience a task, in order, got 2.",
        ),
        "other rows": (
            replace(whole, benchmark=other),
            "benchmark: expected the train experience 0 to hold the rows of qnli in order, got other",
        ),
        "task label": (
            replace(whole, benchmark=shared),
            "benchmark: expected the test experience 1 to hold the rows of ag_news with task label 1 (scenario=task), got [0].",
        ),
    }


@pytest.mark.parametrize("name", broken_streams())
def test_a_broken_stream_is_told_what_is_wrong(name: str) -> None:
    stream, message = broken_streams()[name]
    found = stream_faults(stream)
    assert sum(fault.startswith(message) for fault in found) == 1, "\n".join(found)


def test_a_few_repeated_rows_are_a_warning() -> None:
    task = tiny_stream().tasks[1]
    test = replace(task.test)
    mixed = type(test).of(
        [task.train[0][0].tolist(), *(test[i][0].tolist() for i in range(1, len(test)))],
        test.labels.tolist(),
        test.task,
        test.pad,
    )
    stream = tiny_stream()
    expected = "ag_news: expected no test row among the training rows, got 1 of 16"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = stream_faults(replace(stream, tasks=(stream.tasks[0], replace(task, test=mixed))))
    assert [str(each.message).startswith(expected) for each in caught] == [True]
    assert all(fault.startswith("benchmark: ") for fault in found)  # which holds the rows of before


def test_a_stream_that_is_another_each_time_is_found(data_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forgetfree.testing import streams

    seeds = iter(range(10))
    real = streams.make_stream
    monkeypatch.setattr(streams, "make_stream", lambda *a, **k: real(*a, **k | {"seed": next(seeds)}))
    found = stream_faults("sst2", data=str(data_directory), shots=4)
    assert found[0].startswith("seeds: expected the same rows of sst2 at every loading, got others in train.")
    assert found[1].startswith("seeds: expected the same untrained readout of sst2 at every loading, got another.")
