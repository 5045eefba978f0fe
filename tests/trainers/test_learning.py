"""Grafting in a custom trainer: training, exact retention, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch
from compared import state_of
from loops import assert_same, begun, classifier, labelled, language_model, logits, refused, refusing, texts, train
from torch import Tensor, nn
from transformers import BertForSequenceClassification, GPT2ForSequenceClassification, GPT2LMHeadModel

from forgetfree import Ledger
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters, in_training
from forgetfree.errors import ForgetfreeError, LedgerError, ModelError, TaskError, TrainingError, UsageError
from forgetfree.testing.tiny import bert_config, pre_trained
from forgetfree.trainers.attachment import NAME
from forgetfree.trainers.learning import answering, learning

# -- Training ----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model with tied, scalar and empty tensors, two dtypes, a channels-last layer, and the buffers of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(4)
        self.convolution = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.tanh(self.one(x))) * self.scale
        x = self.norm(self.narrow(x.bfloat16()).float())
        return self.convolution(x.view(-1, 1, 2, 2)).flatten(1)


def test_any_module_keeps_every_bit_of_every_task(tmp_path: Any) -> None:
    """Tasks stand on θ_pre and on each other, beside entries of other tasks; answers come from memory and from the file."""
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(8, 4)
    batch, y = {"x": x}, torch.arange(8) % 2
    ledger, before, seen = Ledger.of_model(model), state_of(model), dict[str, Tensor]()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(**batch), y)

    how: dict[str, Any] = {"batches": [batch], "loss": loss, "sparsity": 0.2}
    every_other = {"region": Region.of(range(0, len(ledger.space), 2))}
    ways = {"one": {}, "two": {"parent": "one"}, "three": {}, "four": {"parent": "two"} | every_other}
    for task, way in ways.items():
        with learning(model, ledger, task, **how | way) as skill:
            optimizer = torch.optim.AdamW([skill.values], lr=0.05, weight_decay=0.1)
            for _ in range(5):
                loss(model.train(), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(model, before)
        ledger.save(tmp_path / "skills.safetensors")
        for held in (ledger, Ledger.load(tmp_path / "skills.safetensors")):
            for name in held.tasks:
                with answering(model, held, name), torch.no_grad():
                    answer = model.eval()(x)
                assert torch.equal(seen.setdefault(name, answer), answer)
    assert torch.equal(seen["three"], seen["one"])  # both start from θ_pre, on the same rows
    assert len({tuple(each.flatten().tolist()) for each in seen.values()}) == 3
    one, two, three, four = (record.owned.region for record in ledger.records)
    assert 0 < len(four) < len(every_other["region"]) and three == one
    assert not any(len(a & b) for a, b in ((one, two), (one, four), (two, four)))
    assert ledger.taken("four") == one | two | four


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_our_own_loop(dtype: torch.dtype) -> None:
    """The same region, batches and rate in `RegionParameters`, which takes gradients by hooks instead of autograd's graph."""
    model, own = language_model(dtype), language_model(dtype)
    ledger = Ledger.of_model(model)
    generator = torch.Generator().manual_seed(0)
    region = Region.from_mask(torch.rand(len(ledger.space), generator=generator) < 0.05)
    before = ledger.space.flatten(model.base_model)
    with learning(model, ledger, "one", region=region) as skill:
        assert [name for name, each in model.named_parameters() if each.requires_grad] == [NAME]
        assert skill.values.dtype == torch.float32 and skill.heads == ()
        torch.manual_seed(5)
        train(model, texts(2))
        moved = ledger.space.flatten(model.base_model) != before
        assert bool(moved.any()) and not bool((moved & ~region.mask(len(moved))).any())  # nor by decay or momentum
    trained = RegionParameters(own.base_model, ledger.space, region)
    own.train()
    torch.manual_seed(5)
    with in_training(own, trained, []):
        optimizer = torch.optim.AdamW(trained.parameters, lr=1e-2, weight_decay=0.1)
        for batch in texts(2):
            own(**batch).loss.backward()
            trained.collect()
            nn.utils.clip_grad_norm_(trained.parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            trained.write()
    assert torch.equal(ledger.records[0].owned.values, ledger.space.gather(own.base_model, region.indices))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_whose_memory_moves_trains_on(mode: Any) -> None:
    """`Module.to` moves it in this way; the next pass may be an evaluation."""
    values = []
    for moves in (False, True):
        model = language_model()
        ledger = Ledger.of_model(model)
        with learning(model, ledger, "one", batches=texts(1), sparsity=0.05):
            torch.manual_seed(5)
            train(model, texts(2))
            if moves:
                for each in model.parameters():
                    each.data = each.data.clone()
                with mode():
                    model.eval()(**texts(9)[0])
            train(model, texts(3))
        values.append(ledger.records[0].owned.values)
    assert torch.equal(*values)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints_change_rounding_alone(reentrant: bool) -> None:
    """In plain PyTorch, gradients with checkpoints differ by a few 1e-8, too."""
    values = []
    for checkpoints in (False, True):
        model = language_model()
        ledger = Ledger.of_model(model)
        with learning(model, ledger, "one", batches=texts(1), sparsity=0.01):
            if checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            torch.manual_seed(5)
            train(model, texts(2), lambda p: torch.optim.SGD(p, lr=1.0))
        values.append(ledger.records[0].owned.values)
    assert torch.allclose(*values, rtol=0, atol=1e-6)


def test_two_passes_before_one_step() -> None:
    """Preference losses have two passes; the second must not invalidate the graph of the first."""
    model = language_model()
    with learning(model, Ledger.of_model(model), "one", batches=texts(1), sparsity=0.01) as skill:
        one, two = texts(2, 2)
        model.eval()
        model(**one).loss.backward()
        model(**two).loss.backward()
        apart, skill.values.grad = skill.values.grad, None
        (model(**one).loss + model(**two).loss).backward()
        assert torch.allclose(skill.values.grad, apart, rtol=1e-5, atol=1e-8)
        train(model, texts(3))


# -- Heads -------------------------------------------------------------------------------------------------


class Normalised(BertForSequenceClassification):
    """A classifier with a norm outside of body and head, whose running statistics follow the rows."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.hidden_size, affine=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.norm(self.bert(input_ids).last_hidden_state[:, 0])
        return super().forward(input_ids, labels=labels)


def test_each_task_has_its_own_head() -> None:
    """Buffers outside of the body keep their values."""
    model = pre_trained(lambda: Normalised(bert_config(60)))
    ledger, before, seen = Ledger.of_model(model), state_of(model), {}
    assert not ledger.space.tensors[0].name.startswith("bert.")
    for task in ("one", "two"):
        with learning(model, ledger, task, batches=labelled(1), sparsity=0.01, heads=["bert.pooler", "classifier"]):
            train(model, labelled(len(seen)))
            assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])
        assert_same(model, before)
        seen[task] = logits(model, ledger, task, labelled(9)[0])
    for task, expected in seen.items():
        assert torch.equal(logits(model, ledger, task, labelled(9)[0]), expected)
    weights = [record.readout["classifier.weight"] for record in ledger.records]
    assert not torch.equal(weights[0], before["classifier.weight"]) and not torch.equal(*weights)
    assert sorted(ledger.records[0].readout)[0] == "bert.pooler.dense.bias"
    assert begun(model, ledger, batches=labelled(1), sparsity=0.01).heads == ("classifier",)


def test_a_ledger_is_the_same_with_any_head() -> None:
    causal = language_model()
    reader = pre_trained(lambda: GPT2ForSequenceClassification(tiny.gpt2_config(60)))
    reader.transformer.load_state_dict(causal.transformer.state_dict())
    reader.config.pad_token_id = 0
    ledger = Ledger.of_model(causal)
    with learning(causal, ledger, "texts", batches=texts(1), sparsity=0.01):
        train(causal, texts(2))
    with learning(reader, ledger, "labels", batches=labelled(1), sparsity=0.01):
        train(reader, labelled(2))
    assert ledger.tasks == ["texts", "labels"]
    with pytest.raises(LedgerError, match="learned with the head 'score'"), answering(causal, ledger, "labels"):
        pass


# -- Choosing the region -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", ["", "one"])
def test_the_gradient_of_the_mean_loss_chooses(parent: str) -> None:
    """The reference is one backward pass of the mean over the rows, in evaluation mode, on the parent.

    Only as many batches are read as the rows need.
    """
    model, read = language_model(), list[dict[str, Tensor]]()
    ledger, batches = Ledger.of_model(model), texts(1, 9)
    with learning(model, ledger, "one", batches=batches, sparsity=0.05):
        train(model, texts(2), lambda p: torch.optim.SGD(p, lr=10.0))
    with answering(model, ledger, parent) if parent else nullcontext():
        (sum(model(**batch).loss for batch in batches[:3]) / 3).backward()
    g = torch.cat([tensor.grad.view(-1) for tensor in ledger.space.parameters(model.transformer)])
    g[ledger.taken(parent).indices] = 0
    model.zero_grad()
    count, seen = int(0.01 * len(g)), (read.append(batch) or batch for batch in batches)  # type: ignore[func-returns-value]
    how: dict[str, Any] = {"region_from": "gradient", "sparsity": 0.01, "parent": parent}
    skill = begun(model, ledger, batches=seen, rows=12, **how)
    chosen = g.abs().topk(count).indices
    assert len(skill.region & Region.of(chosen)) >= 0.99 * count  # except for ties by rounding
    assert (len(skill.region), len(read)) == (count, 3)


def test_a_region_is_sought_among_free_entries_or_among_all() -> None:
    """With the same rows, a second task chooses the first task's entries: they are free on θ_pre, but not on the first task."""
    for among in ("free", "all"):
        model = classifier()
        ledger = Ledger.of_model(model)
        with learning(model, ledger, "one", batches=labelled(1), sparsity=0.01) as first:
            train(model, labelled(1))
        taken = len(ledger.owned())
        how: dict[str, Any] = {"batches": labelled(1), "sparsity": 0.02, "among": among}
        on_pre, on_it = begun(model, ledger, **how), begun(model, ledger, parent="one", **how)
        assert len(on_pre.region & first.region) == taken and on_pre.free == on_pre.region
        assert on_it.free == on_it.region - first.region
        assert (on_it.free == on_it.region) == (among == "free")


def test_what_fine_tuning_moved() -> None:
    model, tuned = language_model(), language_model()
    with torch.no_grad():
        tuned.transformer.h[0].attn.c_attn.weight[1, 2:5] += 1.0
        tuned.lm_head.weight[0] += 9.0
    regions = []
    for fine_tuned in (tuned.state_dict(), tuned.transformer.state_dict()):
        ledger = Ledger.of_model(model)
        regions.append(begun(model, ledger, region_from="movement", fine_tuned=fine_tuned, sparsity=1.0).region)
    assert len(regions[0]) == 3 and regions[0] == regions[1]


# -- Exceptions, checkpoints, copies -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_restores_the_model_and_leaves_the_ledger(error: type[BaseException]) -> None:
    model = classifier()
    ledger, before = Ledger.of_model(model), state_of(model)
    with pytest.raises(error), learning(model, ledger, "one", batches=labelled(1), sparsity=0.01):
        train(model, labelled(2))
        raise error
    assert_same(model, before)
    assert ledger.tasks == []
    with learning(model, ledger, "one", batches=labelled(1), sparsity=0.01):
        train(model, labelled(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_in_the_midst_is_a_plain_model(tmp_path: Any, dtype: torch.dtype) -> None:
    """The saved model has the last step's values; loading it restores the vector bit for bit. A copy does not change."""
    model = language_model(dtype)
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", batches=texts(1), sparsity=0.01) as skill:
        train(model, texts(2))
        model.save_pretrained(tmp_path)
        kept, answer = skill.values.detach().clone(), model.eval()(**texts(9)[0]).logits
        plain = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=dtype).eval()
        assert torch.equal(plain(**texts(9)[0]).logits, answer)
        state, reference = state_of(model), copy.deepcopy(model)
        train(model, texts(3))
        assert not torch.equal(skill.values, kept)
        assert torch.equal(reference.eval()(**texts(9)[0]).logits, answer)
        model.load_state_dict(state, strict=False)
        assert torch.equal(skill.values, kept)
        assert torch.equal(model.eval()(**texts(9)[0]).logits, answer)


# -- Refusals ----------------------------------------------------------------------------------------------


def test_what_cannot_be_learned() -> None:
    model = language_model()
    ledger, before = Ledger.of_model(model), state_of(model)

    def learn(task: str = "new", on: Any = model, **arguments: Any) -> Callable[[], None]:
        def action() -> None:
            with learning(on, ledger, task, **{"batches": texts(1), "sparsity": 0.01} | arguments):
                raise AssertionError("it began")

        return action

    with learning(model, ledger, "known", batches=texts(1), sparsity=0.01):
        refused(learn(), UsageError, "being learned on this model")
        train(model, texts(2))
    entries = len(ledger.space)
    other = pre_trained(lambda: GPT2LMHeadModel(tiny.gpt2_config(60)))
    with torch.no_grad():
        other.transformer.h[0].mlp.c_fc.bias += 1
    quantised, offloaded = language_model(), language_model()
    codes = torch.zeros(quantised.transformer.h[0].mlp.c_fc.weight.shape, dtype=torch.int8)
    quantised.transformer.h[0].mlp.c_fc.weight = nn.Parameter(codes, requires_grad=False)
    offloaded.transformer.ln_f.to_empty(device="meta")
    refused(lambda: Ledger.of_model(offloaded), ModelError, "is not in memory")
    for action, error, words in (
        (learn("known"), TaskError, ("'known' is already in the ledger", "another name")),
        (learn(batches=None), UsageError, ("batches=…",)),
        (learn(batches=[]), UsageError, ("hold no row",)),
        (learn(batches=[{"input_ids": texts(1)[0]["input_ids"]}]), UsageError, ("give no loss",)),
        (learn(loss=lambda m, b: m(**b).loss * torch.nan), TrainingError, ("expected a finite one",)),
        (learn(loss=lambda m, b: (m(**b).loss * 0).sqrt()), TrainingError, ("expected finite ones",)),
        (learn(region=Region.of([entries])), ForgetfreeError, ("do not fit a parameter space",)),
        (
            learn(region=ledger.owned(), parent="known"),
            UsageError,
            ("No entry is free for task 'new': 'known'", "parent=None"),
        ),
        (learn(region=Region.empty()), UsageError, ("No entry is free", "its region is empty")),
        (learn(parent="knwon"), TaskError, ("holds no task 'knwon'. Did you mean 'known'?",)),
        (learn(rows="many"), UsageError, ("rows must be a whole number of at least 1, got 'many'",)),
        (learn(region_from="gradients"), UsageError, ("Did you mean 'gradient'?",)),
        (learn(region_from="movement", fine_tuned="place"), UsageError, ("got fine_tuned='place'", ".state_dict()")),
        (learn(heads=["scores"]), UsageError, ("heads names 'scores', expected modules outside of the body",)),
        (learn(heads=["transformer.h.0"]), UsageError, ("expected modules outside of the body",)),
        (learn(on=other), LedgerError, ("belongs to other weights",)),
        (learn(on=torch.compile(model)), ModelError, ("compiled",)),
        (learn(on=quantised), ModelError, ("its weights are quantised", "effect='beside'")),
        (learn(on=offloaded), ModelError, ("lies on cpu, meta",)),
    ):
        refused(action, error, *words)
    assert ledger.tasks == ["known"]
    assert_same(model, before)
    selections = Ledger(ledger.space, ledger.fingerprint, "selection")
    refused(
        learning(model, selections, "new", batches=texts(1)).__enter__,
        UsageError,
        "are selections",
        "Create another ledger",
    )
    refused(lambda: answering(model, ledger, "knwon").__enter__(), TaskError, "Did you mean 'known'?")


def test_a_trainer_that_changes_the_model() -> None:
    model = language_model()
    ledger = Ledger.of_model(model)
    with refusing(model, "Leave torch_compile out", batches=texts(1)):
        torch.compile(model, backend="eager")(**texts(2)[0])
    region = Region.of(torch.arange(0, len(ledger.space), 7))
    for transformed in (torch.func.vmap, lambda layer: torch.func.grad(lambda x: layer(x).sum())):
        with refusing(model, "torch.func", region=region):
            transformed(model.transformer.h[0].mlp)(torch.randn(3, model.config.n_embd))
    with pytest.raises(LedgerError, match="does not own"), learning(model, ledger, "one", batches=texts(1)):
        model.transformer.h[0].mlp.c_fc.bias.data += 1
    assert ledger.tasks == []
