"""The files of a model: files that would be read wrongly are refused."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from model_files import change_config, message
from safetensors.torch import load_file, save_file
from torch import Tensor

import forgetfree
from forgetfree.data.rows import Rows
from forgetfree.models.loading import load_model
from forgetfree.tasks import TaskDefinition

ModelDirectory = Callable[[str], Path]
TASK = TaskDefinition("own", "single", ("negative", "positive"))


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite the weights; ``change`` may return other weights."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors) or tensors, file, metadata={"format": "pt"})


def pickle_weights(directory: Path) -> None:
    """Replace the safetensors file by a PyTorch pickle of the weights."""
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


# -- Refusals --------------------------------------------------------------------------------------------

NEEDS_CODE = "needs code from its own files, which forgetfree does not run. Give a model whose architecture"
PUT_BACK = "Put back the config.json that was saved with the weights."


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: change_config(directory, **changes)


def config_text(text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / "config.json").write_text(text)


def weights_file(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        file = directory / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def own_tokenizer(directory: Path) -> None:
    file = directory / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))


def no_tokenizer(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


def an_id_too_high(directory: Path) -> None:
    """One id exceeds the embeddings, though there are no more tokens than embeddings."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["film"] = len(vocabulary) + 7
    file.write_text(json.dumps(content))


def no_filler(directory: Path) -> None:
    tokenizer = tiny.byte_level(causal=True)
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.unk_token = None
    tokenizer.save_pretrained(directory)


#: By fault: the change of the model's directory, and a part of the message.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "labels": (config(num_labels=10**9), "at most 100,000"),
    "layers": (config_text('{"num_hidden_layers": 10000000}'), f"must be at most 1,000, got 10000000. {PUT_BACK}"),
    "no JSON": (config_text("{"), "config.json is not valid JSON: Expecting property name"),
    "no object": (config_text("[]"), "config.json: the content must be an object, got []"),
    "architectures": (config_text('{"architectures": 5}'), "architectures must be a list of names, got 5"),
    "no kind": (config_text("{}"), "cannot be loaded: "),
    "attention": (config(attn_implementation="kernels-community/flash-attn"), "eager, sdpa"),
    "quantized": (config(quantization_config={"quant_method": "bnb"}), "has a quantization_config (bnb); expected fl"),
    "other weights": (config(transformers_weights="model.bin"), "other weights ('model.bin'); expected model.safet"),
    "a promised head": (config(architectures=["BertForMaskedLM"]), "needs, e.g. 'cls.predictions.bias': they would be"),
    "fewer layers": (config(num_hidden_layers=1), "has no place for 16 of their tensors, e.g. 'encoder.layer.1."),
    "no layers": (config(num_hidden_layers=0), "has no place for 32 of their tensors"),
    "another shape": (config(intermediate_size=2 * tiny.INNER), f"({2 * tiny.INNER},), got ({tiny.INNER},)"),
    "an adapter": (lambda path: (path / "adapter_config.json").touch(), "adapter, or holds one beside its weights"),
    "cut off": (weights_file(lambda data: data[:-100]), "cannot be loaded: "),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        "index.json, found neither. Save the model with",
    ),
    "code of a configuration": (config(model_type="own", auto_map={"AutoConfig": "own.Config"}), NEEDS_CODE),
    # transformers knows the architecture, but has no masked language model for it.
    "code of a head": (
        config(architectures=["OwnForMaskedLM"], auto_map={"AutoModelForMaskedLM": "own.Model"}),
        NEEDS_CODE,
    ),
    "code of a tokenizer": (own_tokenizer, NEEDS_CODE),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "more tokens": (lambda path: tiny.build("roberta")[1].save_pretrained(path), ", and the model has embeddings for"),
    "a token id": (an_id_too_high, ", and the model has embeddings for"),
    "no filler": (no_filler, "has no token to fill short rows with: expected a special token"),
}
#: Faults that need another model than the tiny BERT.
OTHERS = {"code of a head": "gpt2-lm", "no filler": "gpt2"}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_does_not_fit_is_refused(copy: ModelDirectory, wrong: str) -> None:
    directory, (damage, expected) = copy(OTHERS.get(wrong, "bert")), REFUSED[wrong]
    (directory / "own.py").write_text("raise SystemExit('run')")
    damage(directory)
    text = message(lambda: load_model(str(directory), "prompt" if wrong == "code of a head" else "auto"))
    assert expected in text and str(directory) in text


