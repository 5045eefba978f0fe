"""A task's model in ONNX: one graph with the head, beside config.json and tokenizer, compared with torch before it is kept."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from forgetfree.errors import ModelError, UsageError, first_line
from forgetfree.files import StrPath, is_full, new_directory
from forgetfree.models.checkpoint import quiet
from forgetfree.serve.apply import WrittenModel
from forgetfree.serve.served_task import ServedTask

FILE = "model.onnx"
#: How far logits may be from torch's, at logits of 1 or less; in proportion beyond.
TOLERANCE = 1e-4
#: Bytes of weights from which they lie in a file beside the graph: a protobuf holds at most 2 GiB.
_MOST = 2**31 - 2**24
#: Texts that the graph is made with, and those of other sizes that it is compared on.
_SAMPLE = ["a film that one sees again and again", "dull"]
_COMPARED = [["What was it?"], ["dull", "a joy from start to end, and then some more of it", "fine , though long"]]


_CARD = f"""# A classifier in ONNX

`{FILE}` takes what the tokenizer beside it returns, and gives logits; `config.json` names the labels under `id2label`.

```python
import onnxruntime
from transformers import AutoTokenizer

rows = AutoTokenizer.from_pretrained(".")(["a text"], padding=True, truncation=True, return_tensors="np")
session = onnxruntime.InferenceSession("{FILE}")
(logits,) = session.run(None, {{each.name: rows[each.name] for each in session.get_inputs()}})
```
"""


def require_onnx() -> None:
    """Raise ``UsageError`` unless what exports and checks is installed."""
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]:
        raise UsageError(f"ONNX needs {' and '.join(missing)}, not installed: pip install 'forgetfree[onnx]'.")


def check_classifies(task: ServedTask) -> None:
    """Raise ``UsageError`` for a task that is answered by texts: a graph has no loop that writes them."""
    if task.writes:
        raise UsageError(
            f"ONNX is written of models that classify, and task {task.task.name!r} is answered by texts. Leave --format out."
        )


def export_onnx(write: Callable[[Path], WrittenModel], out: StrPath) -> WrittenModel:
    """Write ``model.onnx`` with config and tokenizer in place of a model's weights.

    The graph takes batches and texts of any size, up to the model's maximum length. Its logits are compared with torch's on
    other texts than it was made with.

    Args:
        write: writes the model to a directory, as `export_task` does.
        out: a directory that does not exist or is empty; it is written whole or not at all.

    Raises:
        UsageError: an extra is missing, or the model answers by no head of its own.
        ModelError: PyTorch cannot export it, or the graph answers otherwise than the model.
    """
    import transformers

    require_onnx()
    with tempfile.TemporaryDirectory() as temporary:
        written = write(Path(temporary) / "model")
        if not written.usual or "Classification" not in written.loader:
            raise UsageError(
                f"ONNX is written of models with a classification head, and {written.architecture} is read otherwise. Leave "
                "--format out, and follow the README.md of what is written."
            )
        with quiet(transformers):
            loader = getattr(transformers, written.loader)
            model = loader.from_pretrained(written.directory, trust_remote_code=False, use_safetensors=True).eval()
            model.config.use_cache = False  # what was computed for earlier tokens is of no use to a classifier
            tokenizer = transformers.AutoTokenizer.from_pretrained(written.directory, trust_remote_code=False)
        weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        for file in written.directory.glob("model*.safetensors*"):
            file.unlink()
        (written.directory / "README.md").write_text(_CARD, encoding="utf-8")
        _export(model, tokenizer, written.directory / FILE, apart=weights > _MOST)
        _compare(model, tokenizer, written.directory / FILE)
        with new_directory(Path(out)) as directory:
            shutil.copytree(written.directory, directory, dirs_exist_ok=True)
    return WrittenModel(Path(out), written.architecture, written.loader, note=written.note)


def _export(model: Any, tokenizer: Any, file: Path, *, apart: bool) -> None:
    inputs = dict(tokenizer(_SAMPLE, padding=True, return_tensors="pt"))
    most = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", tokenizer.model_max_length))
    sizes = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=most)} for name in inputs}
    chatty = logging.getLogger("torch.onnx")
    level = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (),
                file,
                kwargs=inputs,
                dynamic_shapes=sizes,
                output_names=["logits"],
                dynamo=True,
                external_data=apart,
                verbose=False,
            )
    except Exception as error:  # of whatever the exporter meets in the network's code
        if is_full(error):
            raise
        raise ModelError(
            f"PyTorch's exporter cannot write {type(model).__name__} as ONNX: {first_line(error.__cause__ or error)}. Leave "
            "--format out, and export what is written by optimum."
        ) from error
    finally:
        chatty.setLevel(level)


@torch.no_grad()
def _compare(model: Any, tokenizer: Any, file: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for texts in _COMPARED:
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        (got, *_) = session.run(None, {each.name: batch[each.name].numpy() for each in session.get_inputs()})
        expected = model(**batch).logits
        difference = (torch.from_numpy(got) - expected).abs().max()
        if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ModelError(
                f"The graph answers otherwise than the model: its logits differ by {difference:.1e}, expected at most "
                f"{TOLERANCE:.0e}. Nothing is left behind; report it with the model's name."
            )
