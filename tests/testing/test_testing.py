"""The public conformance checks: every registered strategy passes, and each check can fail."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.strategy import ContinualStrategy, ModelStorage, TaskwiseOptions, Training
from forgetfree.continual.stream import Stream
from forgetfree.core.trained import WholeTensors
from forgetfree.errors import OptionError, UnknownNameError, UsageError
from forgetfree.ledger import Ledger
from forgetfree.options import option
from forgetfree.strategies.continual_ft import ContinualFT
from forgetfree.testing import ConformanceError, check_strategy, check_stream, tiny_stream
from forgetfree.training.step import fine_tune
from forgetfree.training.training_options import TrainingOptions

#: What suits 24 rows and a model of width 16, for strategies that have such options.
TINY = {"sparsity": 0.05, "mask_steps": 2, "mask_batch_size": 12, "delta_t": 1}


def tiny_options(cls: Any) -> dict[str, Any]:
    return {name: value for name, value in TINY.items() if name in cls.Options.__dataclass_fields__}


@pytest.mark.long
@pytest.mark.sampled("fine-tune", "grafting-continual", "joint", "o-lora", "wsn")
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


class Plain(ContinualStrategy):
    """Trains everything, and answers with the one model, as it is: what the strategies below share."""

    def begin(self, task: Any) -> Training:
        return self.everything(task)

    def answering(self, task: Any) -> Any:
        return nullcontext()


# -- The class -------------------------------------------------------------------------------------------


def test_what_is_no_strategy_is_refused() -> None:
    (fault,) = faults(dict)
    assert fault == "class: expected a subclass of forgetfree.continual.strategy.ContinualStrategy, got <class 'dict'>."


def test_a_constructor_is_refused() -> None:
    class Own(Plain):
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
        ({"Options": Bare}, "Options: expected a frozen dataclass, got Bare, which is none. Decorate it"),
        ({"Options": Silent}, "Options: expected a help text for every field, got none for strength. Make it by"),
        ({"Options": OutOfBounds}, "Options: constructed from their defaults: expected no error, got OptionError"),
    ],
)
def test_options_that_are_none_are_refused(members: dict[str, Any], message: str) -> None:
    (fault,) = faults(type("Own", (Plain,), members))
    assert fault.startswith(message)


def test_faults_are_reported_together() -> None:
    found = faults(type("Own", (ContinualFT,), {"Options": Silent, "__init__": lambda self: None}))
    assert [fault.split(":")[0] for fault in found] == ["__init__", "class", "Options"]


def test_an_option_that_there_is_not_is_the_callers_error() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown option of ContinualFT 'setps'. Did you mean 'steps'"):
        check_strategy(ContinualFT, setps=3)


class Picky(Plain):
    """Its defaults do not suit the tiny model."""

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        if options.batch_size > 7:
            raise OptionError("batch_size must be less than 8.")


@pytest.mark.sampled(share=0.3)
def test_defaults_must_do_unless_others_are_given() -> None:
    (fault,) = faults(Picky)
    assert fault.startswith(
        "defaults: constructed without options: expected no error, got OptionError: batch_size must"
    )
    check_strategy(Picky, batch_size=3)


# -- What a strategy does --------------------------------------------------------------------------------


class Around:
    """What is trained, with something done before and after each update."""

    def __init__(self, trained: Any, before: Any = lambda: None, after: Any = lambda: None) -> None:
        self.parameters, self.touched = trained.parameters, trained.touched
        self.collect, self.write = before, after


class Raises(Plain):
    """In the midst of it all."""

    def begin(self, task: Any) -> Training:
        training = super().begin(task)
        return replace(training, trained=Around(training.trained, before=self._fail))

    def _fail(self) -> None:
        raise ZeroDivisionError("by nothing")


class MovesInEvaluation(Plain):
    """Leaves a trace of every evaluation."""

    @torch.no_grad()
    def answering(self, task: Any) -> Any:
        self.space.parameters(self.model.backbone)[0].add_(0.01)
        return nullcontext()


class Saying(ModelStorage):
    """Keeps the model, and says another size."""

    said: Any = 0

    def bytes_kept(self) -> Any:
        return self.said


class KeepsNothing(Plain):
    """Says so, and answers otherwise than before."""

    def setup(self) -> None:
        self.storage = Saying(self)


class KeepsOne(Plain):
    """Says that a byte is enough for all weights."""

    said = 1

    def setup(self) -> None:
        self.storage = kept = Saying(self)
        kept.said = self.said


class KeepsAsMuch(KeepsOne):
    """Says that what is learned takes no more than what was kept before."""

    said = 600


def embeddings(strategy: Any) -> Tensor:
    found: Tensor = strategy.model.backbone.embeddings.word_embeddings.weight
    return found


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


class LeavesAnEmbedding(Plain):
    """Moves what nobody puts back."""

    @torch.no_grad()
    def commit(self, task: Any, training: Training) -> None:
        embeddings(self)[7].fill_(1)


class LeavesAHook(Plain):
    """Leaves code in the model."""

    def commit(self, task: Any, training: Training) -> None:
        if task.label == 1:
            self.model.dropout.register_forward_hook(lambda module, inputs, output: output * 1.5)


class LeavesItFrozen(Plain):
    """Freezes a layer for good."""

    def setup(self) -> None:
        embeddings(self).requires_grad_(False)


class UnknownPhase(Plain):
    """Dreams of no task, and says nothing."""

    def begin(self, task: Any) -> Training:
        with self.monitor.phase("nothing", "dream", 3):  # type: ignore[arg-type]
            return super().begin(task)


class Mute(Plain):
    """Says nothing of its training."""

    def begin(self, task: Any) -> Training:
        fine_tune(self.model, task.train, self.options, steps=3, seed=self.phase_seed("train", task))
        return self.everything(task, steps=0)


class WidensLogits(Plain):
    """Answers for a label too many."""

    def answering(self, task: Any) -> Any:
        return nullcontext(lambda x, labels: torch.cat([logits := self.model(x, labels), logits[:, :1]], 1))


class NotFinite(Plain):
    """Divides by zero."""

    def answering(self, task: Any) -> Any:
        return nullcontext(lambda x, labels: self.model(x, labels) / 0)


class LearnsNothing(Plain):
    """Takes no step."""

    def begin(self, task: Any) -> Training:
        return self.everything(task, steps=0)


class ClaimsTooMuch(Plain):
    """Forgets, and says that it does not."""

    forget_free: ClassVar[bool] = True


class AllFresh(Plain):
    """Says that no answer changes."""

    def changed_by(self, learned: Any) -> list[Any]:
        return []


class EmptyLedger(Plain):
    """Trains everything, and records nothing."""

    def setup(self) -> None:
        self.ledger = Ledger(self.space, self.stream.loaded.fingerprint)


class SavesNothing(Plain):
    """Leaves nothing behind."""

    class Storage(ModelStorage):
        def save(self, directory: Path) -> None:
            pass

        def load(self, directory: Path) -> None:
            pass

    def setup(self) -> None:
        self.storage = self.Storage(self)


class CannotLoad(Plain):
    """Looks for another file."""

    class Storage(ModelStorage):
        def load(self, directory: Path) -> None:
            raise FileNotFoundError("elsewhere.pt")

    def setup(self) -> None:
        self.storage = self.Storage(self)


class Forgetful(Plain):
    """Its `load` does not say which tasks it can answer, so that their readouts are not found."""

    Options: ClassVar[type[TrainingOptions]] = TaskwiseOptions

    class Storage(ModelStorage):
        def load(self, directory: Path) -> None:
            super().load(directory)
            self._strategy.learned.clear()

    def setup(self) -> None:
        self.storage = self.Storage(self)


def nudge(strategy: Any, size: float) -> None:
    """Change what is learned."""
    with torch.no_grad():
        strategy.space.parameters(strategy.model.backbone)[0].add_(size)


class DrawsAnew(Plain):
    """By a generator that nobody seeds."""

    def begin(self, task: Any) -> Training:
        nudge(self, random.SystemRandom().random())
        return super().begin(task)


class DrawsGlobally(Plain):
    """By the global generator, before it is seeded."""

    def setup(self) -> None:
        self.drawn = float(torch.rand(1)) + np.random.random() + random.random()

    def begin(self, task: Any) -> Training:
        nudge(self, self.drawn)
        return super().begin(task)


class MarksTheStream(Plain):
    """Leaves a note in the model for the next one."""

    def setup(self) -> None:
        self.model.uses = getattr(self.model, "uses", 0) + 1  # type: ignore[assignment]

    def begin(self, task: Any) -> Training:
        nudge(self, float(self.model.uses))  # type: ignore[arg-type]
        return super().begin(task)


class DoesNotResume(Plain):
    """Goes on from θ_pre after others were evaluated."""

    def answering(self, task: Any) -> Any:
        if self.training is not None:
            self.pre_trained.load_(self.model)
        return nullcontext()


class OneSeed(Plain):
    """Does not listen to the seed."""

    def setup(self) -> None:
        self.seed = 0


class ReadsLaterRows(Plain):
    """A step on the next task's."""

    def begin(self, task: Any) -> Training:
        for later in self.stream.tasks[task.label + 1 : task.label + 2]:
            fine_tune(self.model, later.train, self.options, steps=1, seed=self.phase_seed("fine_tune", task))
        return super().begin(task)


