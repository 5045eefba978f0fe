"""Where a graft comes from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pydantic import Field

from forgetfree.core.readout_model import ReadoutKind
from forgetfree.json_file import check, checked, parse_json
from forgetfree.ledger.binding import Network
from forgetfree.tasks import MAX_LENGTH, TaskDefinition


@dataclass(frozen=True)
class GraftOrigin:
    """Where a graft comes from, and what else is needed to answer with it.

    Attributes:
        task: the task it was made for.
        readout: how its logits are read: ``linear``, ``prompt``, ``causal`` or ``classifier``.
        model: the base model's name, as the user gave it.
        fingerprint: that of the base model's body, see `forgetfree.core.body.body_fingerprint`.
        sparsity: the share of the space that its region was allowed.
        architecture: the Hugging Face class whose head is the readout; for ``classifier`` only.
        classes: the number of the head's class for each of the task's labels; for ``classifier`` only.
        max_length: the longest row that was read, in tokens.
        network: what the base model computes apart from its weights, see `forgetfree.ledger.binding.network_of`; for
            ``classifier``, what the fine-tuned model computes. Empty if it is not known.
        tokenizer: what its tokenizer does, see `forgetfree.ledger.binding.tokenizer_digest`; empty if it is not known.
    """

    task: TaskDefinition
    readout: ReadoutKind
    model: str
    fingerprint: str
    sparsity: Annotated[float, Field(ge=0, le=1)]
    architecture: str = ""
    classes: tuple[int, ...] = ()
    max_length: Annotated[int, Field(ge=0)] = MAX_LENGTH
    network: Network = ""
    tokenizer: str = ""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name

    @classmethod
    def of_json(cls, text: str) -> GraftOrigin:
        """Return the origin that `json` described.

        Raises:
            ValueError: a field is not known, is missing or does not fit; the message names each.
        """
        fields = parse_json(text)
        origin = replace(checked(cls, fields), task=TaskDefinition.of_fields(fields["task"]))
        numbered = sorted(origin.classes) in ([], list(range(len(origin.task.labels))))
        check("classes", origin.classes, numbered, "the number of a class for each label")
        return origin

    @property
    def json(self) -> str:
        """The origin as JSON."""
        return json.dumps(asdict(self) | {"task": self.task.fields})
