"""``warm_start``: θ_ft of a task begins with that of the task before. The reference trains a model on all tasks in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compared
import pytest
import torch
from compared import assert_same, logits

from forgetfree import registry
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget
from forgetfree.errors import OptionError
from forgetfree.models.state import StateStore
from forgetfree.seeds import derive_seed
from forgetfree.training.step import fine_tune

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.2, "sparsity": 0.05},
    **{"region_from": "movement", "warm_start": True},
}


def made(stream: Any, store: StateStore | None = None, **changes: Any) -> Any:
    cls = registry.strategy("grafting-continual")
    return cls(stream=stream, options=cls.Options(**OPTIONS | changes), device="cpu", store=store)


@pytest.mark.parametrize("composition", ["union", "alone"])
def test_a_region_is_what_training_on_all_tasks_in_turn_moved_most_of_what_is_free(
    tiny_stream: MakeStream, composition: str
) -> None:
    strategy, stream = compared.learn(made(tiny_stream(), composition=composition)), tiny_stream()
    model, space, owned = stream.model, stream.model.space(), Region.empty()
    before = space.flatten(model.backbone)
    for task, record in zip(stream.tasks, strategy.ledger.records, strict=True):
        fine_tune(model, task.train, strategy.options, steps=4, seed=derive_seed(0, "fine_tune", task.name))
        moved = (space.flatten(model.backbone) - before).abs()
        moved[owned.indices] = 0
        largest = moved.topk(budget(len(space), 0.05)).indices.sort().values
        assert torch.equal(record.owned.region.indices, largest)
        owned = owned | record.owned.region if composition == "union" else owned
    assert strategy.bytes_kept() == strategy.ledger.size_in_bytes + strategy.pre_trained.size_in_bytes


@pytest.mark.parametrize("stored", [True, False])
def test_a_loaded_strategy_learns_on_as_if_it_had_learned_all(
    tiny_stream: MakeStream, tmp_path: Path, stored: bool
) -> None:
    """What the store has is not fine-tuned again; without a store, all earlier tasks are."""
    store = StateStore(tmp_path / "store") if stored else None
    strategy = compared.learn(made(tiny_stream(), store), 2)
    strategy.save(tmp_path)
    resumed = made(tiny_stream(), store)
    resumed.load(tmp_path)
    for each in (resumed, strategy):
        each.train(list(each.stream.benchmark.train_stream)[2])
    assert "fine_tune" in resumed.seconds and resumed.updates == {"qnli": 4, "ag_news": 4, "sst2": 8}
    assert_same(logits(resumed), logits(strategy))
    made_again = [path.name.partition("-")[0] for path in (tmp_path / "store").glob("*.safetensors")]
    assert sorted(made_again) == (["ag_news", "qnli", "sst2"] if stored else [])


def test_options_that_choose_regions_otherwise_are_refused(tiny_stream: MakeStream) -> None:
    with pytest.raises(OptionError, match="expected region_from=movement, got snip"):
        made(tiny_stream(), region_from="snip")
