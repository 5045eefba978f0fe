"""Tiny models of every family: graftable tensors, the kind of each tensor, attention masks, and lengths of rows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import families
import pytest
import simulated_gpu
import torch
from families import FAMILIES
from tiny import POSITIONS, TASK
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import forgetfree
from forgetfree.core.families import role_of
from forgetfree.data.rows import Rows
from forgetfree.models.loading import LoadedModel, load_model

EVERY = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the directory of a family's tiny language model."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = families.write(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


# -- Graftable tensors -----------------------------------------------------------------------------------


@pytest.mark.sampled("Falcon")
@EVERY
def test_every_tensor_of_a_layer_may_be_grafted_and_has_its_kind(directory: Any, name: str) -> None:
    """Outside of layers, only modules applied to the last layer's output are graftable; embeddings and their parts are not."""
    family, space = FAMILIES[name], load_model(str(directory(name)), "linear").model.space()
    layers: dict[str, set[str]] = {}
    closing = set()
    for spec in space.tensors:
        module = re.sub(r"\.(weight|bias)$", "", spec.name)
        kind = role_of(spec.name)
        assert kind.split()[-1] == ("bias" if spec.name.endswith("bias") else "weight")
        if layer := re.match(r"(?:.*?\.)??\d+\.", module):
            layers.setdefault(module[layer.end() :], set()).add(kind.rpartition(" ")[0])
        else:
            closing.add(module)
    assert layers == {module: {kind} for module, kind in family.layer.items()}
    assert closing == set(family.closing)


def encoded(loaded: LoadedModel, *texts: str) -> torch.Tensor:
    rows = loaded.encoder(TASK)(Rows(texts, (), (0,) * len(texts)))
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in rows], batch_first=True, padding_value=float(loaded.pad)
    )


@pytest.mark.sampled("auto-Mistral", "linear-MT5")
@EVERY
@pytest.mark.parametrize("readout", ["linear", "auto"])
def test_every_graftable_tensor_has_a_part_in_the_answer(directory: Any, name: str, readout: str) -> None:
    loaded = load_model(str(directory(name)), readout)
    assert loaded.readout == (readout if readout == "linear" else FAMILIES[name].readout)
    model, space = loaded.model, loaded.model.space()
    label = loaded.add_task(TASK)
    model.eval()(encoded(loaded, "the film was lovely", "a dull story"), label).square().sum().backward()
    parameters = zip(space.tensors, space.parameters(model.backbone), strict=True)
    assert [spec.name for spec, parameter in parameters if parameter.grad is None] == []


# -- Inputs ----------------------------------------------------------------------------------------------


@pytest.mark.sampled("linear-OPT", "linear-Llama", "linear-Bert")
@EVERY
@pytest.mark.parametrize("readout", ["linear", "auto"])
@torch.no_grad()
def test_masks_are_what_transformers_makes_of_plain_ones_on_a_gpu_too(directory: Any, name: str, readout: str) -> None:
    """This holds for padded rows and for full ones."""
    loaded = load_model(str(directory(name)), readout)
    model: Any = loaded.model.eval()
    label = loaded.add_task(TASK)
    for texts in (("the film was lovely", "a dull story"), ("the film was lovely",)):
        x = encoded(loaded, *texts)
        ours = model(x, label)
        masked, model._arguments = model._arguments, lambda inputs: inputs.named
        plain = model(x, label)
        model._arguments = masked
        assert torch.equal(ours, plain)
        if name == "Mixtral":  # counting its experts needs a kernel that a CPU does not have
            continue
        with simulated_gpu.present():
            found = model.to("cuda")(x, label).cpu()
            model.to("cpu")
        torch.testing.assert_close(found, ours, atol=1e-5, rtol=1e-4)


#: Families with relative positions: XLNet, T5 and ALiBi.
UNBOUND = ("XLNet", "Bloom", "T5", "MT5", "UMT5")


@pytest.mark.sampled("linear-Gemma")
@EVERY
@pytest.mark.parametrize("readout", ["linear", "auto"])
def test_rows_are_as_long_as_a_family_has_positions(directory: Any, name: str, readout: str) -> None:
    loaded = load_model(str(directory(name)), readout, max_length=200)
    assert loaded.max_length == (200 if name in UNBOUND else POSITIONS)
    x = encoded(loaded, "the film " * 200, "a dull story")
    assert x.shape == (2, loaded.max_length)
    with torch.no_grad():
        assert bool(loaded.model.eval()(x, loaded.add_task(TASK)).isfinite().all())


def test_one_file_names_families() -> None:
    library = Path(forgetfree.__file__).parent
    types = {*CONFIG_MAPPING_NAMES} - {"git", "gpt2"}  # also a command, and a name on the hub
    named = {
        path.relative_to(library).as_posix()
        for path in library.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in types
    }
    assert named == {"core/families.py"}
