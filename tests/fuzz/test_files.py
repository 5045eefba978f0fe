"""Files that were damaged or changed are refused by the reader's own error, or read as sound content."""

from __future__ import annotations

import random
import re
import traceback
from pathlib import Path

import pytest
from fuzz.mutations import BYTES, JSON, SIGNED
from fuzz.reading import KINDS

#: Mutations of each family; a kind has up to nine families.
COUNT = 30


def families(kind: str) -> dict:
    return BYTES | {".safetensors": SIGNED, ".json": JSON}.get(Path(KINDS[kind].file).suffix, {})


@pytest.mark.sampled("ledger-flip", share=0.1)
@pytest.mark.parametrize(("kind", "family"), [(kind, family) for kind in KINDS for family in families(kind)])
def test_a_changed_file_is_refused_or_sound(kind: str, family: str, samples: Path, tmp_path: Path) -> None:
    """The reader raises its own error, or reads the old content; after a change of values it may read other sound content."""
    this = KINDS[kind]
    path = next(samples.glob(this.file))
    original = path.read_bytes()
    expected = this.content(this.read(path))
    faults = []
    for seed in range(COUNT):
        damaged = families(kind)[family](original, random.Random(f"{kind} {family} {seed}"))
        path.write_bytes(damaged)
        try:
            found = this.read(path)
            if this.content(found) != expected:
                assert family not in BYTES or not this.signed, "damage was read as other content"
                this.sound(found, tmp_path / path.name)
        except this.error as error:
            text = str(error)
            if not re.fullmatch(r"[^\n]+\.", text) or len(text) > 4000:
                faults.append(f"seed {seed}: the message is no paragraph: {text[:200]}")
        except Exception as error:  # any other exception is a fault of the reader
            faults.append(f"seed {seed}: {_told(error)}")
        finally:
            path.write_bytes(original)
    assert not faults, f"{len(faults)} of {COUNT} mutations of {kind} by {family!r}:\n" + "\n".join(faults)


def _told(error: Exception) -> str:
    """Return the error, and the place in our files where it was raised."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}, {ours[-1].line}"
    return f"{type(error).__name__}: {str(error)[:160]} ({place})"
