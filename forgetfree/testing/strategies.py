"""Whether a strategy keeps the contract of `forgetfree.strategy.ContinualStrategy`."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.errors import OptionError
from forgetfree.models.state import StateStore
from forgetfree.monitor import PHASES, Monitor
from forgetfree.options import build
from forgetfree.strategy import ContinualStrategy, TaskwiseOptions
from forgetfree.streams import Stream
from forgetfree.tasks import Scenario
from forgetfree.testing.faults import Faults, differing, listed, tensors
from forgetfree.testing.tiny_streams import tiny_stream
from forgetfree.training import TrainingOptions

#: Momentum and decay move what has no gradient, so frozen entries are tested by both.
SMALL: dict[str, Any] = {"steps": 3, "batch_size": 4, "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.1}
Answers = dict[str, Tensor]


def check_strategy(cls: type[ContinualStrategy], **options: Any) -> None:
    """Run ``cls`` on two tiny tasks, several times over, and raise unless it does all that a strategy must.

    Checked are: the class and its options; training, evaluation, progress and `bytes_kept`; that only what `parameters`
    lists moves; that seeds determine the result, whatever was drawn or trained before and whenever tasks are
    evaluated; that the next strategy finds θ_pre; `save` and `load`; `stale`; ``forget_free`` where it is
    claimed; and the stream with ``scenario="class"``. All comparisons are bit by bit. Takes a second or two.

    Args:
        cls: the strategy.
        options: that suit a model of two layers of width 16 and 24 training rows, where the defaults do not, such as
            ``sparsity=0.05``. Default beside them: 3 steps of 4 rows by SGD with momentum and weight decay.

    Raises:
        ConformanceError: it breaks the contract; names every fault found.
        UsageError: an option that ``cls`` does not have, or a value out of its range.
    """
    faults = Faults()
    subject = f"{getattr(cls, '__name__', repr(cls))} does not keep the contract of a strategy"
    _check_class(cls, faults)
    faults.raise_any(subject)  # nothing could be run
    chosen = build(cls.Options, SMALL | options, cls.__name__)
    _check_defaults(cls, bool(options), faults)
    with _own_randomness(), TemporaryDirectory() as directory:
        finished = _check_runs(cls, chosen, faults, Path(directory))
        if finished and not faults.found:  # else it would say the same again
            _check_class_scenario(cls, chosen, faults, Path(directory))
    faults.raise_any(subject)


# -- The class -------------------------------------------------------------------------------------------


def _check_class(cls: Any, faults: Faults) -> None:
    if not (isinstance(cls, type) and issubclass(cls, ContinualStrategy)) or cls is ContinualStrategy:
        faults.add(f"class: expected a subclass of forgetfree.strategy.ContinualStrategy, got {cls!r}.")
        return
    constructor = inspect.unwrap(cls.__init__)  # Avalanche wraps that of every subclass
    if constructor is not inspect.unwrap(ContinualStrategy.__init__):
        faults.add(
            f"__init__: expected ContinualStrategy's own, got {constructor.__qualname__}. Drop it: the runner makes every "
            "strategy alike. What is to be prepared once belongs into setup(), what a user may choose into Options."
        )
    targets = {entry.target: name for name, entry in registry.strategies().items()}
    for base in cls.__mro__[1:]:
        if name := targets.get(f"{base.__module__}:{base.__qualname__}"):
            faults.add(
                f"class: strategies are final, got a subclass of {base.__name__}, which is the strategy {name!r}. Inherit "
                "from ContinualStrategy or another base, and share code as functions."
            )
    _check_options(cls, faults)


def _check_options(cls: type[ContinualStrategy], faults: Faults) -> None:
    options: Any = cls.Options
    base = TaskwiseOptions if cls.taskwise else TrainingOptions
    if not (isinstance(options, type) and issubclass(options, base)):
        why = "with taskwise = True, " if cls.taskwise else ""
        faults.add(f"Options: {why}expected a subclass of {base.__name__}, got {options!r}.")
        return
    if "__dataclass_params__" not in vars(options):  # a dataclass that inherits from a frozen one is frozen
        faults.add(
            f"Options: expected a frozen dataclass, got {options.__name__}, which is none. Decorate it with "
            "@dataclass(frozen=True, kw_only=True)."
        )
        return
    silent = [field.name for field in dataclasses.fields(options) if not field.metadata.get("help")]
    if silent:
        faults.add(
            f"Options: expected a help text for every field, got none for {listed(silent)}. Make it by "
            'forgetfree.options.option(default, "what it means").'
        )
    with faults.catching("Options: constructed from their defaults", "Give every field a default within its bounds."):
        options()


def _check_defaults(cls: type[ContinualStrategy], options_given: bool, faults: Faults) -> None:
    remedy = "Look at check(), own_plugins() and setup(): cls(stream=stream) must do."
    with faults.catching("defaults: constructed without options", remedy):
        try:
            cls(stream=tiny_stream())
        except OptionError:
            if not options_given:  # else the caller says that the defaults do not suit so tiny a model
                raise


# -- Runs ------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A strategy that has learned the stream: its answers before the first task and after each, and the weights at last."""

    strategy: Any
    answers: list[Answers]
    weights: dict[str, Tensor]

    def differs(self, other: _Run) -> str:
        """What of the results is not the same, if anything."""
        for position, when in ((0, "before training"), (-1, "after the last task")):
            if tasks := differing(self.answers[position], other.answers[position]):
                return f"the answers for {listed(tasks)} {when}"
        names = differing(self.weights, other.weights)
        return f"the weights {listed(names)}" if names else ""


