"""Infers the task of a row from θ_pre's features, by linear discriminant analysis (Fisher, 1936).

The rows of a task t are assumed to be normally distributed around a mean μ_t, with one covariance Σ for all tasks. So a row h
belongs to the task with the largest μ_tᵀ Σ⁻¹ h − ½ μ_tᵀ Σ⁻¹ μ_t. The features are the means over tokens of one hidden layer of
θ_pre, which no task changes: a new task adds its own mean and its share of Σ, and the means of earlier tasks do not change.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from forgetfree.core.readout_model import ReadoutModel
from forgetfree.data.examples import Examples
from forgetfree.data.rows import by_length
from forgetfree.errors import RunError
from forgetfree.files import write_atomically
from forgetfree.json_file import parse_json
from forgetfree.results.run_folder import FEATURES
from forgetfree.tensor_file import TensorFile, not_finite

#: How far Σ is shrunk towards a multiple of the identity, since a few hundred rows estimate it badly.
SHRINKAGE = 0.1
_FILE = TensorFile(RunError, "Restore it from a copy, or run the stream again.", "forgetfree.task-features")


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy in the host's memory."""
    copied = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


class TaskFeatures:
    """The means of all tasks and their common covariance, and a copy of θ_pre that computes features.

    Args:
        model: holds θ_pre; its copy lies in the host's memory, and on the model's device only while it computes features.
        fingerprint: the fingerprint of θ_pre.

    Attributes:
        means: μ_t of each task ``(H,)``, in the order in which they were learned.
    """

    def __init__(self, model: ReadoutModel, fingerprint: str = "") -> None:
        self._beside, self._fingerprint = model, fingerprint
        on_cpu = {id(each): _on_cpu(each) for each in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, on_cpu).eval()
        self.means: dict[str, Tensor] = {}
        self._scatter = torch.empty(0, device="cpu")  # Σ of all tasks, not yet divided: (H, H)
        self._rows = 0

    @torch.no_grad()
    def learn(self, task: str, rows: Examples, batch_size: int = 64) -> None:
        """Add a task; a known task does not change.

        Args:
            task: its name.
            rows: some of its training rows.
            batch_size: rows per forward pass.
        """
        if task in self.means:
            return
        features = torch.cat(
            list(self._features(rows.batch(batch)[0] for batch in by_length(rows.lengths, batch_size)))
        )
        mean = features.mean(0)
        scatter = (features - mean).T @ (features - mean)
        self.means[task] = mean.float()
        self._scatter = (scatter + (self._scatter.double() if self._rows else 0)).float()
        self._rows += len(features)

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        before = dict(self.means), self._scatter, self._rows

        def take_back() -> None:
            self.means, self._scatter, self._rows = before

        return take_back

    @torch.no_grad()
    def nearest(self, batches: Iterable[Tensor], tasks: Sequence[str]) -> list[Tensor]:
        """Return the most likely task of each row of batches ``(B, …)``, as its index in ``tasks``.

        Args:
            batches: inputs.
            tasks: names.

        Returns:
            A tensor ``(B,)`` for each batch.
        """
        means = torch.stack([self.means[task] for task in tasks]).double()
        covariance = self._scatter.double() / max(1, self._rows - len(self.means))
        scale = float(covariance.diagonal().mean()) or 1.0
        covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * scale * torch.eye(
            len(covariance), dtype=torch.float64, device="cpu"
        )
        weights = torch.linalg.solve(covariance, means.T)
        half = (means.T * weights).sum(0) / 2
        return [(features @ weights - half).argmax(1) for features in self._features(batches)]

    def _features(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the features ``(B, H)`` of batches, computed on the device of the original model."""
        self._model.to(next(self._beside.parameters()).device)
        try:
            for x in batches:
                yield self._model.pooled(x).cpu().double()
        finally:
            self._model.cpu()

    # -- Keeping ---------------------------------------------------------------------------------------------

    def _bytes(self) -> bytes:
        about = {"tasks": list(self.means), "rows": self._rows, "model": self._fingerprint}
        tensors = {"means": torch.stack(list(self.means.values())), "scatter": self._scatter}
        return _FILE.content(tensors, {"about": json.dumps(about)})

    def bytes_kept(self) -> int:
        """Return the size of the file that `save` writes."""
        return len(self._bytes()) if self.means else 0

    def save(self, directory: Path) -> None:
        """Write the file into a directory, if there is a task."""
        if self.means:
            write_atomically(directory / FEATURES, self._bytes())

    def load(self, directory: Path) -> None:
        """Read the file from a directory.

        Raises:
            RunError: it is missing or damaged, or belongs to another model; nothing is changed.
        """
        self.means, self._scatter, self._rows = self.read(directory)

    def read(self, directory: Path) -> tuple[dict[str, Tensor], Tensor, int]:
        """Return the means, the scatter and the number of rows that a file holds; see `load`."""
        path = directory / FEATURES
        header, tensors = _FILE.read(path)
        try:
            about = parse_json(header.get("about", "null"))
            means, scatter = tensors["means"], tensors["scatter"]
            tasks, rows = list(map(str, about["tasks"])), int(about["rows"])
            fits = means.shape == (len(tasks), len(scatter)) and scatter.shape == (len(scatter),) * 2
            if not fits or len(set(tasks)) < len(tasks) or not_finite(tensors):
                raise ValueError("its tensors do not fit together")
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} cannot be read as task features: {error}. {_FILE.remedy}") from error
        if (got := about.get("model")) != self._fingerprint:
            raise RunError(
                f"{path} was made with another model: expected {self._fingerprint[:12]}, got {str(got)[:12]}. Load it with its "
                "run's model."
            )
        return dict(zip(tasks, means, strict=True)), scatter, rows
