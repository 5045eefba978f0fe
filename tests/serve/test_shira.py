"""Grafts and SHiRA adapters of PEFT: both ways, with equal answers; and what SHiRA cannot hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from forgetfree import cli
from forgetfree.core.regions import Region, kind_of
from forgetfree.data.sources import load_tasks
from forgetfree.errors import GraftError, ModelError, UsageError
from forgetfree.ledger.graft import Graft
from forgetfree.models.fine_tuned_directory import load_fine_tuned
from forgetfree.models.loading import load_model
from forgetfree.serve.apply import apply_graft
from forgetfree.serve.shira import from_shira, to_shira
from forgetfree.tasks import TaskDefinition
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import TrainingOptions

ModelDirectory = Callable[[str], Path]
IDS = torch.tensor([[5, 9, 12, 7, 3], [4, 8, 8, 6, 2]])
CASES = [
    ("bert", "linear", "sst2", "AutoModel"),
    ("bert-mlm", "prompt", "qnli", "AutoModelForMaskedLM"),
    ("roberta-mlm", "linear", "ag_news", "AutoModel"),
]


class Made:
    """A graft on a tiny model; by default of the weights of linear layers alone, with another number in each."""

    def __init__(self, root: Path, model: Path, data: Path, readout: str, task: str) -> None:
        self.root, self.model = root, str(model)
        self.single = SingleTask.of(load_model(self.model, readout), load_tasks(task, str(data))[0])
        self.fine_tuned = self.single.fine_tuned(TrainingOptions(steps=2, learning_rate=0.05))
        self.all = self.graft(lambda name: True)
        self.linear = self.graft(lambda name: "weight" in name and "LayerNorm" not in kind_of(name))
        self.linear.save(root / "graft.safetensors")
        self.linear = Graft.load(root / "graft.safetensors")

    def graft(self, wanted: Callable[[str], bool]) -> Graft:
        generator = torch.Generator().manual_seed(3)
        ratio = self.fine_tuned.theta / self.single.pre.theta
        moved = (ratio != 1) & (ratio > 0.5) & (ratio < 2)  # where θ_pre + Δ is exact
        for number, spec in enumerate(self.single.space.tensors):
            few = torch.rand(spec.size, generator=generator) < 0.02 * (1 + number % 5)
            moved[spec.offset : spec.offset + spec.size] &= few & wanted(spec.name)
        return self.single.graft(self.fine_tuned, Region.from_mask(moved), 0.1)


@pytest.fixture(scope="module")
def made(
    model_directory: ModelDirectory, data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Made]:
    known: dict[Any, Made] = {}

    def make(kind: str = "bert", readout: str = "linear", task: str = "sst2") -> Made:
        if (key := (kind, readout, task)) not in known:
            root = tmp_path_factory.mktemp("-".join(key))
            known[key] = Made(root, model_directory(kind), data_directory, readout, task)
        return known[key]

    return make


def answers(network: Any) -> torch.Tensor:
    with torch.no_grad():
        out = network.eval()(input_ids=IDS)
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.sampled("bert-linear-sst2-AutoModel")
@pytest.mark.parametrize(("kind", "readout", "task", "loader"), CASES)
def test_there_and_back(
    made: Callable[..., Made], tmp_path: Path, kind: str, readout: str, task: str, loader: str
) -> None:
    own = made(kind, readout, task)
    written = to_shira(own.linear, own.model, tmp_path / "adapter")
    load = getattr(transformers, loader).from_pretrained
    with torch.no_grad():
        grafted, adapted = load(own.model), peft.PeftModel.from_pretrained(load(own.model), tmp_path / "adapter")
    own.linear.apply_(grafted)
    assert written.rounded == 0 and written.dropped == {}
    assert torch.equal(answers(grafted), answers(adapted))
    assert not torch.equal(answers(grafted), answers(load(own.model)))
    assert torch.equal(answers(grafted), answers(adapted.merge_and_unload()))
    back = from_shira(tmp_path / "adapter", own.model)
    assert back.region == own.linear.region and torch.equal(back.values, own.linear.values)
    assert back.origin == own.linear.origin and back.space == own.linear.space
    assert back.readout.keys() == own.linear.readout.keys()
    assert all(torch.equal(back.readout[name], tensor) for name, tensor in own.linear.readout.items())


@pytest.mark.sampled("bert-mlm")
@pytest.mark.parametrize("kind", ["bert-pooler", "bert-mlm", "roberta-mlm"])
def test_a_classifiers_own_head_is_in_the_adapter(
    kind: str, model_directory: ModelDirectory, data_directory: Path, tmp_path: Path
) -> None:
    """Its logits by plain PEFT are those of the model that `apply` writes; the way back gives head and graft again."""
    base, out, load = str(model_directory(kind)), tmp_path / "sst2", AutoModelForSequenceClassification.from_pretrained
    torch.manual_seed(0)
    tuned = load(base, num_labels=2, id2label={0: "positive", 1: "negative"})  # in another order than the task's
    with torch.no_grad():
        for name, tensor in tuned.base_model.named_parameters():
            if "encoder" in name and name.endswith("dense.weight"):
                tensor.mul_(1 + 0.5 * torch.rand(tensor.shape))  # where θ_pre + Δ is exact
    tuned.save_pretrained(tmp_path / "tuned")
    words = ["graft", "sst2", "--data", str(data_directory), "--model", base, "--fine-tuned", str(tmp_path / "tuned")]
    words += ["--shots", "4", "--sparsity", "0.05", "--set", "mask_steps=0", "--out", str(tmp_path / "graft")]
    assert cli.main(words) == 0
    graft = Graft.load(tmp_path / "graft" / "graft.safetensors")
    assert graft.origin is not None and graft.origin.classes == (1, 0)
    written = to_shira(graft, base, out)
    assert written.rounded == 0 and written.dropped == {} and written.entries == len(graft.region) > 100
    card = (out / "README.md").read_text()
    (more,) = re.findall(r"AutoModelForSequenceClassification.from_pretrained\(BASE, (.*)\)", card)
    assert "# Its logits are those of positive, negative." in card
    how = {key: int(value) for key, value in (each.split("=") for each in more.split(", "))}
    expected = answers(load(apply_graft(graft, base, tmp_path / "applied").directory))
    adapted: Any = peft.PeftModel.from_pretrained(load(base, **how), out)
    assert torch.equal(answers(adapted), expected)
    assert torch.equal(answers(adapted.merge_and_unload()), expected)
    assert not torch.equal(answers(load(base, **how)), expected)
    back = from_shira(out)
    assert back.region == graft.region and torch.equal(back.values, graft.values) and back.origin == graft.origin
    assert back.readout.keys() == graft.readout.keys()
    assert all(torch.equal(back.readout[name], tensor) for name, tensor in graft.readout.items())
    assert load_fine_tuned(str(out), base, graft.origin.task).architecture == graft.origin.architecture

    computes = json.loads(graft.origin.network) | {"hidden_act": "relu"}
    other = replace(graft, origin=replace(graft.origin, network=json.dumps(computes)))
    with pytest.raises(UsageError, match=r"computes otherwise: the model's hidden_act.*forgetfree apply"):
        to_shira(other, base, tmp_path / "other")
    with pytest.raises(GraftError, match="is no head of this"):
        to_shira(replace(graft, readout={}), base, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_every_matrix_has_as_many_entries_as_shira_asks_for(made: Callable[..., Made], tmp_path: Path) -> None:
    own = made()
    written = to_shira(own.linear, own.model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"], config["base_model_name_or_path"]) == (written.rank, "SHIRA", own.model)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    counts = {name: len(each) for name, each in tensors.items() if name.endswith("weight")}
    space = own.linear.space
    assert space is not None
    sizes = {spec.name.removesuffix(".weight"): spec.shape for spec in space.tensors if len(spec.shape) == 2}
    found = {name.removeprefix("base_model.model.").removesuffix(".shira_weight"): n for name, n in counts.items()}
    assert sorted(config["target_modules"].replace("\\", "").split("|")) == sorted(
        sizes
    )  # no endings, as of "pooler.dense"
    assert found == {name: written.rank * sum(shape) for name, shape in sizes.items()}
    assert sum(counts.values()) == written.entries + written.padding and written.padding > 0
    assert written.entries == len(own.linear.region)
    zero = torch.cat([each for name, each in tensors.items() if name.endswith("weight")]) == 0
    assert int(zero.sum()) == written.padding


def test_what_shira_cannot_hold_is_refused_by_name_or_left_out(
    made: Callable[..., Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = made()
    with pytest.raises(UsageError, match=r"not encoder\.layer\.0\.attention\.self\.query\.bias \(\d+\)"):
        to_shira(own.all, own.model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    own.all.save(tmp_path / "all.safetensors")
    command = ["convert", str(tmp_path / "all.safetensors"), "--to", "shira", "--model", own.model]
    assert cli.main([*command, "--out", str(tmp_path / "adapter")]) == 2
    assert "--drop-others leaves them out" in capsys.readouterr().err
    assert cli.main([*command, "--out", str(tmp_path / "adapter"), "--drop-others"]) == 0
    assert "entries are left out, in" in (said := capsys.readouterr().out) and "LayerNorm.weight" in said
    assert cli.main(["convert", str(tmp_path / "adapter"), "--to", "graft", "--out", str(tmp_path / "back")]) == 0
    back, linear = Graft.load(tmp_path / "back"), own.all
    assert len(back.region) < len(linear.region) and len(back.region - linear.region) == 0


def test_values_that_no_delta_gives_are_counted_and_nearly_given(made: Callable[..., Made], tmp_path: Path) -> None:
    """θ_pre + Δ is exact within a factor of two; not where a value is much smaller, or of the other sign."""
    own = made()
    indices = own.linear.region.indices
    pre = own.single.pre.theta[indices]
    share = 1 + 0.9 * (torch.rand(len(pre), generator=torch.Generator().manual_seed(0)) - 0.5)
    near = to_shira(replace(own.linear, values=pre * share), own.model, tmp_path / "near")
    assert near.rounded == 0 and near.error == 0
    values = pre * share * 1e-9
    far = to_shira(replace(own.linear, values=values), own.model, tmp_path / "far")
    expected = pre + (values - pre)
    assert far.rounded == int((expected != values).sum()) > len(pre) / 2
    assert far.error == float((expected - values).abs().max()) <= 2**-25 * float(pre.abs().max())
    back = from_shira(tmp_path / "far", own.model)
    assert torch.equal(back.values, expected)


def test_a_matrix_without_room_is_named(made: Callable[..., Made], tmp_path: Path) -> None:
    own = made()
    full = own.graft(lambda name: False).space
    assert full is not None
    (spec,) = (each for each in full.tensors if each.name == "encoder.layer.0.intermediate.dense.weight")
    whole = Region(torch.arange(spec.offset, spec.offset + spec.size - 1))
    graft = replace(own.linear, region=whole, values=own.single.pre.theta[whole.indices] + 1)
    with pytest.raises(UsageError, match=r"is too small. Make a sparser graft"):
        to_shira(graft, own.model, tmp_path / "adapter")


def test_the_card_says_where_the_readout_reads(made: Callable[..., Made], tmp_path: Path) -> None:
    own, words = made(), TaskDefinition.of_entities("people", ["PER"])
    assert own.linear.origin is not None
    readout = {"weight": torch.zeros(3, own.linear.readout["weight"].shape[1]), "bias": torch.zeros(3)}
    tagger = replace(own.linear, origin=replace(own.linear.origin, task=words, model=""), readout=readout)
    for graft, where in ((own.linear, "at the first token (at the"), (tagger, "at each word's first token.")):
        directory = to_shira(graft, own.model, tmp_path / where[-9:]).directory
        card = (directory / "README.md").read_text()
        assert f"readout.safetensors reads the labels {where}" in card
        assert f"(BASE)  # {own.model}\n" in card
    assert from_shira(directory).origin == tagger.origin  # whose base model the adapter names


def test_what_cannot_be_converted_is_refused(
    made: Callable[..., Made], model_directory: ModelDirectory, tmp_path: Path
) -> None:
    own = made()
    with pytest.raises(GraftError, match="does not say for which task"):
        to_shira(replace(own.linear, origin=None), own.model, tmp_path / "a")
    with pytest.raises(GraftError, match=r"belongs to other weights|another layout"):
        to_shira(own.linear, str(model_directory("bert-pooler")), tmp_path / "a")
    with pytest.raises(UsageError, match="no adapter of PEFT"):
        from_shira(own.model)
    network = transformers.AutoModel.from_pretrained(own.model)
    peft.get_peft_model(network, peft.LoraConfig(target_modules=["query"])).save_pretrained(tmp_path / "lora")
    with pytest.raises(UsageError, match=r"a LORA adapter.*--fine-tuned"):
        from_shira(tmp_path / "lora")
    to_shira(own.linear, own.model, tmp_path / "shira")
    weights = tmp_path / "shira" / "adapter_model.safetensors"
    tensors = load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        from_shira(tmp_path / "shira", own.model)
    save_file({name: tensor for name, tensor in list(tensors.items())[2:]}, weights)
    with pytest.raises(ModelError, match=r"not in the file|does not fit"):
        from_shira(tmp_path / "shira", own.model)
    (name,) = (each for each in tensors if "layer.0.attention.self.query" in each and each.endswith("indices"))
    save_file(tensors | {name: tensors[name] + 10**6}, weights)  # which PEFT itself would read beyond its memory
    with pytest.raises(ModelError, match="cannot be loaded"):
        from_shira(tmp_path / "shira", own.model)
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        from_shira(tmp_path / "shira", own.model)
