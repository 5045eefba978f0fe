"""Tasks beside the weights: 8-bit and 4-bit bases learn in any trainer, and base and earlier tasks stay bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import different, state_of
from loops import Ended, begun, classifier, labelled, language_model, logits, refused, refusing, texts, train
from quantised import QUANTISATIONS, counting, llama, load, qwen2, sft
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.operations import Launches
from benchmarks.speed.measurement import PeakMemory
from forgetfree import Ledger
from forgetfree.core.linear_layers import LinearLayers, dense_weight, is_linear, space_of_layers
from forgetfree.core.readout_model import body_of
from forgetfree.core.regions import Region
from forgetfree.errors import LedgerError, ModelError, TrainingError, UsageError
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.testing.tiny import pre_trained
from forgetfree.trainers.attachment import NAME, AttachedRegion
from forgetfree.trainers.learning import answering, learning


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Any], str], Any]:
    place = tmp_path_factory.mktemp("bases")
    return lambda make, how: load(make, how, place / make.__name__)


BESIDE = {"effect": "beside"}


def dense(model: Any, make: Callable[[], Any]) -> Any:
    """Return the same model with dequantised weights."""
    plain = pre_trained(make).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if is_linear(module):
                plain.get_submodule(name).weight.copy_(dense_weight(module))
    return plain


def random_region(space: Any, share: float = 0.02) -> Region:
    return Region.from_mask(torch.rand(len(space), generator=torch.Generator().manual_seed(0)) < share)


def gradients(model: Any, space: Any, region: Region) -> list[Tensor]:
    """Return the region's entries of a plain model's gradients, tensor by tensor."""
    return [
        grad.reshape(-1)[local]
        for number, local, _ in space.split(region.indices)
        for grad in [body_of(model).get_parameter(space.tensors[number].name).grad]
    ]


# -- Training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nf4", "torchao int8"])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_gradients_are_those_of_the_dequantised_weights(quantised: Any, make: Any, how: str) -> None:
    """In three SGD steps on two batches, the differences move like the same entries of the dense weights."""
    model, plain = quantised(make, how).eval(), dense(quantised(make, how), make)
    ledger = Ledger.of_model(model)
    assert ledger.effect == "beside" and {spec.dtype for spec in ledger.space.tensors} == {torch.float32}
    region = random_region(ledger.space)
    with learning(model, ledger, "one", region=region) as skill:
        for _ in range(3):
            for batch in texts(1, 2):
                model(**batch).loss.backward()
                plain(**batch).loss.backward()
            expected = torch.cat(gradients(plain, ledger.space, region))
            assert float((skill.values.grad - expected).norm() / expected.norm()) <= 1e-5
            torch.optim.SGD([skill.values], lr=1.0).step()
            with torch.no_grad():
                for number, local, where in ledger.space.split(region.indices):
                    body_of(plain).get_parameter(ledger.space.tensors[number].name).view(-1)[local] -= expected[where]
            skill.values.grad = None
            plain.zero_grad()


def test_the_gradient_of_a_layer_in_8_bits(quantised: Any) -> None:
    """bitsandbytes also rounds the inputs of such a layer, so only a single layer can be compared with a dense one."""
    model = quantised(llama, "int8")
    layer, name = model.model.layers[0].mlp.up_proj, "layers.0.mlp.up_proj.weight"
    ledger = Ledger.of_model(model, graftable=name)
    region, seen = random_region(ledger.space), dict[str, Tensor]()
    with learning(model, ledger, "one", region=region) as skill:
        layer.register_forward_hook(
            lambda module, inputs, y: (
                seen.update(x=inputs[0]) or (y.register_hook(lambda dy: seen.update(dy=dy)) and None)
            )
        )
        model(**texts(1)[0]).loss.backward()
        expected = (seen["dy"].flatten(0, 1).T @ seen["x"].flatten(0, 1)).view(-1)[region.indices]
        assert float((skill.values.grad - expected).norm() / expected.norm()) <= 1e-5
        torch.optim.SGD([skill.values], lr=1.0).step()


@pytest.mark.parametrize("make", [language_model, classifier])
def test_beside_is_written_within_rounding(make: Callable[[], Any]) -> None:
    """GPT-2, with weights of shape (in, out), and BERT, in float32, train the same entries and answer in both ways."""
    models = {"written": make().eval(), "beside": make().eval()}
    ledgers = {effect: Ledger.of_model(model, effect=effect) for effect, model in models.items()}
    beside, written = ledgers["beside"].space, {spec.name: spec for spec in ledgers["written"].space.tensors}
    region = random_region(beside)
    entries, turned = list[Tensor](), make is language_model
    for number, local, _ in beside.split(region.indices):
        spec = beside.tensors[number]
        if turned and len(spec.shape) == 2:
            local = torch.arange(spec.size).view(spec.shape).T.reshape(-1).argsort()[local]
        entries.append(local + written[spec.name].offset)
    indices, order = torch.cat(entries).sort()
    batches = (texts if turned else labelled)(2)
    found = {}
    for effect, model in models.items():
        with learning(
            model, ledgers[effect], "one", region=region if effect == "beside" else Region(indices), heads=[]
        ) as skill:
            start = skill.values.detach().clone()
            optimizer = torch.optim.SGD([skill.values], lr=0.1)
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            moved = skill.values.detach() - start
        found[effect] = moved if effect == "beside" else torch.zeros_like(moved).index_copy_(0, order, moved)
    distance = (found["beside"] - found["written"]).norm() / found["written"].norm()
    assert 0 < float(distance) < 1e-4  # sums have another order, and θ + δ rounds δ
    answers = [logits(models[effect], ledgers[effect], "one", batches[0]) for effect in models]
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints_and_accumulation(quantised: Any, reentrant: bool) -> None:
    found = []
    for checkpoints in (False, True):
        model = quantised(llama, "nf4").train()
        ledger = Ledger.of_model(model)
        with pytest.raises(Ended), learning(model, ledger, "one", region=random_region(ledger.space)) as skill:
            if checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            for batch in texts(3, 2):
                model(**batch).loss.backward()
            found.append(skill.values.grad)
            raise Ended
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("source", ["gradient", "snip"])
def test_the_region_is_that_of_the_dequantised_weights(quantised: Any, source: Any) -> None:
    """The gradient is that of one batch, or the sum over two, on θ_pre and on a task with its differences."""
    model, plain = quantised(llama, "nf4"), dense(quantised(llama, "nf4"), llama)
    ledger, regions = Ledger.of_model(model), list[Region]()
    tensors = [body_of(plain).get_parameter(spec.name) for spec in ledger.space.tensors]
    for count, parent in ((1, ""), (2, ""), (1, "one"), (2, "one")):
        if parent not in ("", *ledger.tasks):
            with learning(model, ledger, parent, region=random_region(ledger.space)) as skill, torch.no_grad():
                skill.values.add_(0.3)
            for number, local, _ in ledger.space.split(ledger.owned().indices):
                tensors[number].data.view(-1)[local] += 0.3
        how: dict[str, Any] = {"batches": texts(1, count), "sparsity": 0.01, "region_from": source, "parent": parent}
        region = begun(model, ledger, **how).region
        for batch in texts(1, count):
            plain(**batch).loss.backward()
        scores = torch.cat([(p.grad * (p if source == "snip" else 1)).abs().reshape(-1) for p in tensors])
        scores[ledger.taken(parent).indices] = 0
        plain.zero_grad()
        expected = scores.topk(len(region)).indices
        assert len(region) == len(ledger.space) // 100
        assert len(region & Region(expected.sort().values)) >= len(region) - 3  # the last scores are nearly equal
        regions.append(region)
    assert len(regions[0] & regions[2]) < 0.5 * len(regions[0])
    drawn = begun(model, ledger, region_from="random", sparsity=0.01).region
    assert len(drawn) == len(region) and drawn != region


class Unknown(nn.Module):
    """A quantised layer from an unknown library: 8-bit codes with a scale per row, and a bias."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = width, out
        dense = torch.randn(out, width, generator=torch.Generator().manual_seed(out))
        self.register_buffer("scale", dense.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("codes", (dense / self.scale).round().to(torch.int8))
        self.bias = nn.Parameter(torch.randn(out, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes * self.scale, self.bias)


def test_a_layer_of_any_library(tmp_path: Path) -> None:
    model, x = nn.Sequential(Unknown(6, 5), nn.Tanh(), Unknown(5, 3)), torch.randn(8, 6)
    torch.testing.assert_close(dense_weight(model[0]), model[0].codes * model[0].scale)
    ledger, before = Ledger.of_model(model), state_of(model)
    assert [(spec.name, spec.shape) for spec in ledger.space.tensors] == [
        *(("0.weight", (5, 6)), ("0.bias", (5,)), ("2.weight", (3, 5)), ("2.bias", (3,)))
    ]
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    answers = {}
    for task in ("one", "two"):
        with learning(model, ledger, task, batches=[x], loss=loss, sparsity=0.3, parent=ledger.last) as skill:
            optimizer = torch.optim.AdamW([skill.values], lr=0.05)
            for _ in range(3):
                loss(model, x).backward()
                optimizer.step()
        with answering(model, ledger, task):
            answers[task] = model(x)
    assert different(model.state_dict(), before) == []
    ledger.save(tmp_path / "skills.safetensors")
    for task, answer in answers.items():
        with answering(model, Ledger.load(tmp_path / "skills.safetensors"), task):
            assert torch.equal(model(x), answer)


# -- Three tasks in a trainer, and a new process -------------------------------------------------------------


@pytest.mark.sampled("llama-nf4", share=0.1)
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # libraries warn about each other
@pytest.mark.parametrize("how", QUANTISATIONS)
@pytest.mark.parametrize("make", [llama, qwen2])
def test_sft_on_a_quantised_base(quantised: Any, make: Any, how: str, tmp_path: Path) -> None:
    """The loss falls by at least 0.8 of the fall with PEFT's LoRA, which trains more values; tasks keep their bits."""
    from peft import LoraConfig

    rows = {task: counting(step) for step, task in ((1, "one"), (2, "two"), (3, "three"))}
    model = quantised(make, how)
    ledger, seen, fell = Ledger.of_model(model), dict[str, Tensor](), {}
    before, x = _codes(model), texts(9)[0]
    for task, data in rows.items():
        parent = "one" if task == "two" else None
        with learning(model, ledger, task, batches=texts(1), sparsity=0.02, parent=parent):
            fell[task] = sft(model, data, tmp_path)
        seen[task] = logits(model, ledger, task, x)
        assert all(torch.equal(logits(model, ledger, name, x), answer) for name, answer in seen.items())
    assert different(_codes(model), before) == [] and model.is_quantized
    assert not any(module._forward_hooks for module in model.modules() if is_linear(module))
    lora = sft(
        quantised(make, how),
        rows["one"],
        tmp_path,
        peft_config=LoraConfig(r=1, lora_alpha=1, target_modules="all-linear"),
    )
    print(make.__name__, how, {"beside": fell, "LoRA": lora})
    assert fell["one"][0] - fell["one"][-1] >= 0.8 * (lora[0] - lora[-1]) > 0
    ledger.save(tmp_path / "skills.safetensors")
    model.save_pretrained(tmp_path / "base")
    torch.save((x, seen), tmp_path / "seen.pt")
    script = f"""
        import torch
        from transformers import AutoModelForCausalLM
        from forgetfree import Ledger, answering, learning
        torch.set_num_threads({torch.get_num_threads()})
        x, seen = torch.load("seen.pt")
        model, ledger = AutoModelForCausalLM.from_pretrained("base").eval(), Ledger.load("skills.safetensors")
        def check():
            for task, answer in seen.items():
                with answering(model, ledger, task), torch.no_grad():
                    assert torch.equal(model(input_ids=x["input_ids"]).logits, answer), task
        check()
        with learning(model, ledger, "four", batches=[x]) as skill:
            model(**x).loss.backward()
            torch.optim.SGD([skill.values], lr=0.1).step()
        check()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=tmp_path)


def _codes(model: Any) -> dict[str, Tensor]:
    """Return copies of a model's tensors; a quantised tensor is split into its parts."""
    from forgetfree.core.fingerprint import _plain

    return {name: tensor.clone() for name, tensor in _plain(model.state_dict())}


# -- Cleanup, and refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(quantised: Any, error: type[BaseException]) -> None:
    model = quantised(llama, "nf4")
    ledger, before, attributes = Ledger.of_model(model), _codes(model), set(vars(model))
    with pytest.raises(error), learning(model, ledger, "one", batches=texts(1)):
        train(model, texts(2))
        raise error
    assert different(_codes(model), before) == [] and ledger.tasks == [] and model.is_quantized
    assert set(vars(model)) == attributes and NAME not in dict(model.named_parameters())
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
    )
    assert not any(getattr(module, each) for module in model.modules() for each in hooks)
    assert not any(parameter.requires_grad for parameter in model.model.layers[0].mlp.parameters())


def test_a_copy_of_a_model_answers_as_it_does() -> None:
    """DPO makes its reference in this way; a copy made in training is the base."""
    model, x = language_model().eval(), texts(9)[0]
    ledger = Ledger.of_model(model, effect="beside")
    base = model(**x).logits
    with learning(model, ledger, "one", batches=texts(1), sparsity=0.05):
        train(model, texts(2))
        assert torch.equal(copy.deepcopy(model).eval()(**x).logits, base)
    with answering(model, ledger, "one"):
        reference = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(reference(**x).logits, logits(model, ledger, "one", x))


def test_what_is_refused(quantised: Any, tmp_path: Path) -> None:
    model = quantised(llama, "nf4")
    ledger = Ledger.of_model(model)

    def learn(**arguments: Any) -> Callable[[], Any]:
        return lambda: learning(model, ledger, "new", **{"batches": texts(1)} | arguments).__enter__()

    refused(learn(region_from="movement", fine_tuned={}), UsageError, "beside the weights writes none", "'snip'")
    refused(lambda: Ledger.of_model(model, effect="written"), ModelError, "quantised", "effect='beside'")
    refused(lambda: Ledger.of_model(model, effect="besides"), UsageError, "Did you mean 'beside'?")
    with learning(model, ledger, "one", batches=texts(1)):
        train(model, texts(2))
    refused(lambda: ledger.graft("one"), LedgerError, "differences beside them")
    with answering(model, ledger, "one"):
        refused(learn(), LedgerError, "answers task 'one' now")
    ledger.save(tmp_path / "skills.safetensors")
    other = quantised(llama, "int8")
    refused(
        lambda: answering(other, Ledger.load(tmp_path / "skills.safetensors"), "one").__enter__(),
        LedgerError,
        "other weights",
    )
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 8)})
    refused(
        lambda: Ledger.of_model(attention, effect="beside"), ModelError, "'attention.out_proj.weight'", "graftable="
    )
    assert len(Ledger.of_model(attention, effect="beside", graftable="^up").space) == 72
    plain = language_model()
    ledger = Ledger.of_model(plain, effect="beside")
    layer = LinearLayers(plain.transformer, ledger.space).module(0)
    begins = learning(plain, ledger, "one", region=Region.of([0]))
    with pytest.raises(TrainingError, match=r"transform of torch\.func"), begins:
        torch.func.vmap(layer)(torch.randn(2, 3, 16))


