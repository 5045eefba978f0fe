"""Streams of tasks on Avalanche: benchmarks, strategies, the adapter for its plugins."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forgetfree.continual.deferred import deferred

#: Modules that Avalanche 0.6 imports at its top level and uses in functions only: a third of its import time.
UNUSED = (
    *("gdown", "qpsolvers", "torchmetrics", "torchmetrics.functional", "torch.utils.tensorboard", "wandb"),
    *("matplotlib", "matplotlib.axes", "matplotlib.figure", "matplotlib.pyplot"),
)
#: The file that Avalanche reads when it is imported, and writes if it is missing; some users' homes cannot be written.
CONFIG = "~/.avalanche/config.json"


@contextmanager
def nothing_written() -> Iterator[None]:
    """Within the block, importing Avalanche writes no configuration: without one it reads ours, with the same content."""
    expanded = os.path.expanduser
    try:
        json.loads(Path(expanded(CONFIG)).read_bytes())["dataset_location"]
    except (OSError, ValueError, LookupError, TypeError):
        ours = str(Path(__file__).with_name("avalanche.json"))
        os.path.expanduser = lambda path: ours if path == CONFIG else expanded(path)  # type: ignore[assignment]
        try:
            yield
        finally:
            os.path.expanduser = expanded
    else:
        yield


with deferred(*UNUSED), nothing_written():
    import avalanche  # noqa: F401
