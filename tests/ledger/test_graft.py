"""A graft file: every kind of damage is refused, and the graft fits its model under any head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from compared import state_of
from damage import Change, note, rewrite, sealed, told
from safetensors.torch import load_file
from torch import Tensor, nn

from forgetfree.core.fingerprint import body_fingerprint
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import body_of, body_space
from forgetfree.core.regions import Region
from forgetfree.errors import GraftError, UsageError
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.graft import Graft, GraftOrigin, find_graft
from forgetfree.models.loading import load_model
from forgetfree.tasks import TaskDefinition

ModelDirectory = Callable[[str], Path]

TASK = TaskDefinition(
    "own", "single", ("negative", "positive"), "{text} It was {mask}.", ("terrible", "great"), "{text} It was"
)


def graft_of(backbone: nn.Module, entries: int = 60, **changes: Any) -> Graft:
    """Return a graft with new values, whose entries are spread over all tensors of the body."""
    space = body_space(backbone, ParameterSpace.of(backbone))
    region = Region.of(torch.linspace(0, len(space) - 1, entries).long())
    values = torch.randn(len(region), generator=torch.Generator().manual_seed(3))
    origin = GraftOrigin(TASK, "some/model", body_fingerprint(backbone), 0.01, Binding(""))
    readout = {"weight": torch.randn(2, tiny.HIDDEN), "bias": torch.tensor([1e-40, -0.0])}
    return replace(Graft(region, values, space, readout, {}, origin), **changes)


def differing(model: nn.Module, before: dict[str, Tensor]) -> int:
    """Return the number of changed entries."""
    return sum(int((tensor != before[name]).sum()) for name, tensor in model.state_dict().items())


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.fixture
def graft() -> Graft:
    return graft_of(tiny.build("bert")[0])


@pytest.fixture
def file(graft: Graft, tmp_path: Path) -> Path:
    graft.save(tmp_path / "graft.safetensors")
    return tmp_path / "graft.safetensors"


# -- Saving and loading ----------------------------------------------------------------------------------


def test_saving_and_loading_lose_nothing(graft: Graft, file: Path) -> None:
    loaded = Graft.load(str(file))
    assert load_file(file).keys() == {"0/index", "0/value", "0/readout/weight", "0/readout/bias"}
    assert (loaded.region, loaded.space, loaded.origin) == (graft.region, graft.space, graft.origin)
    assert same_bits(loaded.values, graft.values)
    assert list(loaded.readout) == ["bias", "weight"]
    assert all(same_bits(loaded.readout[name], graft.readout[name]) for name in graft.readout)
    assert graft.origin is not None
    bound = Binding("{}", readout="classifier", architecture="BertForSequenceClassification")
    origin = replace(graft.origin, binding=bound, classes=(1, 0))
    replace(graft, origin=origin).save(file)
    assert Graft.load(file).origin == origin
    assert [path.name for path in file.parent.iterdir()] == ["graft.safetensors"]  # no temporary file is left


def test_buffers_are_saved_applied_and_taken_out_with_the_graft(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    space = ParameterSpace.of(model)
    graft = Graft(Region.of([0, 5]), torch.ones(2), space, {}, {"1.running_mean": torch.arange(4.0)})
    graft.save(tmp_path / "g")
    before = state_of(model)
    undo = Graft.load(tmp_path / "g").apply_(model)
    assert model.get_buffer("1.running_mean").tolist() == [0, 1, 2, 3]
    undo.apply_(model)
    assert differing(model, before) == 0


def test_a_graft_without_a_space_cannot_be_saved(graft: Graft, tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="needs the parameter space of its model's body, and this one has none"):
        replace(graft, space=None).save(tmp_path / "g")
    with pytest.raises(GraftError, match="holds NaN or infinity in 'readout/bias'"):
        replace(graft, readout={"bias": torch.tensor([float("nan")])}).save(tmp_path / "g")
    assert not list(tmp_path.iterdir())


def test_the_one_graft_of_a_directory_is_found(file: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "sub" / name).mkdir(parents=True)
        (tmp_path / "sub" / name / "graft.safetensors").write_bytes(file.read_bytes())
    assert find_graft(file) == find_graft(tmp_path) == file  # deeper files count only without a file here
    assert find_graft(tmp_path / "sub" / "one").parent.name == "one"
    with pytest.raises(UsageError, match=r"must hold one graft file, got 2: one/graft.safetensors, two/graft"):
        find_graft(tmp_path / "sub")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="must hold one graft file, got none"):
        find_graft(tmp_path / "empty")


# -- Damage ----------------------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[Change, str]] = {
    "an unreadable layout": (sealed(note("layout", "{")), "its layout cannot be read"),
    "an origin of more": (sealed(told(0, colour="green")), "its origin cannot be read"),
    "an origin of another kind": (sealed(told(0, model=3)), "its origin cannot be read"),
    "a task of nothing": (sealed(told(0, task={})), "its origin cannot be read"),
    "no task": (lambda tensors, header: (tensors.clear(), sealed(note("tasks", "[]"))(tensors, header)), "tasks must be one"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_with_the_reason(file: Path, damage: str) -> None:
    change, reason = DAMAGE[damage]
    rewrite(file, change)
    with pytest.raises(GraftError, match=reason) as caught:
        Graft.load(file)
    assert str(caught.value).startswith(f"{file} is not a sound graft: ")
    assert str(caught.value).endswith("Restore it from a copy, or make the graft again.")


# -- One file, any head ----------------------------------------------------------------------------------

HEADS = {
    "bert-mlm": ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"),
    "roberta-mlm": ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"),
    "gpt2-lm": ("AutoModel", "AutoModelForCausalLM", "AutoModelForTokenClassification"),
}  # fmt: skip


@pytest.mark.sampled("bert-mlm-AutoModel")
@pytest.mark.parametrize(("kind", "loader"), [(kind, loader) for kind, loaders in HEADS.items() for loader in loaders])
def test_a_graft_goes_into_its_model_under_any_head_and_out_again(
    kind: str, loader: str, model_directory: ModelDirectory, tmp_path: Path
) -> None:
    graft_of(load_model(str(model_directory(kind))).model.backbone).save(tmp_path / "g")
    graft = Graft.load(tmp_path / "g")
    model = getattr(transformers, loader).from_pretrained(model_directory(kind), dtype=torch.float32)
    before = state_of(model)
    undo = graft.apply_(model)
    assert differing(model, before) == len(graft.region)
    assert graft.space is not None
    assert same_bits(graft.space.gather(body_of(model), graft.region.indices), graft.values)
    undo.apply_(model)
    after = model.state_dict()
    assert all(same_bits(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.sampled("bert-pooler")
@pytest.mark.parametrize("kind", ["bert-pooler", "bert-mlm", "roberta-mlm", "gpt2-lm"])
def test_a_body_has_the_same_fingerprint_however_it_is_loaded(kind: str, model_directory: ModelDirectory) -> None:
    """Head and pooler do not change the fingerprint; one entry of the body does."""
    loaders = HEADS.get(kind, ("AutoModel", "AutoModelForSequenceClassification"))
    models = [getattr(transformers, loader).from_pretrained(model_directory(kind)) for loader in loaders]
    assert len({body_fingerprint(model) for model in models}) == 1
    assert len({body_space(model, ParameterSpace.of(model)).layout for model in models}) == 1
    with torch.no_grad():
        next(iter(ParameterSpace.of(models[0]).parameters(models[0]))).view(-1)[0] += 1
    assert len({body_fingerprint(model) for model in models}) == 2


# -- Refusals --------------------------------------------------------------------------------------------


def refuse(graft: Graft, model: nn.Module, match: str) -> None:
    before = state_of(model)
    with pytest.raises(GraftError, match=match):
        graft.apply_(model)
    assert differing(model, before) == 0


def test_another_model_is_refused_and_nothing_is_changed(graft: Graft) -> None:
    refuse(graft, tiny.build("roberta")[0], r"belongs to other weights, those of 'some/model': expected fingerprint")
    refuse(graft, tiny.build("gpt2")[0], r"of another layout: .* expected 'encoder.layer.0.*got no such tensor")
    refuse(graft, tiny.build("bert")[0].bfloat16(), r"expected 'encoder.*in torch.float32, got torch.bfloat16.*dtype=")
    other, _ = tiny.build("bert")
    ParameterSpace.of(other).parameters(other)[3].data.view(-1)[0] += 1
    refuse(graft, other, "belongs to other weights")
    refuse(replace(graft, buffers={"mean": torch.zeros(2)}), tiny.build("bert")[0], "has no buffer 'mean'")
    refuse(replace(graft, space=None), tiny.build("bert")[0], "does not say which tensors its region means")


def test_two_grafts_can_be_stacked_and_taken_out_in_turn(graft: Graft) -> None:
    model, _ = tiny.build("bert")
    before = state_of(model)
    second = graft_of(model, 90)
    undo = [graft.apply_(model)]
    with pytest.raises(GraftError, match=r"check=False puts it on top of another graft"):
        second.apply_(model)
    undo.append(second.apply_(model, check=False))
    assert differing(model, before) > 90
    for each in reversed(undo):
        each.apply_(model)
    assert differing(model, before) == 0