def test_frozen_layers_own_nothing_and_a_step_without_a_gradient_is_none() -> None:
    model = language_model()
    ledger = Ledger.of_model(model, effect="beside")
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    region = begun(model, ledger, batches=texts(1), sparsity=0.05).region
    assert {number for number, _, _ in ledger.space.split(region.indices)} and all(
        ledger.space.tensors[number].name.startswith("h.1.") for number, _, _ in ledger.space.split(region.indices)
    )
    with pytest.raises(TrainingError, match="has learned nothing"), learning(model, ledger, "one", batches=texts(1)):
        pass


class Inplace(nn.Module):
    """A model that changes its layers' outputs in place, and calls one layer twice, by a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.one(x), inplace=True)
        h = self.two(input=self.two(input=h).mul_(0.5))
        h += 1
        return self.three(h)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_outputs_that_the_model_changes_in_place() -> None:
    torch.manual_seed(0)
    model, x, found = Inplace(), torch.randn(5, 6), []
    for effect in ("written", "beside"):
        ledger: Any = Ledger.of_model(model, effect=effect)  # type: ignore[arg-type]
        assert len(ledger.space) == sum(each.numel() for each in model.parameters())
        with learning(model, ledger, "one", batches=[x], loss=mean_square, sparsity=0.4) as skill:
            for _ in range(2):
                mean_square(model, x).backward()
            found.append((skill.region, skill.values.grad))
            torch.optim.SGD([skill.values], lr=0.1).step()
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_values_that_lie_elsewhere_are_followed() -> None:
    """A third-party optimiser may give a parameter other memory."""
    model, x, losses = Inplace(), torch.randn(5, 6), []
    how: dict[str, Any] = {"batches": [x], "loss": mean_square, "sparsity": 0.5}
    with learning(model, Ledger.of_model(model, effect="beside"), "one", **how) as skill:
        optimizer = torch.optim.SGD([skill.values], lr=0.01)
        for _ in range(3):
            loss = mean_square(model, x)
            loss.backward()
            optimizer.step()
            skill.values.data = skill.values.data.clone()
            losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("of", ["values", "inputs"])
def test_second_derivatives_are_refused(of: str) -> None:
    model, x = Inplace(), torch.randn(5, 6, requires_grad=True)
    how: dict[str, Any] = {"batches": [x.detach()], "loss": mean_square, "sparsity": 0.5}
    with refusing(model, "differentiates gradients", of=BESIDE, **how) as skill:
        held = skill.values if of == "values" else x
        (gradient,) = torch.autograd.grad(mean_square(model, x), [held], create_graph=True)
        gradient.square().sum().backward()


def test_passes_of_other_gradients_are_forgotten() -> None:
    """Adversarial inputs need such passes; the tensors kept for the values are freed by the next pass."""
    model, x = Inplace(), torch.randn(5, 6, requires_grad=True)
    attached = AttachedRegion(model, model, (space := space_of_layers(model)), random_region(space, 0.5), "beside")
    with attached.attached():
        for _ in range(4):
            torch.autograd.grad(mean_square(model, x), [x])
        differences: Any = attached.region
        assert len(differences._flat._passes) == 1
        mean_square(model, x).backward()
    assert differences._flat._passes == {}


def test_one_model_answers_one_task() -> None:
    """This holds for a copy, another switch and a ledger of the other effect; a failed switch leaves the earlier task."""
    model, x = language_model().eval(), texts(9)[0]
    ledgers = {effect: Ledger.of_model(model, effect=effect) for effect in ("beside", "written")}  # type: ignore[arg-type]
    ledger = ledgers["beside"]
    for task, seed in (("one", 2), ("two", 3)):
        with learning(model, ledger, task, batches=texts(1), sparsity=0.05, parent=ledger.last):
            train(model, texts(seed))
    expected = {task: logits(model, ledger, task, x) for task in ledger.tasks}
    with answering(model, ledger, "one"):
        copied = copy.deepcopy(model)
        for held in ledgers.values():
            refused(learning(model, held, "new", batches=texts(1)).__enter__, LedgerError, "answers task 'one' now")
    refused(answering(copied, ledger, "two").__enter__, LedgerError, "a copy that was made meanwhile".capitalize())
    one, other = (LedgerSwitch(ledger, model.transformer) for _ in range(2))
    one.to_task("one")
    other.to(0)
    refused(answering(model, ledger, "two").__enter__, LedgerError, "answers a task")
    whole = ledger.records[1].owned
    object.__setattr__(ledger.records[1], "owned", None)
    with pytest.raises(AttributeError):
        one.to_task("two")
    object.__setattr__(ledger.records[1], "owned", whole)
    with torch.no_grad():
        assert one.stage == 1 and torch.equal(model(**x).logits, expected["one"])
    one.to_task("two")
    with torch.no_grad():
        assert torch.equal(model(**x).logits, expected["two"])
    one.to(0)
    assert torch.equal(logits(model, ledger, "one", x), expected["one"])


def test_a_checkpoint_is_of_one_task_and_region() -> None:
    """With one output directory for several tasks, the second would otherwise start with the values of the first."""
    model = language_model()
    ledger, region = Ledger.of_model(model, effect="beside"), Region.of(range(0, 900, 3))
    with learning(model, ledger, "one", region=region) as skill:
        train(model, texts(2))
        saved, values = copy.deepcopy(model.state_dict()), skill.values.detach().clone()
        train(model, texts(3))
        model.load_state_dict(saved)
        assert torch.equal(skill.values, values)
    for task, other in (("two", region), ("three", Region.of(range(1, 901, 3)))):
        block = learning(model, ledger, task, region=other)
        with pytest.raises(TrainingError, match="a checkpoint of another task"), block:
            model.load_state_dict(saved)
    assert ledger.tasks == ["one"]


def test_values_that_a_trainer_takes_apart_are_refused() -> None:
    """FSDP1 replaces the parameter, and ZeRO-3 marks it as partitioned."""

    def replace(model: Any, values: nn.Parameter) -> None:
        model.region_values = nn.Parameter(values.detach().clone())

    def mark(model: Any, values: Any) -> None:
        values.ds_id = 7

    for take_apart in (replace, mark):
        model, words = language_model(), ("sharded the values of the region", "ignored_params")
        with refusing(model, *words, of=BESIDE, batches=texts(1)) as skill:
            take_apart(model, skill.values)
            train(model, texts(2))
        assert NAME not in dict(model.named_parameters())


@pytest.mark.filterwarnings("default")  # libraries warn about each other
def test_what_peft_does_to_the_model_is_told(quantised: Any) -> None:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = language_model()
    ledger = Ledger.of_model(model, effect="beside")
    with pytest.raises(TrainingError, match="adapters of PEFT"), learning(model, ledger, "one", batches=texts(1)):
        get_peft_model(model, LoraConfig(target_modules="all-linear"))
        train(model, texts(2))
    model = quantised(llama, "nf4")
    ledger = Ledger.of_model(model)
    with pytest.raises(TrainingError, match="froze the values"), learning(model, ledger, "one", batches=texts(1)):
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model(**texts(2)[0])


def test_a_model_that_was_cast_is_told_by_its_dtype() -> None:
    model = language_model()
    ledger = Ledger.of_model(model, effect="beside")
    with learning(model, ledger, "one", batches=texts(1)):
        train(model, texts(2))
    with pytest.raises(LedgerError, match="Something changed the weights"), answering(model, ledger, "one"):
        model.half()
    refused(
        answering(model, ledger, "one").__enter__,
        LedgerError,
        "It is in float16 now, expected float32",
        "other weights",
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")
def test_layers_that_cannot_have_differences() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    refused(lambda: Ledger.of_model(tied, effect="beside"), ModelError, "'0.weight' and '2.weight' are one tensor")
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    refused(lambda: Ledger.of_model(scripted, effect="beside"), ModelError, "is scripted")
    pair, x = nn.Sequential(Pair(4, 4)), torch.randn(2, 4)
    ledger = Ledger.of_model(pair, effect="beside")
    how: dict[str, Any] = {"batches": [x], "sparsity": 0.5, "loss": lambda model, x: model(x)[0].square().mean()}
    refused(learning(pair, ledger, "one", **how).__enter__, ModelError, "layer Pair returns a tuple", "graftable=")


# -- Costs -------------------------------------------------------------------------------------------------


def test_no_copy_of_the_base_is_made(quantised: Any) -> None:
    """For 10⁷ 4-bit entries (5.6 MB), γ, training and answering need less than half of that, mostly for one layer."""
    from bitsandbytes.nn import Linear4bit

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear4bit(256, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4")

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    model, x = nn.Sequential(*(Residual() for _ in range(160))).to("cpu"), torch.randn(4, 256)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    ledger = Ledger.of_model(model)
    assert len(ledger.space) > 10**7 and held < 0.6 * len(ledger.space)
    with PeakMemory(*model.state_dict().values()) as peak:
        how: dict[str, Any] = {"loss": lambda model, x: model(x).square().mean().log(), "sparsity": 1e-4}
        with learning(model, ledger, "one", batches=[x], **how) as skill:
            optimizer = torch.optim.AdamW([skill.values], lr=1e-2)
            for _ in range(2):
                how["loss"](model, x).backward()
                optimizer.step()
        with answering(model, ledger, "one"):
            model(x)
    print(peak.bytes, held)
    assert peak.bytes < 0.5 * held


def test_a_step_has_fewer_operations_than_one_of_lora(quantised: Any) -> None:
    from peft import LoraConfig, get_peft_model

    def count(model: Any, trained: list[Any]) -> int:
        optimizer, counts = torch.optim.AdamW(trained, lr=1e-3, fused=True), []
        for _ in range(3):
            with Launches() as launches:
                model(**texts(1)[0]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            counts.append(launches.count)
        return counts[-1]

    model = quantised(qwen2, "nf4").train()
    ledger = Ledger.of_model(model)
    ends = torch.tensor([spec.offset for spec in ledger.space.tensors])  # every weight and bias has an entry
    region = random_region(ledger.space) | Region(ends)
    with pytest.raises(Ended), learning(model, ledger, "one", region=region) as skill:
        beside = count(model, [skill.values])
        raise Ended
    lora = get_peft_model(quantised(qwen2, "nf4").train(), LoraConfig(r=8, target_modules="all-linear"))
    other = count(lora, [each for each in lora.parameters() if each.requires_grad])
    print({"beside": beside, "LoRA": other})
    assert beside <= other
