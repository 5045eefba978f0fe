"""Answers from a file of adapters, without the strategy that made it: see `forgetfree.serve.weights`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import Tensor

from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.models.loading import LoadedModel
from forgetfree.serve.source import Source
from forgetfree.serve.weights import RunWeights
from forgetfree.strategies.lora.adapter_file import load_adapters
from forgetfree.strategies.lora.task_adapters import loaded_adapters


class AdapterWeights(RunWeights):
    """Answers with θ_pre and the adapters of a task, or those of all tasks where they act together.

    Raises:
        RunError: the adapters are damaged, or belong to another model or run.
    """

    def __init__(self, source: Source, loaded: LoadedModel) -> None:
        binding = loaded.binding(source.precision)
        records, joint = load_adapters(source.file, fingerprint=loaded.fingerprint, binding=binding)
        super().__init__(source, loaded, [record.task for record in records])
        self._loaded, self._original = loaded, loaded.model.backbone
        self._adapters = loaded_adapters(self._original, records)
        self._records = {record.task: record for record in records}
        self._names = {task: f"task-{k}" for k, task in enumerate(self._records)}
        self._acting = {task: list(self._records) if joint else [task] for task in self._records}
        # Where all tasks have one readout and their adapters act together, the last task's record has it.
        self._shared = next((own for record in reversed(records) if (own := record.group("readout"))), {})

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the record's readout."""
        return self.own_rows(task, self._records[task].group("readout") or self._shared)

    @contextmanager
    def answering(self, task: str) -> Iterator[None]:
        """Put the adapters into the model; it is the base model again afterwards."""
        model, acting = self._loaded.model, self._acting[task]
        model.backbone = self._adapters.activate([self._names[each] for each in acting]).train(model.backbone.training)
        try:
            with self._changed({}, self._records[acting[-1]].group("buffer")):
                yield
        finally:
            model.backbone = self._original

    @contextmanager
    def merged(self, task: str) -> Iterator[None]:
        """Add the products of the adapters to the base model's own weights, which it has again afterwards."""
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