class ReadsTheLastTask(Plain):
    """While it learns the second; in which order rows and words come does not matter."""

    def begin(self, task: Any) -> Training:
        if task.label == 1:
            nudge(self, 1e-6 * float(self.stream.tasks[-1].train.tokens.sum()))
        return super().begin(task)


class CountsTestLabels(Plain):
    """How many rows have the first."""

    def commit(self, task: Any, training: Training) -> None:
        nudge(self, 1e-2 * float((task.test.labels == task.classes[0]).sum()))


class WritesTestLabels(Plain):
    """All 0."""

    def begin(self, task: Any) -> Training:
        task.test.labels.zero_()
        return super().begin(task)


class MovesAnotherReadout(Plain):
    """That of the first task, once it has learned the second."""

    @torch.no_grad()
    def commit(self, task: Any, training: Training) -> None:
        if task.label == 1:
            for parameter in self.model.readout_module(0).parameters():
                parameter.mul_(0.5)


class NeedsALayer(Plain):
    """Looks for a readout's tensors, which prompts have not."""

    def begin(self, task: Any) -> Training:
        _ = self.model.readouts()[0]
        return super().begin(task)


class NeedsTheTask(Plain):
    """Looks for a readout by the task."""

    def answering(self, task: Any) -> Any:
        _ = self.model.linears[str(task.label)]
        return nullcontext()


