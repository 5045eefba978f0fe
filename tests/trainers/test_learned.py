"""A task is recorded only if it learned; each entry of its region has the gradient of plain training, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compared import different, state_of
from loops import Ended, assert_same, begun, classifier, labelled, language_model, refused, refusing, texts, train
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from forgetfree import Ledger
from forgetfree.core.readout_model import part_named
from forgetfree.core.regions import Region
from forgetfree.errors import ModelError, TrainingError, UsageError
from forgetfree.testing.tiny import bert_config, pre_trained
from forgetfree.trainers.learning import answering, learning

Loss = Callable[[nn.Module, Any], Tensor]


def numbers(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of eight numbers, and labels."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Loss = loss_of) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def trained(model: nn.Module, batch: Any, loss: Loss = loss_of, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(steps):
        step(model, batch, optimizer, loss)


#: Arguments of `learning` for a model on numbers, and for a model on texts.
NUMBERS: dict[str, Any] = {"batches": [numbers()], "loss": loss_of, "sparsity": 0.3}
TEXTS: dict[str, Any] = {"batches": texts(1), "sparsity": 0.05}


# -- Gradients (tests/core/test_taps.py covers the uses of a matrix) ------------------------------------------


def gradients_of(model: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the gradient of each pass in plain training and inside `learning`, with steps of rate 0 in between."""
    ledger = Ledger.of_model(model)
    plain = []
    for loss in losses:
        model.zero_grad()
        loss(model).backward()
        tensors = ledger.space.parameters(model)
        plain.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in tensors]))
    model.zero_grad()
    found = []
    with (
        pytest.raises(Ended),
        learning(model, ledger, "one", **NUMBERS | {"sparsity": 0.9, "region_from": "random"}) as skill,
    ):
        optimizer = torch.optim.SGD([skill.values], lr=0.0)
        for loss in losses:

            def closure(loss: Callable[[nn.Module], Tensor] = loss) -> Tensor:
                optimizer.zero_grad()
                value = loss(model)
                value.backward()
                return value

            optimizer.step(closure)  # type: ignore[arg-type]
            assert all(each.grad is None for each in model.parameters() if each is not skill.values)
            found.append(skill.values.grad.clone())  # type: ignore[union-attr]
        raise Ended
    return torch.stack(found), torch.stack(plain)[:, skill.free.indices]


