"""How long a task is fine-tuned, and the key that names everything that determines θ_ft, the model fine-tuned on it alone."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict
from functools import cache
from importlib.metadata import version

import torch

from forgetfree import __version__
from forgetfree.core.tensors import digest_of
from forgetfree.learning.encoded_task import EncodedTask
from forgetfree.learning.training import TrainingOptions, for_device, paper_steps
from forgetfree.models.adapter_start import AdapterStart
from forgetfree.models.loading import LoadedModel, config_of
from forgetfree.models.state import ModelState
from forgetfree.options import Function, name_of_function


def full_steps(options: TrainingOptions, task: EncodedTask) -> int:
    """Return ``options.steps``, or the steps of the paper's rule."""
    return options.steps or paper_steps(max(1, len(task.definition.labels)), task.shots)


def fine_tuned_key(
    loaded: LoadedModel,
    task: EncodedTask,
    pre: ModelState,
    options: TrainingOptions,
    seed: int,
    device: torch.device,
    start: AdapterStart | None = None,
) -> str:
    """Return the start of the task's name and a digest of everything that determines its fine-tuned model.

    Args:
        loaded: the model.
        task: the task, its sample drawn.
        pre: θ_pre, with the task's untrained readout.
        options: how to train; only training options count.
        seed: that of the run, from which the seeds of batches and dropout are derived.
        device: where the model is trained.
        start: the adapter that fine-tuning starts from, if there is one.
    """
    model = loaded.model
    options = for_device(options, device)
    fields = TrainingOptions.__dataclass_fields__.keys() - {"deterministic"}  # which is about evaluation
    training = {field: getattr(options, field) for field in fields}
    content = {
        "model": loaded.fingerprint,
        "readout": model.readout,
        "label words": model.heads[task.label].label_words,
        "tokens": repr(getattr(model, "tokens", None)),
        "head": {name: digest_of(tensor) for name, tensor in pre.readouts[task.name].items()},
        "rows": task.train.digest,
        "task": asdict(task.definition) | {"hub": None},
        "options": training | {"steps": full_steps(options, task), "evaluation_batch_size": None},
        "seed": seed,
        "config": config_of(model.backbone),
        "graftable": model.space().layout_hash,
        "versions": [__version__, torch.__version__, version("transformers")],
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    if model.answered_labels is not None:
        content["labels"] = list(model.answered_labels)
    if start is not None:
        content["start"] = [start.sha256, version("peft")]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=_identity).encode()).hexdigest()
    return f"{task.name[:40]}-{digest[:16]}"  # it becomes a file's name, whose length is limited


@cache
def _identity(function: Function) -> str:
    """Return what tells a function from any other; of one that may change, another text in every process."""
    name = name_of_function(function)
    return name if name.startswith("torch.") else f"{name} {uuid.uuid4()}"  # torch's version is in the key
