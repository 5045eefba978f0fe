"""An adapter of PEFT as the place where a task's fine-tuning starts: θ_pre with the adapter merged into it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forgetfree.core.body import body_of, body_space
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.errors import ModelError, UsageError
from forgetfree.files import size_of
from forgetfree.models.checkpoint import read_weights
from forgetfree.models.fine_tuned_directory import check_same_body, differing
from forgetfree.models.loading import locate
from forgetfree.models.peft_directory import (
    CONFIG,
    WEIGHTS,
    adapter_config,
    adapter_loader,
    is_adapter,
    merged_directory,
)


@dataclass(frozen=True)
class AdapterStart:
    """An adapter that a task's fine-tuning starts from. Its head is not used.

    Attributes:
        directory: the adapter's.
        model: the model that it was made from.
        sha256: of `adapter_config.json` followed by `adapter_model.safetensors`.
    """

    directory: str
    model: str
    sha256: str

    @classmethod
    def of(cls, directory: str, model: str) -> AdapterStart:
        """Return the adapter in a directory.

        Raises:
            UsageError: there is none.
            ModelError: it has no weights in safetensors.
        """
        if not is_adapter(directory):
            raise UsageError(
                f"--start {directory!r} is no adapter of PEFT. Expected a directory with {CONFIG} and {WEIGHTS}, as its "
                "save_pretrained writes them."
            )
        return cls(directory, model, _sha256(Path(directory)))

    def check(self, pre: ReadoutModel) -> tuple[str, ...]:
        """Check that the adapter can be merged, and return what is to be known of it.

        Args:
            pre: the model, with θ_pre in it.

        Raises:
            UsageError, ModelError: it belongs to another model, changes nothing that can be trained, or is damaged.
        """
        body, held, space = self._merged(pre), body_of(pre), pre.space()
        if torch.equal(body_space(pre.backbone, space).flatten(body), space.flatten(pre.backbone).cpu()):
            raise UsageError(
                f"The adapter {self.directory!r} changes none of the {len(space)} graftable entries of {self.model!r}. Give "
                "one that is trained, or leave it out."
            )
        notes = []
        named = adapter_config(self.directory).get("base_model_name_or_path")
        known = {Path(each).name.casefold() for each in (self.model, locate(self.model))}
        if named and Path(str(named)).name.casefold() not in known:  # of the same shapes, it may still be another
            notes.append(
                f"The adapter {self.directory} names {named!r} as its base, and is merged into {self.model!r}."
            )
        graftable = {spec.name for spec in body_space(pre.backbone, space).tensors}
        if left := differing(held, body, graftable):
            notes.append(
                f"The adapter {self.directory} changes {len(left)} tensor{'s' if len(left) > 1 else ''} that cannot be "
                f"grafted, such as {left[0]}: fine-tuning starts without that."
            )
        return tuple(notes)

    def theta(self, model: ReadoutModel) -> Tensor:
        """Return θ_pre with the adapter merged into it, ``(N,)`` on the CPU, whatever ``model`` holds now.

        Raises:
            ModelError: its files have changed since `of`, or are damaged.
        """
        if _sha256(Path(self.directory)) != self.sha256:
            raise ModelError(
                f"The adapter {self.directory!r} has changed since it was first read. Put the old files back, or start again "
                "with another --out."
            )
        return body_space(model.backbone, model.space()).flatten(self._merged(model))

    def _merged(self, model: ReadoutModel) -> nn.Module:
        """Return the body of the network that PEFT merges."""
        with (
            torch.random.fork_rng(devices=[]),  # a head that is not there is drawn
            merged_directory(self.directory, self.model, whole=False) as merged,
        ):
            network, _ = read_weights(merged, adapter_loader(self.directory), self.directory)
        check_same_body(body_of(model), body_of(network), self.model, self.directory)
        return body_of(network)


def _sha256(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            size_of(directory / name)
            with (directory / name).open("rb") as file:
                while part := file.read(2**20):
                    digest.update(part)
        except OSError as error:
            raise ModelError(
                f"The adapter {str(directory)!r} has no readable {name}. Save it again, with save_pretrained of PEFT."
            ) from error
    return digest.hexdigest()