def _learn(
    cls: type[ContinualStrategy],
    options: Any,
    stream: Stream,
    *,
    drawn: int = 0,
    observe: Callable[[Any], Answers] | None = None,
    watch: Any = None,
    evaluate_within: bool = False,
    **arguments: Any,
) -> _Run:
    """Learn the whole ``stream`` by ``cls`` with ``options``.

    Args:
        cls: the strategy.
        options: its options.
        stream: what it learns.
        drawn: the state of the global generators before.
        observe: gives the answers before the first task and after each.
        watch: an Avalanche plugin that the strategy does not know of.
        evaluate_within: evaluate all tasks after each step, and not after each task.
        arguments: more for the constructor.
    """
    _draw_from(drawn)
    if evaluate_within:
        arguments |= {"eval_every": 1, "peval_mode": "iteration"}
    strategy: Any = cls(stream=stream, options=options, **arguments)
    strategy.plugins += [watch] if watch else []
    observe = observe or _answers
    answers = [observe(strategy)]
    for experience in stream.benchmark.train_stream:
        strategy.train(experience, eval_streams=[stream.benchmark.test_stream] if evaluate_within else None)
        if not evaluate_within or experience.current_experience == len(stream.tasks) - 1:
            answers.append(observe(strategy))
    return _Run(strategy, answers, tensors(stream.model))


def _answers(strategy: Any) -> Answers:
    """A copy of the logits for every task."""
    return {name: torch.from_numpy(np.array(answer.logits)) for name, answer in strategy.evaluate().items()}


def _check_runs(cls: type[ContinualStrategy], options: Any, faults: Faults, directory: Path) -> bool:
    """All checks where the task is known; whether the stream could be learned at all."""
    stream = tiny_stream()
    pristine = tensors(stream.model)
    watch, monitor, observer = _Watch(), _Recorder(), _Observer(faults)
    store = StateStore(directory / "fine-tuned")
    run = None
    with faults.catching(
        "run: two tasks trained and evaluated", "The hook is in the traceback that this error was raised from."
    ):
        run = _learn(cls, options, stream, observe=observer, watch=watch, monitor=monitor, store=store)
    if run is None:
        return False
    observer.report()
    watch.report(faults)
    monitor.report(faults, [task.name for task in stream.tasks])
    _check_answers(run, stream, faults)
    _check_claims(cls, run, faults)
    _check_ledger(run, faults)
    _check_loaded(cls, options, run, store, directory / "saved", "task", faults)
    _check_restored(stream, pristine, run, faults)
    remedy = "It could be trained before: look at setup(), suspend(), resume() and snapshot()."
    with faults.catching("run: once more on the stream, evaluating in the midst of training", remedy):
        # One run for all that must not matter; where it does, a second look says what.
        if run.differs(_learn(cls, options, stream, drawn=1, evaluate_within=True)):
            faults.add(_why_another(cls, options, run, stream))
    return True


def _why_another(cls: type[ContinualStrategy], options: Any, run: _Run, stream: Stream) -> str:
    """The same seed gave another result: after other draws, on a used stream, or evaluating in between."""
    if difference := run.differs(_learn(cls, options, tiny_stream())):
        return (
            f"seeds: expected the same result from the same seed, got another in {difference}, although nothing else "
            "changed. Draw from generators seeded by self.phase_seed(…), and keep nothing in the class."
        )
    if difference := run.differs(_learn(cls, options, tiny_stream(), drawn=1)):
        return (
            f"seeds: expected a result that the seed alone determines, got another in {difference} after other draws from "
            "the global generators. Draw from generators of your own, seeded by self.phase_seed(…)."
        )
    if difference := run.differs(_learn(cls, options, stream)):
        return (
            f"fresh start: expected a new strategy on a used stream to learn as on a fresh one, got another result in "
            f"{difference}. Keep what is learned in the strategy, made anew in setup(), and not in the stream or its model."
        )
    difference = run.differs(_learn(cls, options, tiny_stream(), evaluate_within=True))
    return (
        "evaluation: expected the same result with an evaluation after each step as with one after each task, got another in "
        f"{difference or 'some runs'}. Look at snapshot(), suspend(), resume(), enter_evaluation() and leave_evaluation()."
    )


