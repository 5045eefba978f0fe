"""Files of tasks with the same rows in all splits, and the message when loading refuses them."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from forgetfree.data.sources import load_tasks
from forgetfree.data.table_files import format_of
from forgetfree.errors import ForgetfreeError

zstd = partial(pyarrow.compress, codec="zstd", asbytes=True)
# Messages must not contain these words, because their readers did not write the code.
_INTERNALS = ("Traceback", "Error(", "Errno", "<class", "object at 0x", "codec can't")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's name, compressed if its suffix says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    form = format_of(path.name)[1]
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return path
    text = {
        "csv": lambda: pandas.DataFrame(rows).to_csv(index=False, lineterminator="\n"),
        "tsv": lambda: pandas.DataFrame(rows).to_csv(index=False, sep="\t", quoting=csv.QUOTE_MINIMAL),
        "jsonl": lambda: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "json": lambda: json.dumps(list(rows), indent=2),
    }[form]()
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd}
    path.write_bytes(pack.get(path.suffix, bytes)(text.encode("utf-8", "surrogatepass")))
    return path


def write_task(
    root: Path, name: str, rows: Sequence[dict[str, Any]], source: object = None, ending: str = "jsonl"
) -> Path:
    """Write a task with the same rows in all three splits, and return its folder."""
    for split in ("train", "validation", "test"):
        write_rows(root / name / f"{split}.{ending}", rows)
    if source is not None:
        (root / name / "source.json").write_text(json.dumps(source), encoding="utf-8")
    return root / name


def refusal(data: Any, name: str = "mood", kind: type[Exception] = ForgetfreeError, **options: Any) -> str:
    """Return the error message of loading, which must be one paragraph; for bad rows that of the first."""
    with pytest.raises(kind) as caught:
        load_tasks(name, data, **options)
    bad = getattr(caught.value, "rows", ())
    text = bad[0].message if bad else str(caught.value)
    assert "\n" not in text and text.endswith(".")
    assert not [word for word in _INTERNALS if word in text], text
    return text