# -- Unused tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "readout", "name"),
    [
        ("bert", "linear", "encoder.layer.1.output.scale"),
        ("bert-mlm", "prompt", "bert.embeddings.rotation.weight"),
        ("gpt2", "linear", "h.0.attn.c_attn.lora_A"),
        ("roberta-mlm", "linear", "roberta.adapter"),
    ],
)
def test_a_tensor_of_the_body_that_nothing_uses_is_refused(
    copy: ModelDirectory, kind: str, readout: str, name: str
) -> None:
    directory = copy(kind)
    change_weights(directory, lambda tensors: tensors.update({name: torch.ones(2)}))
    text = message(lambda: load_model(str(directory), readout))
    assert f"the network has no place for 1 of their tensors, e.g. {name!r}, and would answer as another" in text


@pytest.mark.sampled("bert-mlm-prompt-names1")
@pytest.mark.parametrize(
    ("kind", "readout", "names"),
    [
        ("bert", "linear", ("embeddings.position_ids", "pooler.dense.weight", "cls.predictions.bias")),
        (
            "bert-mlm",
            "prompt",
            ("bert.embeddings.position_ids", "bert.pooler.dense.bias", "cls.seq_relationship.weight"),
        ),
        ("gpt2-lm", "causal", ("transformer.h.1.attn.masked_bias", "multiple_choice_head.weight")),
    ],
)
def test_other_heads_poolers_and_old_buffers_are_ignored(
    copy: ModelDirectory, model_directory: ModelDirectory, kind: str, readout: str, names: tuple[str, ...]
) -> None:
    directory = copy(kind)
    change_weights(directory, lambda tensors: tensors.update({name: torch.arange(3) for name in names}))
    assert (
        load_model(str(directory), readout).fingerprint == load_model(str(model_directory(kind)), readout).fingerprint
    )


# -- Invalid weights -------------------------------------------------------------------------------------

WEIGHT = "encoder.layer.1.output.dense.weight"


@pytest.mark.sampled("bert--torch.uint8")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("kind", "prefix"), [("bert", ""), ("bert-mlm", "bert.")])
def test_quantized_weights_are_refused(copy: ModelDirectory, kind: str, prefix: str, dtype: torch.dtype) -> None:
    directory, name = copy(kind), f"{prefix}{WEIGHT}"
    change_weights(directory, lambda tensors: tensors.update({name: tensors[name].clamp(0, 9).to(dtype)}))
    for readout in ("linear", "auto"):
        text = message(lambda readout=readout: load_model(str(directory), readout))
        assert text.startswith(f"The weights of model {str(directory)!r} are quantized: {name!r} is of type ")
        assert "expected float32, float16 or bfloat16" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_any_floats_are_read_in_float32(copy: ModelDirectory, dtype: torch.dtype) -> None:
    directory = copy("bert")
    change_weights(directory, lambda tensors: {name: each.to(dtype) for name, each in tensors.items()})
    loaded = load_model(str(directory))
    assert {each.dtype for each in loaded.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (-float("inf"), torch.bfloat16)])
def test_a_single_nan_or_infinite_entry_is_refused(copy: ModelDirectory, value: float, dtype: torch.dtype) -> None:
    directory = copy("bert")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[WEIGHT][3, 5] = value
        return {name: each.to(dtype) for name, each in tensors.items()}

    change_weights(directory, change)
    assert f"are damaged: {WEIGHT!r} holds NaN or infinity" in message(lambda: load_model(str(directory)))


# -- Only safetensors ------------------------------------------------------------------------------------


def test_pickled_weights_are_refused(copy: ModelDirectory) -> None:
    directory = copy("bert-mlm")
    pickle_weights(directory)
    assert message(lambda: load_model(str(directory))) == (
        f"Model {str(directory)!r} has its weights pickled (pytorch_model.bin), and reading such a file may run any code, so "
        "safetensors alone are read. If you trust the file, load it by transformers once, and save_pretrained writes "
        "model.safetensors."
    )


