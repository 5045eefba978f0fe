"""The audit record of a ledger: what was taken out of it or put into it, when, and the hashes before and after.

It is ``audit.jsonl`` beside the ledger: a JSON object a line, the latest last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgetfree.files import write_atomically
from forgetfree.jobs.running.environment import versions

AUDIT = "audit.jsonl"


def note(ledger: Path, action: str, before: Mapping[str, Any], after: Mapping[str, Any], **more: Any) -> None:
    """Add a line to the audit record beside a ledger.

    Args:
        ledger: the ledger's file, or the record of another ledger, whose lines come first.
        action: what was done.
        before: size and SHA-256 of the files before, by name.
        after: those of the files now.
        more: what else is to be known.
    """
    path = ledger.with_name(AUDIT)
    made = versions()
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "action": action,
        **more,
        "by": {name: made[name] for name in ("forgetfree", "torch")},
        "before": dict(before),
        "after": dict(after),
    }
    lines = path.read_text(encoding="utf-8") if path.is_file() else ""
    write_atomically(path, f"{lines}{json.dumps(line)}\n")
