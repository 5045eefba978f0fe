"""Tables of Arrow's columns, of parquet files and of the ``datasets`` library, whose features say what the cells mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from forgetfree.data.tables import Columns, Table, check_names
from forgetfree.data.text_files import MOST_BYTES, check_size, unpacked_limit
from forgetfree.errors import DataError, first_line
from forgetfree.json_file import parse_json

#: The most rows of a parquet file.
MOST_ROWS = 50_000_000
#: How Arrow calls the type of cells that are written as JSON.
_JSON = "extension<arrow.json>"


def read_parquet(path: Path, head: bool = False) -> Table:
    """Read a parquet file, a column when it is asked for; of its head one row at most.

    Raises:
        DataError: a column's name comes twice, or the rows are too many or too large.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        schema, count, most = file.schema_arrow, file.metadata.num_rows, unpacked_limit(path)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    check_size(path, count, "rows", MOST_ROWS)
    check_size(path, sum(group.total_byte_size for group in groups), "bytes when unpacked", most)

    def read(name: str) -> Iterator[Any]:
        kind = schema.field(name).type
        # A text that is stored once may be repeated any number of times: it stays stored once until they are counted.
        texts = [name] if pyarrow.types.is_string(kind) or pyarrow.types.is_binary(kind) else None
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            batches = file.iter_batches(batch_size=1 if head else 2048, columns=[name])
            yield from (batch.column(name) for batch in islice(batches, 1 if head else None))

    return of_arrow(
        str(path), schema, _features_of(schema), read, range(1, 1 + (min(1, count) if head else count)), most
    )


def of_arrow(
    where: str,
    schema: Any,
    features: Mapping[str, Any],
    read: Callable[[str], Iterable[Any]],
    numbers: Sequence[int],
    most: int = MOST_BYTES,
) -> Table:
    """Return the table of Arrow's columns, which are read when they are asked for.

    Args:
        where: what the table is called, for messages.
        schema: its schema.
        features: of the ``datasets`` library, by column, as far as they are known.
        read: yields the arrays of a column.
        numbers: of the rows, for messages.
        most: the most bytes of a column.

    Raises:
        DataError: a column's name comes twice; later, a column cannot be read or is too large.
    """
    check_names(where, schema.names)

    def cells(name: str) -> list[Any]:
        try:
            return _cells(where, name, features.get(name), read(name), most)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{where}: column {name!r} cannot be read: {first_line(error)}. Write the rows again, or leave the column out."
            ) from error

    return Table(where, Columns(schema.names, cells), numbers, label_names(features))


def label_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of labels that features give, by column; of a list of labels, too."""
    inner = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    return {column: each.names for column, each in inner.items() if type(each).__name__ == "ClassLabel"}


def _features_of(schema: Any) -> dict[str, Any]:
    """Return the features of a file's columns: as the ``datasets`` library wrote them there, or as a type alone says."""
    try:
        written = parse_json(schema.metadata[b"huggingface"].decode())["info"]["features"]
    except (ValueError, KeyError, TypeError):  # another program's, or of another form
        written = {}
    features = dict[str, Any]()
    for field in schema if isinstance(written, dict) else ():
        if field.name in written or _JSON in str(field.type):
            features |= _feature_of(field, written.get(field.name))
    return features


def _feature_of(field: Any, written: Any) -> dict[str, Any]:
    """Return the feature of one column by its name; nothing where the library does not understand it."""
    import pyarrow
    from datasets import Features

    for read in (
        lambda: Features.from_dict({field.name: written}),
        lambda: Features.from_arrow_schema(pyarrow.schema([field])),
    ):
        try:
            return dict(read())  # type: ignore[no-untyped-call]
        except Exception:  # whatever it meets in a form that it does not know
            continue
    return {}


def _cells(where: str, name: str, feature: Any, arrays: Iterable[Any], most: int) -> list[Any]:
    import pyarrow

    cells, size, kind = list[Any](), 0, None
    for array in arrays:
        size += _decoded_bytes(array)
        check_size(where, size, "bytes or more when unpacked", most)
        kind = array.type
        cells += array.to_pylist()
    if kind is not None and pyarrow.types.is_floating(kind):
        return [None if cell != cell else cell for cell in cells]
    return _decoded(name, feature, cells)


def _decoded(name: str, feature: Any, cells: list[Any]) -> list[Any]:
    """Return cells without JSON in them, as the library decodes it; pictures and sounds stay as they are stored."""
    if feature is None:
        return cells
    from datasets import Features

    features = Features({name: feature})
    has_json = _JSON in str(features.arrow_schema.field(name).type)
    return list(features.decode_column(cells, name)) if has_json else cells


def _decoded_bytes(column: Any) -> int:
    """Return the bytes of a column, of one that is stored as numbers of its values those of the values."""
    import pyarrow
    import pyarrow.compute as compute

    if not pyarrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    kind, values = column.type.value_type, column.dictionary
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_binary(kind)):
        return int(values.nbytes / max(1, len(values)) * len(column))
    lengths = compute.binary_length(values).take(column.indices)
    return int(compute.sum(lengths.cast(pyarrow.int64())).as_py() or 0)