class Gated(nn.Module):
    """A model with gated weights outside of linear layers, and a ``score`` that can be called without ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = 0.0
        self.w, self.b = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8))
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def score(self, x: Tensor) -> Tensor:
        h = self.linear(x) @ self.linear.weight.mT
        out: Tensor = self.out(x + self.gate * torch.tanh(F.linear(h, self.w).add_(self.b) + h @ self.w.T))
        return out

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.score(x)


def closed(model: Any) -> Tensor:
    model.gate = 0.0
    return loss_of(model, numbers())


def opened(model: Any) -> Tensor:
    model.gate = 1.0
    x, y = numbers(1)
    with torch.no_grad():  # the model enables gradients again
        logits = model(x)
    return F.cross_entropy(logits, y)


def no_forward(model: Any) -> Tensor:
    x, y = numbers(3)
    return F.cross_entropy(model.score(x), y)


def penalty(model: Any) -> Tensor:
    w = model.linear.weight
    return opened(model) + (w.T @ w - torch.eye(8)).square().sum() + model.b.square().sum()


@pytest.mark.parametrize("losses", [[closed, opened, no_forward, penalty, opened], [penalty, no_forward, closed]])
def test_what_the_first_pass_did_not_show_has_the_gradient_of_plain_training(
    losses: list[Callable[[nn.Module], Tensor]],
) -> None:
    """Such a part gets no gradient in the first pass, or is used outside of any module's ``forward``."""
    torch.manual_seed(0)
    found, plain = gradients_of(Gated(), losses)
    assert bool(plain.any())
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def test_a_reference_past_the_module_is_refused_by_name() -> None:
    """An example is a list of tensors that the model made for itself."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(8, 8), nn.Linear(8, 2)
            self.known = [self.first.weight]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.tanh(x @ self.known[0]))
            return out

    torch.manual_seed(0)
    model, words = Listed(), ("reads first.weight by a stored reference", "graftable=…")
    with refusing(model, *words, **NUMBERS | {"sparsity": 0.9}):
        trained(model, numbers(), steps=2)


def test_other_functions_have_the_gradient_of_plain_training() -> None:
    """This holds entry by entry for PyTorch functions of weights and biases; only the region's vector requires gradients."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8))
            self.kernel = nn.Parameter(torch.randn(8, 1, 3))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.einsum("ni,oi->no", x, self.w) + x @ self.w.t() + torch.matmul(x, self.w) * self.b
            h = F.conv1d(h[:, None], self.kernel, padding=1).mean(1) + F.bilinear(x, x, self.w[None].expand(8, 8, 8))
            return torch.stack([h.sum(1), (h * self.w.flip(0)[0] * self.w[2:, 1:].mean()).sum(1)], 1)

    torch.manual_seed(0)
    model, batch = Many(), numbers()
    ledger = Ledger.of_model(model)
    loss_of(model, batch).backward()
    plain = torch.cat([each.grad.flatten() for each in ledger.space.parameters(model) if each.grad is not None])
    model.zero_grad()
    with learning(model, ledger, "one", region_from="random", sparsity=0.5) as skill:
        loss_of(model, batch).backward()
        assert torch.allclose(skill.values.grad, plain[skill.free.indices], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
        assert [name for name, each in model.named_parameters() if each.requires_grad] == ["region_values"]
        assert all(each.grad is None for each in model.parameters() if each is not skill.values)
        trained(model, batch)


class Experts(nn.Module):
    """A model with two experts; no row reaches the second."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.experts[0](x)))
        return out


def test_a_tensor_that_the_model_did_not_use_is_noted_and_owns_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Experts()
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", region_from="random", sparsity=0.5) as skill:
        optimizer = torch.optim.AdamW([skill.values], lr=0.1, weight_decay=0.1)
        for _ in range(3):
            step(model, numbers(), optimizer)
    assert "task 'one': no row reached experts.1.weight" in capsys.readouterr().err
    (record,) = ledger.records
    unused = next(spec for spec in ledger.space.tensors if spec.name == "experts.1.weight")
    owned = record.owned.region.indices
    assert 0 < len(owned) < len(skill.free)
    assert not bool(((owned >= unused.offset) & (owned < unused.offset + unused.size)).any())
    assert record.region == record.owned.region


# -- Nothing moved ------------------------------------------------------------------------------------------


def nothing(model: nn.Module, batches: Any) -> None:
    pass


def no_step(model: nn.Module, batches: Any) -> None:
    model(**batches[0]).loss.backward()


def rate_of_zero(model: nn.Module, batches: Any) -> None:
    train(model, batches, lambda p: torch.optim.SGD(p, lr=0.0))


def another_model(model: nn.Module, batches: Any) -> None:
    train(language_model(), batches)


def another_loss(model: nn.Module, batches: Any) -> None:
    own = [each for each in model.parameters() if each.requires_grad]
    optimizer, scale = torch.optim.SGD(own, lr=0.1), torch.ones((), requires_grad=True)
    with torch.enable_grad():
        (model(**batches[0]).loss.detach() * scale).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (nothing, "the block is empty"),
        (another_model, "a fresh one of model_init="),
        (no_step, "no optimiser made a step"),
        (rate_of_zero, "after 3 steps all values are unchanged"),
        (another_loss, "the loss does not depend on its region"),
    ],
)
def test_a_task_that_learned_nothing_is_not_recorded(way: Callable[..., None], reason: str) -> None:
    model = language_model()
    with refusing(model, "Task 'one' has learned nothing", reason, **TEXTS):
        way(model, texts(2))


def test_steps_that_the_dtype_rounds_away_are_none() -> None:
    model = language_model(torch.bfloat16)
    weights_near_1 = {"graftable": "ln_"}
    with refusing(model, "float32", of=weights_near_1, sparsity=0.1, batches=texts(1)) as skill:
        before = skill.values.detach().clone()
        train(model, texts(2), lambda p: torch.optim.SGD(p, lr=1e-5))
        assert not torch.equal(skill.values, before)


def test_entries_that_did_not_move_are_free_for_others() -> None:
    model = network()
    ledger = Ledger.of_model(model)
    region = Region.of(range(0, 40))
    with learning(model, ledger, "one", region=region) as skill, torch.no_grad():
        skill.values[:10] += 1.0
    assert ledger.records[0].owned.region == Region.of(range(10))
    with learning(model, ledger, "two", region=region, parent="one") as skill:
        assert skill.free == Region.of(range(10, 40))
        trained(model, numbers())


@pytest.mark.parametrize("given", [{}, {"labels": ["no", "yes"]}], ids=["bare", "defined"])
def test_a_task_may_train_its_head_alone(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, tokenizer = classifier(), None
    if given:
        from forgetfree.testing.tiny import wordpiece

        tokenizer = wordpiece()
        model = pre_trained(lambda: transformers.BertForSequenceClassification(bert_config(len(tokenizer))))
        given = {**given, "tokenizer": tokenizer}
    ledger, before, batch = Ledger.of_model(model), state_of(model), labelled(3)[0]
    with learning(model, ledger, "one", batches=labelled(1), sparsity=0.01, **given):
        optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.5)
        for _ in range(3):
            step(model, batch, optimizer, lambda m, b: m(**b).loss)
        head = model.classifier.weight.detach().clone()
    assert "its head alone was trained" in capsys.readouterr().err
    assert_same(model, before)
    (record,) = ledger.records
    assert len(record.owned.region) == len(record.region) == 0
    assert torch.equal(record.readout["classifier.weight"], head)
    ledger.save(tmp_path / "skills.safetensors")
    with answering(model, Ledger.load(tmp_path / "skills.safetensors"), "one"):
        assert torch.equal(model.classifier.weight, head)
    with learning(model, ledger, "two", batches=labelled(1), sparsity=0.01):
        train(model, labelled(2))
    assert ledger.tasks == ["one", "two"]


def test_a_head_whose_statistics_alone_moved_has_learned_nothing() -> None:
    model = classifier()
    model.classifier = nn.Sequential(nn.BatchNorm1d(model.config.hidden_size), model.classifier)
    with refusing(model, "no optimiser", batches=labelled(1)):
        model.train()(**labelled(2)[0])


def test_a_head_that_is_frozen_is_not_trained() -> None:
    model = classifier()
    model.classifier.requires_grad_(False)
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", batches=labelled(1), sparsity=0.05) as skill:
        assert skill.heads == ()
        train(model, labelled(2))
    assert ledger.records[0].readout == {}


# -- Optimisers ---------------------------------------------------------------------------------------------


def test_an_optimiser_that_was_made_before_the_block_is_refused_at_its_first_step() -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with refusing(model, "it was made before the block", "optimizers= is left out", batches=labelled(1)):
        step(model, labelled(2)[0], optimizer, lambda m, b: m(**b).loss)
        raise AssertionError("it made a step")


def test_an_optimiser_of_an_earlier_block_is_refused() -> None:
    model = language_model()
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", **TEXTS) as skill:
        optimizer = torch.optim.AdamW([skill.values], lr=1e-2)
        step(model, texts(2)[0], optimizer, lambda m, b: m(**b).loss)
    with pytest.raises(TrainingError, match="Create it inside each block"), learning(model, ledger, "two", **TEXTS):
        step(model, texts(2)[0], optimizer, lambda m, b: m(**b).loss)
    assert ledger.tasks == ["one"]


def test_a_refusal_that_a_trainer_goes_on_from_ends_the_block() -> None:
    """A hyperparameter search may catch the error of a trial and go on."""
    model = language_model()
    early = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with refusing(model, "made before the block", **TEXTS):
        with suppress(TrainingError):
            step(model, texts(2)[0], early, lambda m, b: m(**b).loss)
        train(model, texts(2))


def test_optimisers_of_others_pass() -> None:
    """They belong to a critic, another model or another open block, or hold all of the model's parameters."""
    model, other, critic = language_model(), network(), nn.Linear(4, 1)
    ledger, theirs, before = Ledger.of_model(model), Ledger.of_model(other), state_of(model)
    with learning(model, ledger, "one", **TEXTS), learning(other, theirs, "one", **NUMBERS):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for batch in texts(2):
            step(model, batch, optimizer, lambda m, b: m(**b).loss)
            step(critic, None, torch.optim.SGD(critic.parameters(), lr=0.1), lambda m, _: m(torch.ones(1, 4)).sum())
        trained(other, numbers())
        trained(network(), numbers())
    assert_same(model, before)
    assert (ledger.tasks, theirs.tasks) == (["one"], ["one"])


def test_weights_that_somebody_unfreezes_are_not_trained() -> None:
    model = language_model()
    with refusing(model, "does not own", **TEXTS):
        model.requires_grad_(True)
        train(model, texts(2))


def rows_of_labels() -> list[dict[str, Tensor]]:
    return [{name: tensor[i] for name, tensor in labelled(1)[0].items()} for i in range(4)]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_hyperparameter_search_in_one_block_is_refused(tmp_path: Path) -> None:
    """With a fresh model for each trial, nothing is learned; with the same model, the second trial would continue the first."""
    from transformers import Trainer, TrainingArguments

    def search(model: Any, init: Callable[[], Any]) -> None:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        rows: Any = rows_of_labels()
        trainer = Trainer(model_init=init, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)},
            n_trials=2,
            backend="optuna",
        )

    model = classifier()
    for init, reason in ((classifier, "model_init="), (lambda: model, "its own block and ledger")):
        with refusing(model, reason, batches=labelled(1)):
            search(model, init)


