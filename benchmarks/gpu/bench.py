"""The tools of all sections: the device, models with random weights, a task, memory and waits."""

from __future__ import annotations

import gc
import math
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forgetfree import __version__, load_model
from forgetfree.core.regions import Region
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.models.loading import LoadedModel, plain_generation
from forgetfree.models.task_model import TaskModel
from forgetfree.models.token_inputs import TokenLayout
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import TaskDefinition
from forgetfree.testing.tiny import wordpiece, words
from forgetfree.training.training_options import LocalizationOptions

#: Width, layers, inner width, heads, heads of keys, and words of Llama's shape: SmolLM2-135M, Llama 3.2 and 3.1.
SHAPES = {
    "tiny": (64, 2, 128, 4, 2, 1024),
    "135 million": (576, 30, 1536, 9, 3, 49152),
    "1 billion": (2048, 16, 8192, 32, 8, 128256),
    "8 billion": (4096, 32, 14336, 32, 8, 128256),
}


@dataclass(frozen=True)
class Bench:
    """The device and the size of measurements.

    Attributes:
        device: the device.
        tiny: whether all sizes are tiny: a rehearsal.
        directory: the directory of the kit.
    """

    device: torch.device
    tiny: bool
    directory: Path

    @property
    def here(self) -> dict[str, str]:
        """The device, the size and the versions, which are stored with each measurement."""
        import transformers

        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "a CPU"
        versions = f"forgetfree {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
        return {
            "device": name,
            "size": "tiny" if self.tiny else "full",
            "versions": f"{versions}, Python {sys.version.split()[0]}",
        }

    # -- Models and rows -------------------------------------------------------------------------------------

    def bert(self, dtype: ModelDtype = "float32") -> LoadedModel:
        """Return a BERT of MiniLM's shape with random weights."""
        from transformers import BertConfig, BertModel

        shape = (32, 2, 2, 64, 200) if self.tiny else (384, 6, 12, 1536, 30522)
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        sizes: Any = dict(zip(names, shape, strict=True))
        torch.manual_seed(0)
        model = BertModel(BertConfig(**sizes, initializer_range=0.05), add_pooling_layer=False)
        return load_model(model, "linear", tokenizer=wordpiece(), max_length=128, dtype=dtype)

    def llama(self, size: str, readout: Literal["linear", "generate"], dtype: ModelDtype) -> LoadedModel:
        """Return a Llama with random weights, made on the device: it is never on a disk.

        Args:
            size: a key of `SHAPES`.
            readout: ``linear`` or ``generate``.
            dtype: the dtype of the weights.
        """
        from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

        names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        shape: Any = dict(zip((*names, "vocab_size"), SHAPES["tiny" if self.tiny else size], strict=True))
        tokenizer = wordpiece()
        tokenizer.eos_token, pad = tokenizer.sep_token, tokenizer.pad_token_id
        ids: Any = {"bos_token_id": 2, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": pad}
        config = LlamaConfig(**shape, **ids, max_position_embeddings=2048, tie_word_embeddings=False)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device(self.device):
                backbone: Any = (LlamaForCausalLM if readout == "generate" else LlamaModel)(config)
        finally:
            torch.set_default_dtype(before)
        tokens = TokenLayout(pad)
        if readout == "generate":
            backbone.generation_config = plain_generation(tokenizer, tokens.pad, config)
        model = TaskModel(backbone.eval(), tokens, readout, pooling="last")
        return LoadedModel(size, model, tokenizer, readout, size, 512)

    def rows(self, name: str, length: int, count: int = 64) -> TaskRows:
        """Return a task of two labels, told apart by a word.

        Args:
            name: the name of the task.
            length: the most words per row; the fewest are three quarters of it. A rehearsal has at most 30.
            count: the number of training rows.
        """
        length = min(length, 30) if self.tiny else length
        draw, known = random.Random(name), [word for word in words() if word.isalpha()]

        def split(number: int) -> Rows:
            texts = []
            for i in range(number):
                row = draw.choices(known[:20], k=draw.randint(length * 3 // 4, length))
                row[draw.randrange(len(row))] = known[25 + i % 2]
                texts.append(" ".join(row))
            return Rows(tuple(texts), (), tuple(i % 2 for i in range(number)))

        task = TaskDefinition(name, "single", ("no", "yes"))
        return TaskRows(task, split(count), split(32), split(64))

    def options(self, **changes: Any) -> LocalizationOptions:
        """Return options of a short training, some of them changed."""
        usual: dict[str, Any] = {
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "batch_size": 8,
            "steps": 10,
            "schedule": "constant",
        }
        search = {"sparsity": 1e-3, "mask_steps": 2, "mask_batch_size": 32}
        return LocalizationOptions(**usual | search | changes)

    # -- Memory and waits ------------------------------------------------------------------------------------

    @property
    def memory(self) -> float:
        """The bytes that are free on a GPU or reserved by this process; infinite on other devices."""
        if self.device.type != "cuda":
            return math.inf
        return float(torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device))

    def clear(self) -> None:
        """Release unused memory of the GPU."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def waits(self, work: Callable[[], object]) -> Counter[str] | None:
        """Return how often some work makes the processor wait for the GPU, by file and line; None without a GPU.

        It uses torch's own debug mode, which reports copies from and to the GPU.
        """
        if self.device.type != "cuda":
            return None
        found: Counter[str] = Counter()

        def hear(message: Any, *_: Any, **__: Any) -> None:
            if "synchroniz" in str(message):
                frames = [
                    f for f in traceback.extract_stack() if "forgetfree" in f.filename or "/strategies/" in f.filename
                ]
                ours = [f for f in frames if "benchmarks" not in f.filename] or traceback.extract_stack()[-3:-2]
                found[f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = hear
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return found


def random_region(entries: int, share: float) -> Region:
    """Return a region of a share of the entries, drawn by a seed; it has four entries at least."""
    draw = torch.Generator().manual_seed(0)
    return Region.of(torch.randint(entries, (max(4, int(share * entries)),), generator=draw))


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return torch.equal(one.detach().cpu(), other.detach().cpu())