class _Observer:
    """What holds at rest, before the first task and after each."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._bytes: list[Any] = []

    def __call__(self, strategy: Any) -> Answers:
        def weights() -> dict[str, Tensor]:  # buffers may be put back later: by the next task, or by an evaluation
            return {name: p.detach().clone() for name, p in strategy.task_model.named_parameters()}

        before = weights()
        answers = _answers(strategy)
        if moved := differing(before, weights()):
            self._faults.add(
                f"evaluate: expected to find the model as it was before, got {listed(moved)} changed. Undo in "
                "leave_evaluation() what enter_evaluation() does."
            )
        tasks = list(strategy.stream.tasks)
        strategy.evaluate(tasks[::-1])
        backwards = {name: torch.from_numpy(answer.logits) for name, answer in strategy.predictions.items()}
        if changed := differing(answers, backwards):
            self._faults.add(
                f"evaluate: expected the same answers in any order of the tasks, got others for {listed(changed)}. Look at "
                "enter_evaluation() and leave_evaluation()."
            )
        self._bytes.append(strategy.bytes_kept())
        return answers

    def report(self) -> None:
        """What `bytes_kept` said."""
        whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in self._bytes)
        if not whole or self._bytes != sorted(self._bytes):
            self._faults.add(
                "bytes_kept: expected whole numbers from 0 that never fall from task to task, got "
                f"{', '.join(map(str, self._bytes))} before the first task and after each."
            )


class _Watch:
    """As an Avalanche plugin: which parameters an update moves that it must not."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._moved: dict[str, None] = {}

    def before_update(self, strategy: Any, **_: Any) -> None:
        task = strategy.task
        named = [*strategy.gradients(task), *(p for group in strategy.parameters(task) for p in group)]
        free = {id(parameter) for parameter in named}
        frozen = {n: p for n, p in strategy.task_model.named_parameters() if id(p) not in free}
        self._before = {name: parameter.detach().clone() for name, parameter in frozen.items()}

    def after_update(self, strategy: Any, **_: Any) -> None:
        now = dict(strategy.task_model.named_parameters())
        self._moved |= dict.fromkeys(n for n, was in self._before.items() if not torch.equal(was, now[n]))

    def report(self, faults: Faults) -> None:
        if self._moved:
            faults.add(
                "parameters: expected an update to move nothing but what parameters(task) lists, got "
                f"{listed(list(self._moved))} moved. List it there, or look at before_step() and after_step()."
            )