def test_each_trial_may_have_a_block_of_its_own() -> None:
    """All trials start from the same values; in a trial, a second optimiser continues, as in two phases of training."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    model, starts = language_model(), []

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("rate", 1e-3, 1e-1)
        with learning(model, Ledger.of_model(model), "trial", **TEXTS) as skill:
            starts.append(skill.values.detach().clone())
            train(model, texts(2))
            return train(model, texts(2), lambda p: torch.optim.SGD(p, lr=rate))[-1]

    optuna.create_study(sampler=optuna.samplers.RandomSampler(0)).optimize(objective, n_trials=2)
    assert torch.equal(*starts)


# -- Frozen, wrapped and cast models -------------------------------------------------------------------------


def tensors_of_region(ledger: Ledger, region: Region) -> set[str]:
    return {ledger.space.tensors[number].name for number, _, _ in ledger.space.split(region.indices)}


@pytest.mark.parametrize("source", ["snip", "random", "movement"])
def test_frozen_tensors_own_nothing(source: Any) -> None:
    model = language_model()
    for name, each in model.named_parameters():
        each.requires_grad_("h.1.mlp" in name)
    tuned = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    ledger = Ledger.of_model(model)
    how = {"region_from": source, "fine_tuned": tuned if source == "movement" else None, "batches": texts(1)}
    with learning(model, ledger, "one", sparsity=0.02, **how) as skill:
        train(model, texts(2))
    assert all("h.1.mlp" in name for name in tensors_of_region(ledger, skill.free))
    assert len(skill.free) == int(0.02 * len(ledger.space))
    assert [name for name, each in model.named_parameters() if each.requires_grad] == [
        name for name, _ in model.named_parameters() if "h.1.mlp" in name
    ]
    refused(
        lambda: learning(model, ledger, "two", region=Region.of([0, 1])).__enter__(),
        UsageError,
        "h.0.ln_1.weight",
        "frozen",
    )


def test_a_model_that_is_frozen_as_a_whole_may_be_grafted(capsys: pytest.CaptureFixture[str]) -> None:
    """Models for inference are frozen in this way."""
    model = classifier()
    model.requires_grad_(False)
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", batches=labelled(1)):
        train(model, labelled(2))
    assert "all graftable tensors of the model are frozen" in capsys.readouterr().err
    assert len(ledger.owned()) and not any(each.requires_grad for each in model.parameters())


@contextmanager
def one_process() -> Iterator[None]:
    """Open a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_model_that_was_wrapped_before_the_block_is_refused() -> None:
    """DistributedDataParallel would not average the region's gradient; wrapped inside the block, it does."""
    model = language_model()
    ledger = Ledger.of_model(model)
    with one_process():
        prepared = DistributedDataParallel(model)
        for wrapped in (prepared, nn.DataParallel(model)):
            refused(lambda on=wrapped: learning(on, ledger, "one").__enter__(), ModelError, "Give model.module")  # type: ignore[misc]
        with refusing(model, "Wrap it inside", **TEXTS):
            prepared(**texts(2)[0])
        with learning(model, ledger, "one", **TEXTS):
            train(DistributedDataParallel(model), texts(2))
    assert ledger.tasks == ["one"]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_reentrant_checkpoints_of_several_processes_are_refused() -> None:
    """DistributedDataParallel expects one gradient of the region per backward pass; non-reentrant checkpoints give one."""
    model = language_model()
    ledger = Ledger.of_model(model)
    with one_process():
        with refusing(model, "use_reentrant", **TEXTS):
            model.gradient_checkpointing_enable({"use_reentrant": True})
            train(DistributedDataParallel(model), texts(2))
        with learning(model, ledger, "one", **TEXTS):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            train(DistributedDataParallel(model), texts(2))
    assert ledger.tasks == ["one"]


