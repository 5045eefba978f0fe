"""A model sharded over two processes by FSDP2: regions, grafts and ledgers as of the whole model."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from together import shard_too, sharded

from forgetfree.core.exchange import meeting_point
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.sharded import ShardedSpace
from forgetfree.models.loading import load_model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning:torch.*")
def test_two_processes_that_hold_half_a_model_each(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """All that is claimed stands in `together.sharded`; both processes check it."""
    directory, threads, out = str(model_directory("bert")), torch.get_num_threads(), str(tmp_path / "ledger")
    store = meeting_point(2)
    other = multiprocessing.get_context("spawn").Process(
        target=shard_too, args=(directory, store.port, out), daemon=True
    )
    other.start()
    try:
        torch.set_num_threads(1)
        while not store.check(["here"]):
            assert other.is_alive()
            time.sleep(0.1)
        sharded(directory, 0, 2, store, out)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
        torch.set_num_threads(threads)


def test_a_model_that_is_not_sharded_is_read_as_ever(model_directory: Callable[[str], Path]) -> None:
    model = load_model(str(model_directory("bert")), "linear").model.backbone
    space, own = ParameterSpace.of(model), ShardedSpace.of(model)
    indices = torch.arange(0, len(space), 7)
    assert torch.equal(own.gather(model, indices), space.gather(model, indices))
    values = torch.randn(len(indices))
    own.scatter_(model, indices, values)
    assert torch.equal(space.gather(model, indices), values)
