"""Results as typed records: what a graft wrote, checked once, when it is read.

`run_results` has those of a run. Everything that reports, compares or draws reads these. Keys that no report reads are left
alone; they stay in `Record.content`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo

from forgetfree.display import brief
from forgetfree.json_file import check, checked

#: Of every results.json.
SCHEMA = 1
#: What the best constant answer scores, as tables call it.
CONSTANT = "a constant answer"
Json = dict[str, Any]
#: What a validator compares with: the tasks of a run, the places of a graft's space.
Context = dict[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]


class Record(BaseModel):
    """A part of results, with what the file says of it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
    _content: Json = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr("")

    @classmethod
    def _read(cls, content: Any, context: Context | None = None, source: str = "") -> Self:
        """Return the record of a JSON value; raise ``ValueError`` where it is not what it must be."""
        record = checked(cls, content, context)
        record._remember(content)
        return record.from_source(source)

    def _remember(self, content: Json) -> None:
        self._content = content
        for name, part in self:
            if isinstance(part, Record):
                part._remember(content[name])
            elif isinstance(part, list):
                for each, its in zip(part, content.get(name, ()), strict=False):
                    if isinstance(each, Record):
                        each._remember(its)

    @property
    def content(self) -> Json:
        """All that the file says of it, as JSON."""
        return self._content

    @property
    def source(self) -> str:
        """Where it was read; empty where it was not read from a file."""
        return self._source

    def from_source(self, source: str) -> Self:
        """Return the same, as read from a path."""
        record = self.model_copy()
        record._source = source
        return record

    def with_facts(self, **facts: Any) -> Self:
        """Return the same with facts that stand in other files, as attributes and in its content."""
        record = self.model_copy(update=facts)
        record._content = self.content | {name: _json(fact) for name, fact in facts.items()}
        return record


def _json(fact: Any) -> Any:
    """Return the content of a record, or of each in a list; all else is JSON already."""
    if isinstance(fact, list):
        return [_json(each) for each in fact]
    return fact.content if isinstance(fact, Record) else fact


def checked_by(right: Callable[[Any, Context], bool], expected: str) -> AfterValidator:
    """Check a value by what is known of the results; ``{n}`` and ``{tasks}`` stand for it in what is expected."""

    def check_value(value: Any, info: ValidationInfo) -> Any:
        context = info.context or {}
        if not right(value, context):
            raise ValueError(expected.format(**context))
        return value

    return AfterValidator(check_value)


def check_version(results: Any) -> None:
    """Raise ``ValueError`` unless the results are an object of this schema."""
    check("the content", results, isinstance(results, dict), "an object")
    version = results.get("schema")
    if version != SCHEMA or isinstance(version, bool):
        raise ValueError(
            f"schema must be {SCHEMA}, got {brief(version)}: another version of forgetfree wrote it, and can report it"
        )
