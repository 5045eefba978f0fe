"""A graft: a region and the values that a model takes there, to be kept, saved and used elsewhere (paper, §2, eq. 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forgetfree.core.body import body_fingerprint, body_of, fingerprint_of
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.core.tensors import check_buffers, persistent_buffers
from forgetfree.display import counted
from forgetfree.errors import GraftError, RegionError
from forgetfree.files import StrPath, write_atomically
from forgetfree.ledger.binding import network_differences, network_of
from forgetfree.ledger.graft_file import read, serialize
from forgetfree.ledger.graft_origin import GraftOrigin


@dataclass(frozen=True)
class Graft:
    """A region and the values that a model takes there. With a parameter space it can be saved and used elsewhere.

    Attributes:
        region: γ.
        values: ``(s,)``.
        space: what the region's indices mean: names, shapes and dtypes of tensors in the *body* of the model.
        readout: the tensors that read out its task, by name.
        buffers: the body's persistent buffers that training changed, by name.
        origin: the task and the base model.
    """

    region: Region
    values: Tensor
    space: ParameterSpace | None = None
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    origin: GraftOrigin | None = None

    def __repr__(self) -> str:
        of = f" of {self.origin.task.name} on {self.origin.model}" if self.origin else ""
        return f"Graft({counted(len(self.region), 'entry')}{of})"

    @classmethod
    def of(cls, model: nn.Module, space: ParameterSpace, region: Region) -> Graft:
        """Return a graft of the values that ``model`` holds at ``region``."""
        return cls(region, space.gather(model, region.indices))

    def apply_(self, model: nn.Module, space: ParameterSpace | None = None, *, check: bool = True) -> Graft:
        """Write the graft into ``model`` and return the values it replaced: applying those undoes this, bit for bit.

        Args:
            model: any model with the body that the graft was made for, with a head or without one.
            space: the space of ``model`` itself that the region belongs to; default: the graft's own, of the body.
            check: compare the body's fingerprint with the origin's, where the graft has one (reads the whole body once).
                Leave it out to put one graft on top of another.

        Raises:
            GraftError: the graft has no space, or does not belong to this model; nothing is changed.
            RegionError: the model does not fit ``space``.
        """
        body = body_of(model)
        target, own = (body, self._check(model, check)) if space is None else (model, space)
        buffers = self._buffers_of(body)
        before = replace(
            self,
            values=own.gather(target, self.region.indices),
            readout={},
            buffers={name: buffer.clone() for name, buffer in buffers.items()},
            origin=None,
        )
        own.scatter_(target, self.region.indices, self.values)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(self.buffers[name])
        return before

    def save(self, path: StrPath) -> None:
        """Write the graft as one file, atomically: see `forgetfree.ledger.graft_file`.

        Raises:
            GraftError: it has no parameter space, or holds NaN or infinity.
        """
        write_atomically(Path(path), serialize(**vars(self)))

    @classmethod
    def load(cls, path: StrPath) -> Graft:
        """Read what `save` wrote and verify everything about it.

        Raises:
            GraftError: with the reason; a damaged file is never half-read.
        """
        return cls(**read(Path(path)))

    def _check(self, model: nn.Module, fingerprint: bool) -> ParameterSpace:
        """Return the graft's own space after checking that the body of ``model`` is one that the graft was made for."""
        body, backbone = body_of(model), getattr(model, "backbone", model)
        if self.space is None:
            raise GraftError(
                "This graft does not say which tensors its region means. Give the parameter space that it was made in: "
                "apply_(model, space)."
            )
        try:
            self.space.check(self.region.indices)
            self.space.check_dtypes(body)
        except RegionError as error:
            raise GraftError(f"The graft belongs to a model of another layout: {error}") from error
        origin = self.origin
        # For a classifier, the network is the fine-tuned model's: its head may need another one than the base model's.
        bound = origin is not None and origin.readout != "classifier" and origin.network
        if bound and (differ := network_differences(bound, network_of(body))):
            raise GraftError(
                f"The graft belongs to a model that computes otherwise: {'; '.join(differ)}. Load it with the config.json "
                "that the graft was made with."
            )
        if fingerprint and origin is not None:
            got, expected = body_fingerprint(body), origin.fingerprint
            if got != expected and expected not in (fingerprint_of(body), fingerprint_of(backbone)):  # from a ledger
                raise GraftError(
                    f"The graft belongs to other weights, those of {origin.model!r}: expected fingerprint "
                    f"{expected[:12]}, the model's is {got[:12]}. Load the very weights it was made from. In Python, "
                    "check=False puts it on top of another graft."
                )
        return self.space

    def _buffers_of(self, body: nn.Module) -> dict[str, Tensor]:
        """Return those buffers of the body that the graft has values for."""
        found = persistent_buffers(body) if self.buffers else {}
        try:
            check_buffers(found, self.buffers)
        except RegionError as error:
            raise GraftError(
                f"The graft belongs to a model of another layout: {error} Load the model it was made from."
            ) from error
        return {name: found[name] for name in self.buffers}
