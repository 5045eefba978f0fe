"""An answer depends on weights, ledger, task and row, but not on the model's mode, on threads, or on earlier questions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from compared import state_of
from loops import assert_same, classifier, labelled, refused, train
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree import Ledger, LedgerSwitch, Predictor, TaskSwitch
from forgetfree.core import fingerprint
from forgetfree.core.readout_model import part_named
from forgetfree.errors import LedgerError, TrainingError
from forgetfree.trainers.learning import answering, learning


class Dropping(nn.Module):
    """A network on numbers that has dropout and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.drop, self.two = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.5),
            nn.Linear(16, 2),
        )

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.two(self.drop(torch.tanh(self.norm(self.one(x)))))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def rows_of_numbers() -> list[dict[str, Tensor]]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": x, "labels": (x[:, 0] > 0).long()}]


def dropping_classifier() -> Any:
    model = classifier()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return model


MODELS = {
    "numbers": (Dropping, rows_of_numbers()),
    "labels": (dropping_classifier, labelled(1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_in_evaluation_mode_and_has_its_modes_again(name: str) -> None:
    """The model is as after trainer.train(), with a part that stays in evaluation mode, such as a frozen norm."""
    make, batches = MODELS[name]
    torch.manual_seed(0)
    model: Any = make()
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", batches=batches, sparsity=0.3):
        train(model, batches * 3)
    model.train()
    kept = next(each for each in model.modules() if isinstance(each, (nn.BatchNorm1d, nn.LayerNorm)))
    kept.eval()
    modes, before = [each.training for each in model.modules()], state_of(model)
    inputs = {key: value for key, value in batches[0].items() if key != "labels"}
    said = []
    for _ in range(3):
        with answering(model, ledger, "one"), torch.no_grad():
            assert not any(each.training for each in model.modules())
            said.append(model(**inputs).logits)
        assert [each.training for each in model.modules()] == modes
        with LedgerSwitch(ledger, model).task("one"):
            assert not any(each.training for each in model.modules())
        assert [each.training for each in model.modules()] == modes
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])
    assert_same(model, before)


# -- Learning, training and answering inside ------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_done_while_a_model_answers(name: str) -> None:
    """The error names the conflict, and θ_pre is kept."""
    make, batches = MODELS[name]
    torch.manual_seed(0)
    model: Any = make()
    ledger, before = Ledger.of_model(model), state_of(model)
    with learning(model, ledger, "one", batches=batches, sparsity=0.3):
        train(model, batches * 3)

    for block in (answering(model, ledger, "one"), LedgerSwitch(ledger, model).task("one")):

        def training(block: Any = block) -> None:
            with block:
                train(model, batches)

        refused(training, TrainingError, "An optimiser would change", "answers task 'one'", "train inside learning(…)")
        assert_same(model, before)
    other = copy.deepcopy(model)
    for block in (answering(other, ledger, "one"), LedgerSwitch(ledger, other).task("one")):
        other.load_state_dict(before)

        def written(block: Any = block) -> None:
            with block, torch.no_grad():
                ledger.space.parameters(part_named(other, ledger.space))[0].add_(1.0)

        refused(written, LedgerError, "Something changed the weights", "'one'", "Load the model again")
    with answering(model, ledger, "one"):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        optimizer.step()  # an optimiser of another model
        for action in (
            lambda: learning(model, ledger, "two", batches=batches).__enter__(),
            lambda: answering(model, ledger, "one").__enter__(),
            lambda: LedgerSwitch(ledger, model),
        ):
            refused(action, LedgerError, "answers task 'one' now", "End the block of answering(…) first")
    assert_same(model, before)
    with learning(model, ledger, "two", batches=batches, sparsity=0.3):
        train(model, batches * 3)


# -- Pipelines, threads ----------------------------------------------------------------------------------------


WORDS = [f"it was {word}" for word in ("great", "terrible", "bad", "good")]


@pytest.fixture(scope="module")
def skills(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Ledger, str]:
    """A classifier that has learned two tasks in a custom loop, its tokenizer, its ledger and its directory."""
    place = str(tiny.write_model("bert-pooler", tmp_path_factory.mktemp("bert")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place, num_labels=2)
    ledger = Ledger.of_model(model)
    for number, labels in enumerate((["bad", "good"], ["place", "person"])):
        inputs = tokenizer(WORDS, padding=True, return_tensors="pt")
        batch = {**inputs, "labels": (torch.arange(4) + number) % 2}
        defined = {"labels": labels, "tokenizer": tokenizer}
        with learning(model, ledger, labels[0], batches=[batch], sparsity=0.05, **defined):  # type: ignore[arg-type]
            train(model, [batch] * 5)
    return model, tokenizer, ledger, place


def test_a_pipeline_says_the_labels_of_the_task(skills: tuple[Any, Any, Ledger, str]) -> None:
    model, tokenizer, ledger, _ = skills
    usual = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for task, labels in (("bad", ["bad", "good"]), ("place", ["place", "person"])):
        with answering(model, ledger, task):
            inside = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
            for each in (usual, inside):
                scores = each("it was great", top_k=None)
                assert sorted(score["label"] for score in scores) == sorted(labels)
        assert usual("it was great")[0]["label"] in ("LABEL_0", "LABEL_1")


def test_a_switch_answers_in_evaluation_mode(skills: tuple[Any, Any, Ledger, str]) -> None:
    """This holds from task to task; at the end, the model has its former modes."""
    _, tokenizer, ledger, place = skills
    body = transformers.AutoModel.from_pretrained(place, hidden_dropout_prob=0.5)
    inputs, switch = tokenizer(WORDS, padding=True, return_tensors="pt"), TaskSwitch(ledger, body)
    body.train()
    body.encoder.layer[0].eval()
    modes, said = [each.training for each in body.modules()], {}
    for task in ledger.tasks * 2:
        switch.to(task)
        with torch.no_grad():
            logits = body(**inputs)["logits"]
        assert torch.equal(said.setdefault(task, logits), logits)
        body.train()
    switch.to(None)
    assert [each.training for each in body.modules()] == modes


@contextmanager
def at_once() -> Iterator[None]:
    """Let threads switch as often as possible."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_threads_that_share_a_predictor_get_the_answers_of_one(skills: tuple[Any, Any, Ledger, str]) -> None:
    """This covers `answer`, `answer_mixed`, `logits`, and two predictors that share a model."""
    _, _, ledger, place = skills
    first = Predictor.of_ledger(ledger, place, device="cpu")
    second = Predictor(first.loaded, ledger)
    words, tasks = WORDS * 3, ledger.tasks

    def ask(task: str, predictor: Predictor = first) -> list[Any]:
        other = tasks[1 - tasks.index(task)]
        answers = predictor.answer(task, words) + predictor.answer_mixed([task, other], words[:2])
        return [answer.probabilities for answer in answers] + predictor.logits(task, words).tolist()

    right, wrong = {task: ask(task) for task in tasks}, []

    def work(task: str) -> None:
        for number in range(30):
            if ask(task, (first, second)[number % 2]) != right[task]:
                wrong.append(task)

    with at_once():
        threads = [threading.Thread(target=work, args=(task,)) for task in tasks * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_an_export_waits_for_answers(skills: tuple[Any, Any, Ledger, str], tmp_path: Path) -> None:
    from forgetfree.serve.apply import export_task

    _, _, ledger, place = skills
    predictor = Predictor.of_ledger(ledger, place, device="cpu")
    done = threading.Event()

    def export() -> None:
        export_task(predictor, ledger.tasks[0], tmp_path / "exported")
        done.set()

    with predictor.lock:
        thread = threading.Thread(target=export)
        thread.start()
        assert not done.wait(0.2)
        with predictor.weights.answering(ledger.tasks[1]):
            assert not done.wait(0.1)
    thread.join()
    assert done.is_set()


def test_ten_answers_read_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the block, they are read once more; `learning` reads them before and after training."""
    hashed, compute = list[int](), fingerprint._digest
    monkeypatch.setattr(fingerprint, "_digest", lambda *of: hashed.append(1) or compute(*of))

    def counted(block: Callable[[], None]) -> int:
        hashed.clear()
        block()
        return len(hashed)

    model = classifier()
    ledger = Ledger.of_model(model)

    def learn() -> None:
        task = f"task {len(ledger.records)}"
        with learning(model, ledger, task, batches=labelled(1), sparsity=0.01):
            train(model, labelled(1))

    def answer() -> None:
        for _ in range(10):
            with answering(model, ledger, "task 0"):
                model(**labelled(1)[0])

    def fail() -> None:
        with pytest.raises(ZeroDivisionError), answering(model, ledger, "task 0"):
            1 / 0  # noqa: B018

    counts = [counted(block) for block in (learn, answer, learn, fail, answer)]
    assert counts == [2, 0, 2, 0, 1]
    other = classifier()  # another model object
    with answering(other, ledger, "task 1"):
        pass
    assert len(hashed) == 2