QUERY = "backbone.encoder.layer.0.attention.self.query.weight"
ALL = "the answers for qnli, ag_news, sst2"
#: Each damage with what the check says of it. Each message is that of one fault, which no other check needs to find.
DAMAGE: dict[type[ContinualStrategy], list[str]] = {
    Raises: ["got ZeroDivisionError: by nothing (test_testing.py:"],
    MovesInEvaluation: [
        f"evaluate: expected to find the model as it was before, got {QUERY}",
        f"evaluate: expected the same answers in any order of the tasks, got others, {ALL} (tensors that differ: {QUERY})",
    ],
    KeepsNothing: [
        "bytes_kept: expected whole numbers, 0 or more, and above 0 once a task is learned, which is answered by what is kept, "
        "got 0, 0, 0, 0 before the first task and after each. Count in storage.bytes_kept()"
    ],
    KeepsOne: [
        "bytes_kept: expected at least 560 after qnli, where 4482 trained numbers other than θ_pre's answer the tasks learned "
        "(in backbone.encoder.layer.0.attention.output.LayerNorm.bias, "
    ],
    KeepsAsMuch: [
        "bytes_kept: expected more after qnli than before, where 4482 trained numbers other than θ_pre's answer the tasks",
        "up from 0, and 4 bytes for each are more than is counted, got 600 after 600. Count in storage.bytes_kept()",
    ],
    MovesWhatIsFrozen: ["lists as trained.touched and readout, got backbone.embeddings.word_embeddings"],
    LeavesAnEmbedding: [
        "fresh start: expected the next strategy to find the pre-trained model, got backbone.embeddings.word_embeddings"
    ],
    LeavesAHook: [
        "fresh start: expected the next strategy to answer as the pre-trained model does, got other logits for qnli"
    ],
    LeavesItFrozen: [
        "fresh start: expected parameters to ask for gradients again, got requires_grad = False for backbone.emb"
    ],
    UnknownPhase: [
        "expected a phase of fine_tune, localize, train, evaluate, got 'dream'",
        "expected a task of the stream, got 'nothing'",
        "expected to hear of each step of dream that was announced, 1 to 3, got 0: none",
    ],
    Mute: ["progress: expected to hear of the training of every task, got no step of qnli, ag_news, sst2."],
    WidensLogits: [
        "evaluate: expected logits (n, n_labels) by task, {'qnli': (16, 2), 'ag_news': (8, 2), 'sst2': (16, 2)}, got {'qnli'"
    ],
    NotFinite: ["evaluate: expected finite logits, got others for qnli, ag_news, sst2."],
    LearnsNothing: [
        "training: expected other answers by learning a task than before, got the very same for qnli, ag_news, sst2."
    ],
    ClaimsTooMuch: [
        f"forget_free: claimed as True, but learning ag_news changed the answers for qnli (tensors that differ: {QUERY}, "
    ],
    AllFresh: [
        "by learning qnli, got a list without qnli",
        "by learning ag_news, got a list without qnli, ag_news",
        f"by learning sst2, got a list without qnli, ag_news, sst2, though it changed {ALL} (tensors that differ: {QUERY}, ",
    ],
    MovesAnotherReadout: [
        "readouts: expected learning ag_news to leave the readout that answers qnli, got linears.0.weight, linears.0.bias "
        "moved. Look at begin(), commit() and answering()"
    ],
    EmptyLedger: [
        "that do not, in encoder.layer.0.attention.self.query.weight, encoder.layer.0.attention.self.query.bias, "
    ],
    SavesNothing: [
        f"save and load: expected a new strategy to answer as the saved one did, got others, {ALL} (tensors that differ: "
    ],
    CannotLoad: ["save and load: expected no error, got FileNotFoundError: elsewhere.pt (test_testing.py:"],
    Forgetful: [
        "scenario=class: save and load: expected a new strategy to answer as the saved one did, got others, the answers for "
        "qnli, ag_news (tensors that differ: linears.shared.weight, linears.shared.bias)."
    ],
    DrawsAnew: [
        f"seeds: expected the same result from the same seed, got others, {ALL} (tensors that differ: {QUERY}, "
    ],
    DrawsGlobally: [
        "after the last task, after other draws from the global generators. Draw from generators of your",
        f"seeds: expected a result that the seed alone determines, got others, {ALL} (tensors that differ: {QUERY}, ",
    ],
    MarksTheStream: [
        f"fresh start: expected a new strategy on a used stream to learn as on a fresh one, got others, {ALL} (tensors"
    ],
    DoesNotResume: [
        "evaluation: expected the same result with evaluations during training as with one after each task, got others, the "
    ],
    OneSeed: [
        "seeds: expected seed=1 to give another result than seed=0, got the very same answers and tensors for qnli, ag_news, "
        "sst2. Draw from generators seeded by self.phase_seed(…)"
    ],
    ReadsLaterRows: [
        "rows: expected what is learned of qnli to be the same with any rows of later tasks (ag_news, sst2), got others, the "
        f"answers for qnli (tensors that differ: {QUERY}, ",
        "rows: expected what is learned of qnli, ag_news to be the same with any rows of later tasks (sst2), got others, the "
        f"answers for qnli, ag_news (tensors that differ: {QUERY}, ",
    ],
    ReadsTheLastTask: [
        "of qnli, ag_news to be the same with any rows of later tasks (sst2), got others, the answers for"
    ],
    CountsTestLabels: ["of qnli to be the same with any test rows, got others, the answers for qnli (tensors"],
    WritesTestLabels: [
        "rows: expected the stream's rows to stay as they are, got others in qnli (test), ag_news (test), sst2 (test)."
    ],
    NeedsTheTask: ["scenario=class: two tasks trained and evaluated: expected no error, got KeyError"],
    NeedsALayer: [
        "readout=prompt: two tasks trained and evaluated: expected no error, got IndexError: list index out of range"
    ],
}