class Buffered(nn.Module):
    """A network with a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.register_buffer("scale", torch.tensor(0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.to(self.scale.dtype) * self.scale)
        return out.float()


@pytest.mark.parametrize(
    ("cast", "word"),
    [
        (lambda model: model.bfloat16(), "changed the dtype"),
        (lambda model: model.half(), "changed the dtype"),
        (lambda model: model.half().float(), "changed weights when it moved"),
    ],
)
def test_a_cast_inside_the_block_is_refused_and_undone(cast: Callable[[nn.Module], nn.Module], word: str) -> None:
    model = Buffered()
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    with refusing(model, word, **NUMBERS):
        cast(model)
        trained(model, numbers())
    assert different(dict(model.named_buffers()), buffers) == []


def test_a_cast_after_training_costs_nothing() -> None:
    recorded = []
    for cast in (False, True):
        model = language_model()
        ledger, before = Ledger.of_model(model), state_of(model)
        with learning(model, ledger, "one", **TEXTS):
            torch.manual_seed(5)
            train(model, texts(2))
            if cast:
                model.half()
        assert_same(model, before)
        recorded.append(ledger.records[0].owned.values)
    assert torch.equal(*recorded)


# -- Heads, any module ---------------------------------------------------------------------------


def untied() -> Any:
    return pre_trained(
        lambda: transformers.GPT2LMHeadModel(language_model().config.__class__(**_small, tie_word_embeddings=False))
    )


_small: dict[str, Any] = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


def masked() -> Any:
    return pre_trained(lambda: transformers.BertForMaskedLM(bert_config(60)))


def encoder_decoder() -> Any:
    config = transformers.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, tie_word_embeddings=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return pre_trained(lambda: transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (untied, "lm_head.weight"),
        (masked, "cls.predictions.transform.dense.weight"),
        (encoder_decoder, "lm_head.weight"),
    ],
)
def test_the_head_of_a_language_model_belongs_to_its_ledger(make: Callable[[], Any], head: str, tmp_path: Path) -> None:
    """Another head is refused, by a ledger from memory or from the file; the body alone still answers."""
    model = make()
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", **TEXTS):
        train(model, texts(2))
    ledger.save(tmp_path / "skills.safetensors")
    with torch.no_grad():
        dict(model.named_parameters(remove_duplicate=False))[head].view(-1)[7] += 1.0
    for known in (ledger, Ledger.load(tmp_path / "skills.safetensors")):
        with pytest.raises(Exception, match=r"with another head|belongs to other weights"):
            answering(model, known, "one").__enter__()
    if make is not encoder_decoder:
        body = part_named(model, ledger.space)
        with answering(body, ledger, "one"):
            pass


def test_parts_beside_the_head_that_are_drawn_anew_are_none_of_it() -> None:
    """A model of another class has a randomly initialised part that the checkpoint lacks."""
    model = masked()
    ledger = Ledger.of_model(model)
    with learning(model, ledger, "one", **TEXTS):
        train(model, texts(2))
    torch.manual_seed(7)
    other = transformers.BertForPreTraining(model.config)
    other.load_state_dict(model.state_dict(), strict=False)
    with answering(other, ledger, "one"):
        pass


def test_a_model_of_images_learns() -> None:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2)
    model = transformers.ResNetForImageClassification(config)
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4) % 2}
    ledger, before = Ledger.of_model(model), state_of(model)
    with learning(model.eval(), ledger, "one", batches=[batch], sparsity=0.2):
        trained(model, batch, lambda m, b: m(**b).loss)
    assert_same(model, before)
    with torch.no_grad():
        plain = float(model(**batch).loss)
        with answering(model, ledger, "one"):
            assert float(model(**batch).loss) < plain


def test_batches_of_which_the_model_computes_no_loss_are_told_the_remedy() -> None:
    """Examples are a dataset's rows, the keys of another trainer, and bare tensors."""
    model = language_model()
    ledger = Ledger.of_model(model)
    rows = [{name: tensor[0] for name, tensor in texts(1)[0].items()}]
    others = [{"prompt_ids": texts(1)[0]["input_ids"], "chosen_ids": texts(1)[0]["input_ids"]}]
    for batches in (rows, others, [texts(1)[0]["input_ids"]]):
        refused(
            lambda batches=batches: begun(model, ledger, batches=batches),  # type: ignore[misc]
            UsageError,
            "trainer.get_train_dataloader()",
            "loss=lambda model, batch: trainer.compute_loss(model, batch)",
        )