class _Recorder(Monitor):
    """Notes every phase with the steps announced and the numbers heard."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, Any, int, list[int]]] = []

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        heard: list[int] = []
        yield lambda step, loss: heard.append(step)
        self._phases.append((task, phase, steps, heard))

    def report(self, faults: Faults, tasks: list[str]) -> None:
        for task, phase, steps, heard in self._phases:
            if phase not in PHASES:
                faults.add(f"progress: expected a phase of {', '.join(PHASES)}, got {phase!r}. Look at self.phase(…).")
            if task not in tasks:
                faults.add(f"progress: expected a task of the stream, got {task!r}. Look at self.phase(…).")
            if heard != list(range(1, steps + 1)):
                faults.add(
                    f"progress: expected to hear of each step of {phase} that was announced, 1 to {steps}, got {len(heard)}: "
                    f"{listed(list(map(str, heard))) or 'none'}. Look at steps() and at what self.phase(…) yields."
                )
        if not any(heard for _, phase, _, heard in self._phases if phase != "evaluate"):
            faults.add("progress: expected to hear of training, got no step of it. Train within self.phase(…).")


# -- What a run must have been ---------------------------------------------------------------------------


def _check_answers(run: _Run, stream: Stream, faults: Faults) -> None:
    """One finite row of logits for each test row, for every task; and that something was learned."""
    widths = {task.name: stream.model.heads[task.label].n_labels for task in stream.tasks}
    expected = {task.name: (len(task.test), widths[task.name]) for task in stream.tasks}
    for answers in run.answers:
        shapes = {name: tuple(logits.shape) for name, logits in answers.items()}
        if shapes != expected:
            faults.add(f"evaluate: expected logits (n, n_labels) by task, {expected}, got {shapes}. Look at forward().")
        broken = [name for name, logits in answers.items() if not bool(torch.isfinite(logits).all())]
        if broken:
            faults.add(f"evaluate: expected finite logits, got others for {listed(broken)}. Look at forward().")
    first, last = run.answers[0], run.answers[-1]
    if same := [name for name in first if name in last and torch.equal(first[name], last[name])]:
        faults.add(
            f"training: expected other answers than before, got the very same for {listed(same)}. Look at parameters(), "
            "steps() and enter_evaluation()."
        )


def _check_claims(cls: type[ContinualStrategy], run: _Run, faults: Faults) -> None:
    """`forget_free` and `stale`, which results are built on."""
    _, learned, last = run.answers
    first, second = run.strategy.stream.tasks
    if cls.forget_free and differing({"": learned[first.name]}, {"": last[first.name]}):
        faults.add(
            f"forget_free: claimed as True, but learning {second.name} changed the logits of {first.name}, which was learned "
            "before. Look at enter_evaluation(), buffers and readouts included; or do not claim it."
        )
    for task, before, after in zip((first, second), run.answers, run.answers[1:], strict=False):
        stale = {other.name for other in run.strategy.stale(task)}
        if fresh := [name for name in differing(before, after) if name not in stale]:
            faults.add(
                f"stale: expected every task whose answers may change by learning {task.name}, got a list without "
                f"{listed(fresh)}. Name it, or look at enter_evaluation()."
            )


def _check_ledger(run: _Run, faults: Faults) -> None:
    """What no task owns has never moved."""
    strategy = run.strategy
    if strategy.ledger is None:
        return
    theta = strategy.space.flatten(strategy.task_model.backbone).cpu()
    free = ~strategy.ledger.owned().mask(len(strategy.space)).cpu()
    if moved := int((theta[free] != strategy.pristine.theta[free]).sum()):
        faults.add(
            f"ledger: expected entries that no task owns to hold θ_pre, got {moved} that do not. Look at parameters(), and "
            "at what commit() records."
        )


def _check_restored(stream: Stream, pristine: dict[str, Tensor], run: _Run, faults: Faults) -> None:
    """The next strategy on the stream, whichever, starts from θ_pre and answers as it did."""
    remedy = (
        "Only the graftable tensors, readouts and persistent buffers are put back: let nothing else move, and take off "
        "hooks and modules after each task."
    )
    with faults.catching("fresh start: another strategy on the stream", remedy):
        after: Any = ContinualStrategy(stream=stream)
        if moved := differing(pristine, tensors(stream.model)):
            faults.add(
                f"fresh start: expected the next strategy to find the pre-trained model, got {listed(moved)} other than it "
                f"was. {remedy}"
            )
        elif changed := differing(run.answers[0], _answers(after)):
            faults.add(
                "fresh start: expected the next strategy to answer as the pre-trained model does, got other logits for "
                f"{listed(changed)}, though the weights are the same. {remedy}"
            )
        if frozen := [name for name, parameter in stream.model.named_parameters() if not parameter.requires_grad]:
            faults.add(
                f"fresh start: expected parameters to ask for gradients again, got requires_grad = False for "
                f"{listed(frozen)}. Say what is trained by gradients(task); its flags are put back."
            )


def _check_loaded(
    cls: type[ContinualStrategy],
    options: Any,
    run: _Run,
    store: StateStore | None,
    directory: Path,
    scenario: Scenario,
    faults: Faults,
) -> None:
    """A new strategy on a new stream answers from what was saved."""
    what = "save and load" if scenario == "task" else f"save and load with scenario={scenario}"
    remedy = "Write in save() all that answering needs, and put it back in load(), note_learned(…) included."
    with faults.catching(what, remedy):
        directory.mkdir(parents=True)
        run.strategy.save(directory)
        loaded: Any = cls(stream=tiny_stream(scenario=scenario), options=options, store=store)
        loaded.load(directory)
        if changed := differing(run.answers[-1], _answers(loaded)):
            faults.add(
                f"{what}: expected a new strategy to answer as the saved one did, got other logits for {listed(changed)}. "
                f"{remedy}"
            )


def _check_class_scenario(cls: type[ContinualStrategy], options: Any, faults: Faults, directory: Path) -> None:
    """The same where the task is withheld and one readout tells the labels of all tasks apart."""
    remedy = "The task is not known at inference: look at enter_evaluation(), and whether the class is taskwise."
    stream = tiny_stream(scenario="class")
    store = StateStore(directory / "class" / "fine-tuned")
    run = None
    with faults.catching("scenario=class: two tasks trained and evaluated", remedy):
        run = _learn(cls, options, stream, store=store)
    if run is None:
        return
    within = Faults()
    _check_answers(run, stream, within)
    for fault in within.found:
        faults.add(f"scenario=class: {fault}")
    _check_loaded(cls, options, run, store, directory / "class" / "saved", "class", faults)


# -- Randomness ------------------------------------------------------------------------------------------


def _draw_from(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def _own_randomness() -> Iterator[None]:
    """The caller's generators are left as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
