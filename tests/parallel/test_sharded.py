"""A model sharded over two processes by FSDP2: regions, grafts and ledgers as of the whole model."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from together import shard_too, sharded
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.models.loading import load_model
from forgetfree.parallel.exchange import meeting_point
from forgetfree.parallel.sharded import ShardedSpace, Shards


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_every_entry_is_held_by_one_process_though_a_tensor_has_fewer_rows(ranks: int) -> None:
    """Without processes: each rank's layout is that of `torch.chunk`, as FSDP2 cuts tensors."""
    shapes, found = [(7, 4), (2, 4), (3,)], []
    whole = [torch.zeros(shape) for shape in shapes]
    held = nn.ParameterDict({str(number): nn.Parameter(tensor) for number, tensor in enumerate(whole)})
    space = ParameterSpace.of(held, exclude=())
    for rank in range(ranks):

        def shard(tensor: Tensor, rank: int = rank) -> Any:
            local = [*torch.chunk(tensor, ranks), *[tensor[:0]] * ranks][rank]
            mesh = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
            placed = [SimpleNamespace(is_shard=lambda dim: dim == 0)]
            return SimpleNamespace(
                placements=placed, device_mesh=mesh, detach=lambda: SimpleNamespace(to_local=lambda: local)
            )

        layout: Any = SimpleNamespace(
            tensors=space.tensors, parameters=lambda model, cut=shard: [cut(tensor) for tensor in whole]
        )
        shards = Shards(nn.Module(), layout)
        own = shards.own(Region(torch.arange(len(space))))
        assert len(own) == len(shards.space)
        found += shards.whole(own).indices.tolist()
    assert sorted(found) == list(range(len(space)))


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