def test_a_pickle_beside_safetensors_is_not_opened(copy: ModelDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copy("bert")
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    monkeypatch.setattr(torch, "load", None)
    load_model(str(directory))


LOADING = """
import sys
from forgetfree.data.rows import Rows
from forgetfree.errors import ModelError
from forgetfree.models.loading import load_model
for name in sys.argv[1:]:
    try:
        print(load_model(name).readout)
    except ModelError as error:
        print(error)
"""


@pytest.mark.sampled(share=0.15)
def test_names_on_the_hub_are_read_from_the_cache_of_a_machine_without_a_connection(
    model_directory: ModelDirectory, tmp_path: Path
) -> None:
    """Loading prints no progress bars, no notes on unused weights, and no traceback."""
    names = ("owner/sound", "owner/name", "owner/none")
    snapshots = {}
    for name in names:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshots[name] = repository / "snapshots" / ("0" * 40)
        shutil.copytree(model_directory("bert"), snapshots[name])
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
    pickle_weights(snapshots["owner/name"])
    (snapshots["owner/none"] / "model.safetensors").unlink()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    environment["TORCH_LOGS"] = "-torch.utils._pytree"  # PyTorch warns if torchao is installed
    command = [sys.executable, "-c", LOADING, *names, "nobody/nothing", str(model_directory("bert-mlm"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    sound, pickled, none, unknown, headed = done.stdout.splitlines()
    assert (sound, headed, done.stderr) == ("linear", "prompt", "")
    assert "'nobody/nothing' cannot be loaded: " in unknown and unknown.endswith("hub names need a connection.")
    assert "Model 'owner/name' has its weights pickled (pytorch_model.bin)" in pickled
    assert "Model 'owner/none' has no weights: expected model.safetensors" in none


def test_weights_in_several_files_are_all_read_and_checked(
    copy: ModelDirectory, model_directory: ModelDirectory
) -> None:
    from transformers import AutoModel

    directory = copy("bert")
    (directory / "model.safetensors").unlink()
    AutoModel.from_pretrained(model_directory("bert")).save_pretrained(directory, max_shard_size="8KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load_model(str(directory)).fingerprint == load_model(str(model_directory("bert"))).fingerprint
    tensors = load_file(shards[-1])
    name = next(name for name in tensors if name.startswith("encoder."))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, shards[-1], metadata={"format": "pt"})
    assert f"{name!r} is of type I8" in message(lambda: load_model(str(directory)))
    shards[-1].unlink()
    assert "cannot be loaded: " in message(lambda: load_model(str(directory)))


# -- No custom code --------------------------------------------------------------------------------------


def test_rows_are_filled_with_a_token_that_no_row_ends_with(copy: ModelDirectory) -> None:
    """A row ends where the padding token begins."""
    for kind, changes, expected in (
        ("bert", {}, "[PAD]"),
        ("bert", {"pad_token": "[SEP]"}, "[UNK]"),  # [SEP] ends every row
        ("bert", {"pad_token": "[UNK]"}, "[UNK]"),  # it may end a text, but not a row
        ("gpt2-lm", {"pad_token": "!", "unk_token": "!"}, "<|endoftext|>"),  # it may end a text, and ends a row
        ("gpt2-lm", {}, "<|endoftext|>"),  # GPT-2's only special token, which no text produces
    ):
        tokenizer = tiny.build(kind)[1]
        for name, token in changes.items():
            setattr(tokenizer, name, token)
        directory = copy(kind)
        tokenizer.save_pretrained(directory)
        loaded = load_model(str(directory), "linear")
        assert loaded.tokenizer.convert_ids_to_tokens(loaded.pad) == expected
        rows = loaded.encoder(TASK)(Rows(("a film 東", "a very dull film"), (), (0, 1)))
        x = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for ids in rows], batch_first=True, padding_value=float(loaded.pad)
        )
        assert loaded.model.tokens.attention_mask(x).sum(1).tolist() == [len(ids) for ids in rows]
        shutil.rmtree(directory)


def calls() -> list[tuple[Path, ast.Call]]:
    """Return every call in the library that loads a model's files."""
    root = Path(forgetfree.__file__).parent
    found = []
    for file in [path for folder in (root, *root.glob("*/")) for path in folder.glob("*.py")]:
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"\bfrom_(pretrained|config)\b", text) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "from_config"):
                found.append((file, node))
    return found


def test_nothing_in_the_library_trusts_code_or_unpickles() -> None:
    root = Path(forgetfree.__file__).parent
    assert len(calls()) >= 4
    for file, call in calls():
        words = {keyword.arg: keyword.value for keyword in call.keywords}
        trust = words.get("trust_remote_code")
        assert isinstance(trust, ast.Constant) and trust.value is False, f"{file}:{call.lineno}"
        weights = not any(word in ast.unparse(call.func) for word in ("AutoConfig", "AutoTokenizer", "from_config"))
        assert not weights or ast.unparse(words["use_safetensors"]) == "True", f"{file}:{call.lineno}"
    for file in root.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"\bload\b|pickle|dill|joblib", text):
            continue
        tree = ast.parse(text)
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert "torch.load" not in names and not imported & {"pickle", "dill", "joblib"}, file