@pytest.mark.sampled(
    "ClaimsTooMuch",
    "DrawsGlobally",
    "EmptyLedger",
    "KeepsNothing",
    "MovesWhatIsFrozen",
    "NeedsTheTask",
    "SavesNothing",
    "WidensLogits",
    share=0.2,
)
@pytest.mark.parametrize("cls", DAMAGE, ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_strategy_is_told_what_is_wrong(cls: Any) -> None:
    found = faults(cls)
    for message in DAMAGE[cls]:
        assert sum(message in fault for fault in found) == 1, "\n".join(found)


@pytest.mark.sampled(share=0.2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_memory_of_few_rows_passes() -> None:
    """A full memory may come to hold shorter rows: `bytes_kept` falls."""
    check_strategy(registry.strategy("gdumb"), mem_size=8)


@pytest.mark.parametrize(("name", "rows", "why"), [("replay", 2, "for 3 tasks"), ("gdumb", 5, "for 6 labels")])
def test_an_option_that_the_tiny_tasks_are_too_many_for_is_the_callers_error(name: str, rows: int, why: str) -> None:
    with pytest.raises(OptionError, match=f"got mem_size={rows} {why}. Set mem_size="):
        check_strategy(registry.strategy(name), mem_size=rows)


class Curriculum(Plain):
    """The same rows in the same order, whatever the seed, from the second task on; dropout draws."""

    def make_train_dataloader(self, num_workers: int = 0, **kwargs: Any) -> None:
        super().make_train_dataloader(num_workers, **kwargs)
        if self.task.label:
            self.dataloader = self._planned = [self.task.train.batch(range(4))] * len(self._parts)  # type: ignore[assignment]


@pytest.mark.sampled(share=0.4)
def test_rows_may_come_in_an_order_of_their_own_where_dropout_draws() -> None:
    check_strategy(Curriculum)
    (fault,) = faults(Curriculum, dropout=False)
    assert "got the very same batches and draws in the training of ag_news, sst2." in fault


class Selective(Plain):
    """Trains readouts alone, and says which streams it is not made for."""

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        if stream.model.readout != "linear" or stream.scenario != "task":
            raise UsageError("Selective trains the linear readout of each task. Give a stream that has them.")

    def begin(self, task: Any) -> Training:
        return self.everything(task, trained=WholeTensors([]))


def test_a_stream_may_be_refused_and_the_callers_generators_are_left_alone() -> None:
    """And a strategy that forgets nothing need not say so: only the false claim is a fault."""

    def draws() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), np.random.random()

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    expected = draws()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    check_strategy(Selective, dropout=False)
    assert draws() == expected


# -- Streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"scenario": "class"}, {"readout": "generate"}], ids=str)
def test_the_tiny_stream_passes(how: Any) -> None:
    check_stream(tiny_stream(**how))


def test_named_streams_pass(data_directory: Path) -> None:
    check_stream("qnli-agnews-sst2", data=str(data_directory), shots=4)
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


def broken_streams() -> dict[str, tuple[Stream, str]]:
    whole, texts = tiny_stream(), tiny_stream(["qnli"], readout="generate")
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
            "ag_news: metric must be 'accuracy' or 'macro_f1' for 4 labels: 'f1' is that of label 1 of two.",
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
        "words": (
            stream_with(train=nothing),
            "ag_news: expected words that the tokenizer knows in every row, got 24 of 24 train rows without any.",
        ),
        "repeated": (
            stream_with(test=task.train),
            "ag_news: expected no test row among the training rows, got 24 of 24. Drop them from the training rows.",
        ),
        "repeated prompts": (
            replace(texts, tasks=(replace(texts.tasks[0], test=texts.tasks[0].train),)),
            "qnli: expected no test row among the training rows, got 24 of 24. Drop them from the training rows.",
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


@pytest.mark.sampled(
    "beyond",
    "classes",
    "empty",
    "label",
    "metric",
    "no tasks",
    "order",
    "task label",
    "twice",
    "unread",
    "words",
)
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
