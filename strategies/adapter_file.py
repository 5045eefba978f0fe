"""The file of adapters, a `forgetfree.tensor_file.TaskFile` with a record per task; and answers from it, without the strategy.

    adapter/…  A and B of each layer, as `peft.get_peft_model_state_dict` names them
    readout/…  the task's own readout tensors
    buffer/…   buffers that training changed (BatchNorm's, say)

The fields of a task are the settings of its adapter, with PEFT's names. The metadata record whether adapters act together, the
base model's fingerprint and the other settings that answers depend on (`forgetfree.ledger.binding`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from forgetfree.core.parameters import load_tensors_, tensors_of
from forgetfree.display import brief
from forgetfree.errors import RunError
from forgetfree.json_file import check, check_fields, parse_json
from forgetfree.ledger.binding import Binding
from forgetfree.models.loading import LoadedModel
from forgetfree.models.lora_adapters import LoraAdapters
from forgetfree.serve.source import Source
from forgetfree.serve.weights import RunWeights
from forgetfree.tensor_file import StoredTasks, TaskFile, TaskTensors

FORMAT = "forgetfree.lora"
#: The adapter settings in a record; all others have PEFT's defaults.
SETTINGS = ("r", "lora_alpha", "lora_dropout", "target_modules")
FILE = TaskFile(
    RunError,
    "Restore it from a copy, or run the stream again.",
    FORMAT,
    keys=("together", "fingerprint", "binding"),
    groups=("adapter", "readout", "buffer"),
)


def save_adapters(path: Path, tasks: Sequence[TaskTensors], loaded: LoadedModel, *, joint: bool) -> None:
    """Write the file, atomically.

    Args:
        path: the file.
        tasks: the record of every task, in order.
        loaded: the base model.
        joint: whether all adapters act together, instead of each alone.
    """
    header = {"together": json.dumps(joint), "fingerprint": loaded.fingerprint, "binding": loaded.binding().json}
    FILE.write_tasks(path, tasks, header)


def load_adapters(path: Path, loaded: LoadedModel) -> tuple[list[TaskTensors], bool]:
    """Load a file of `save_adapters` for the same model.

    Returns:
        The tasks in order, and whether all adapters act together.

    Raises:
        RunError: the file is missing or damaged, or belongs to another model.
    """

    def make(stored: StoredTasks) -> tuple[list[TaskTensors], bool]:
        header = stored.metadata
        if header["fingerprint"] != loaded.fingerprint:
            raise RunError(
                f"The adapters in {path} belong to other weights: expected a model with fingerprint "
                f"{header['fingerprint'][:12]}…, got {loaded.fingerprint[:12]}…. Load the model that they were "
                "trained on."
            )
        if differ := Binding.of_json(header["binding"]).differences(loaded.binding()):
            raise RunError(
                f"The adapters in {path} would make other predictions than before: {'; '.join(differ)}. Use the "
                "model's own config.json and tokenizer, and the options that the stream was trained with."
            )
        joint, tasks = parse_json(header["together"]), list(stored)
        check("together", joint, isinstance(joint, bool), "true or false")
        for task in tasks:
            _check_settings(f"the settings of {brief(task.task)}", task.fields, task.group("adapter"))
        return tasks, joint

    return FILE.load(path, make)


def _check_settings(key: str, stored: Any, adapter: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` unless these are settings of an adapter with the rank of its tensors."""
    check_fields(key, stored, {"r": int, "lora_alpha": int, "target_modules": str})
    check(key, ", ".join(stored), set(stored) == set(SETTINGS), f"{', '.join(SETTINGS)} alone")
    for name, tensor in adapter.items():
        rank = tensor.shape[-1 if "lora_B" in name else 0] if tensor.dim() else 0
        check(f"{key}.r", stored["r"], stored["r"] == rank > 0, f"the rank of {name!r}, which has {rank}")


def loaded_adapters(backbone: nn.Module, records: Sequence[TaskTensors]) -> LoraAdapters:
    """Return the adapters of records for a backbone, by number.

    Raises:
        RunError: they do not fit.
    """
    adapters = LoraAdapters(backbone)
    for k, record in enumerate(records):
        adapters.add(adapter_name(k), LoraConfig(**record.fields), seed=0)
        adapters.load_(adapter_name(k), record.group("adapter"))
    return adapters


def adapter_name(k: int) -> str:
    """Return the name of the adapters of the ``k``-th task."""
    return f"task-{k}"


class AdapterWeights(RunWeights):
    """Answers with θ_pre and the adapters of a task, or those of all tasks where they act together.

    Raises:
        RunError: the adapters are damaged, or belong to another model or run.
    """

    def __init__(self, source: Source, loaded: LoadedModel) -> None:
        records, joint = load_adapters(source.file, loaded)
        super().__init__(source, loaded, [record.task for record in records])
        self._loaded, self._original = loaded, loaded.model.backbone
        self._adapters = loaded_adapters(self._original, records)
        self._records = {record.task: record for record in records}
        self._names = {task: adapter_name(k) for k, task in enumerate(self._records)}
        self._acting = {task: list(self._records) if joint else [task] for task in self._records}
        # Where all tasks have one readout and their adapters act together, the last task's record has it.
        self._shared = next((own for record in reversed(records) if (own := record.group("readout"))), {})

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the record's readout."""
        return self.own_rows(task, self._records[task].group("readout") or self._shared)

    @contextmanager
    def answering(self, task: str) -> Iterator[None]:
        """Put the adapters into the model; the base model is restored afterwards."""
        model, acting = self._loaded.model, self._acting[task]
        model.backbone = self._adapters.activate([self._names[each] for each in acting]).train(model.backbone.training)
        try:
            with self._changed({}, self._records[acting[-1]].group("buffer")):
                yield
        finally:
            model.backbone = self._original

    @contextmanager
    def merged(self, task: str) -> Iterator[None]:
        """Add the products of the adapters to the base model's own weights, which are restored afterwards."""
        acting = [self._names[each] for each in self._acting[task]]
        weights: dict[str, Tensor] = {}
        for name, module in self._adapters.model.named_modules():
            layer: Any = module
            if isinstance(module, LoraLayer):
                added = [layer.get_delta_weight(each) for each in acting if each in layer.lora_A]
                weights[f"{name}.weight"] = sum(added, start=layer.get_base_layer().weight).detach()
        with self._changed(weights, self._records[self._acting[task][-1]].group("buffer")):
            yield

    @contextmanager
    def _changed(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the base model has these weights and buffers; the others stay."""
        if not weights and not buffers:
            yield
            return
        before = tensors_of(self._original)
        load_tensors_(self._original, {**before, **weights, **buffers})
        try:
            yield
        finally:
            load_tensors_(self._original, before)
