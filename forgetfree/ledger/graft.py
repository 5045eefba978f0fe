"""A graft: a region and the values that a model takes there, to be kept, saved and used elsewhere (paper, §2, eq. 1).

Its file is a `forgetfree.tensor_file.TaskFile` with one task:

    index     the flat indices of the entries, see `forgetfree.core.regions.stored_indices`
    value     their values (s,), in the space's dtype
    readout/… the tensors that read out the task
    buffer/…  buffers of the body that training changed (BatchNorm's, say)

The metadata have the layout of the body's parameter space; the task's fields are the graft's origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from forgetfree import registry
from forgetfree.core.fingerprint import body_fingerprint, fingerprint_of
from forgetfree.core.parameters import ParameterSpace, check_buffers, persistent_buffers
from forgetfree.core.readout_model import body_of
from forgetfree.core.regions import Region, entries_of, entry_tensors
from forgetfree.display import counted
from forgetfree.errors import GraftError, RegionError, UsageError
from forgetfree.files import StrPath
from forgetfree.hub_file import HubFile
from forgetfree.json_file import check, checked
from forgetfree.ledger.binding import Binding, has_other_head, network_differences, network_of
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import StoredTasks, TaskFile, TaskTensors, grouped, not_finite

FORMAT = "forgetfree.graft"
#: The tensors of a region with its values, of a readout, and of buffers.
_GROUPS = ("index", "value", "readout", "buffer")
FILE = TaskFile(
    GraftError, "Restore it from a copy, or make the graft again.", FORMAT, "graft", keys=("layout",), groups=_GROUPS
)
_FILE_NAME = "graft.safetensors"


@dataclass(frozen=True)
class GraftOrigin:
    """The origin of a graft, and further data that is needed to answer with it.

    Attributes:
        task: the task it was made for.
        model: the base model's name, as the user gave it.
        fingerprint: the fingerprint of the base model's body, see `forgetfree.core.fingerprint.body_fingerprint`.
        sparsity: the maximum size of its region, as a share of the space.
        binding: the other dependencies of its answers; for ``classifier``, the fine-tuned model's.
        classes: for ``classifier``, the number of the head's class for each of the task's labels; empty: in order.
        head: for a language model, the digest of its head, see `forgetfree.ledger.binding.head_digest`.
    """

    task: TaskDefinition
    model: str
    fingerprint: str
    sparsity: Annotated[float, Field(ge=0, le=1)]
    binding: Binding
    classes: tuple[int, ...] = ()
    head: str = ""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> GraftOrigin:
        """Return the origin that `fields` described.

        Raises:
            ValueError: a field is not known, is missing or does not fit; the message names each.
        """
        origin = replace(checked(cls, fields), task=TaskDefinition.of_fields(fields["task"]))
        registry.check_stored(origin.task)
        numbered = sorted(origin.classes) in ([], list(range(len(origin.task.labels))))
        check("classes", origin.classes, numbered, "the number of a class for each label")
        return origin

    @property
    def fields(self) -> dict[str, Any]:
        """The origin as JSON."""
        return asdict(self) | {"task": self.task.fields}


@dataclass(frozen=True)
class Graft(HubFile, tags=["forgetfree", "graft"]):
    """A region and the values that a model takes there. With a parameter space it can be saved and used elsewhere.

    >>> model = torch.nn.Linear(4, 3)
    >>> Graft.of(model, ParameterSpace.of(model), Region.of([0, 5]))
    Graft(2 entries)

    Attributes:
        region: γ.
        values: ``(s,)``.
        space: the meaning of the region's indices: names, shapes and dtypes of tensors in the *body* of the model.
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

    noun = "graft"
    use = (
        "from forgetfree.ledger.graft import Graft\n"
        "from forgetfree.serve.apply import apply_graft\n\n"
        'apply_graft(Graft.from_pretrained("OWNER/NAME"), "BASE MODEL", "model")  # an ordinary model of transformers'
    )

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
            model: any model with the graft's body, with a head or without one.
            space: the space of ``model`` itself that the region belongs to; default: the graft's own, of the body.
            check: compare the body's fingerprint with the origin's, if the graft has one (reads the whole body once).
                ``False`` allows one graft on top of another.

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
        """Write the graft as one file, atomically.

        Raises:
            GraftError: it has no parameter space, or holds NaN or infinity.
        """
        FILE.write_tasks(Path(path), [_tensors_of(self)], {"layout": self.space.layout} if self.space else {})

    @classmethod
    def load(cls, path: StrPath) -> Graft:
        """Read a file that `save` wrote, and verify all of it.

        Raises:
            GraftError: the file is missing or not valid; the message gives the reason. It is never half-read.
        """
        return FILE.load(Path(path), _graft_of)

    def facts(self) -> list[dict[str, Any]]:
        """Return task, labels and base model, for the card on the hub."""
        of = self.origin
        about = (
            {"task": of.task.name, "labels": of.task.labels, "model": of.model, "fingerprint": of.fingerprint}
            if of
            else {}
        )
        return [{**about, "entries": len(self.region)}]

    def _check(self, model: nn.Module, fingerprint: bool) -> ParameterSpace:
        """Return the graft's own space after checking that the graft belongs to the body of ``model``."""
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
        # For a classifier, the network is the fine-tuned model's: its head may need other settings than the base model.
        bound = origin is not None and origin.binding.readout != "classifier" and origin.binding.network
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
            if has_other_head(backbone, origin.head):
                raise GraftError(
                    f"The graft belongs to {origin.model!r} with another language model head: the body's weights are the same, "
                    "and those of the head are not. Load the very weights it was made from."
                )
        return self.space

    def _buffers_of(self, body: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of the body for which the graft has values."""
        own = persistent_buffers(body) if self.buffers else {}
        try:
            check_buffers(own, self.buffers)
        except RegionError as error:
            raise GraftError(
                f"The graft belongs to a model of another layout: {error} Load the model it was made from."
            ) from error
        return {name: own[name] for name in self.buffers}


# -- Its file -------------------------------------------------------------------------------------------


def find_graft(path: StrPath) -> Path:
    """Return ``path`` itself, or for a directory the graft.safetensors in it, or else the only one below it.

    Raises:
        UsageError: the directory holds none, or several.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    files = sorted(path.glob(_FILE_NAME)) or sorted(path.rglob(_FILE_NAME))
    if len(files) != 1:
        names = ", ".join(str(each.relative_to(path)) for each in files[:5])
        remedy = "Give the path of a graft.safetensors."
        if (path / "results.json").is_file():
            remedy += " To write a task of a run: forgetfree export."
        raise UsageError(
            f"{str(path)!r} must hold one graft file, got {f'{len(files)}: {names}' if files else 'none'}. {remedy}"
        )
    return files[0]


def _tensors_of(graft: Graft) -> TaskTensors:
    """Return the tensors and fields of a graft's file."""
    if (space := graft.space) is None:
        raise GraftError(
            "A graft on its own needs the parameter space of its model's body, and this one has none. Make it with "
            "SingleTask.graft, or give it a space."
        )
    tensors = entry_tensors(space, graft.region, graft.values) | grouped(readout=graft.readout, buffer=graft.buffers)
    if damaged := not_finite(tensors):
        raise GraftError(f"The graft holds NaN or infinity in {damaged!r}. Train it again, with a lower rate.")
    return TaskTensors("", tensors, graft.origin.fields if graft.origin else {})


def _graft_of(stored: StoredTasks) -> Graft:
    """Return the graft that a file holds."""
    check("tasks", stored.tasks, stored.tasks == [""], "one, without a name")
    space, only = ParameterSpace.of_layout(stored.metadata["layout"]), stored.read(0)
    region, values = entries_of(space, only.tensors)
    if damaged := not_finite(only.tensors):
        raise ValueError(f"{damaged!r} holds NaN or infinity")
    try:
        origin = GraftOrigin.of_fields(only.fields) if only.fields else None
    except ValueError as error:
        raise ValueError(f"its origin cannot be read ({error})") from error
    return Graft(region, values, space, only.group("readout"), only.group("buffer"), origin)
