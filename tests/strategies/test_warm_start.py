"""``warm_start``: a task's θ_ft starts from that of the task before. The reference trains one model on all tasks in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import compared
import pytest
import torch
from compared import assert_same, logits
from withheld import text_stream

from forgetfree import registry
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget
from forgetfree.errors import OptionError
from forgetfree.models.state import StateStore
from forgetfree.seeds import derive_seed
from forgetfree.training.monitor import Monitor, Phase
from forgetfree.training.step import fine_tune

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.2, "sparsity": 0.05},
    **{"region_from": "movement", "warm_start": True},
}
TASKS = ("qnli", "ag_news", "sst2")


def made(stream: Any, store: StateStore | None = None, monitor: Monitor | None = None, **changes: Any) -> Any:
    cls = registry.strategy("grafting-continual")
    return cls(stream=stream, options=cls.Options(**OPTIONS | changes), device="cpu", store=store, monitor=monitor)


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
    assert strategy.bytes_kept() == strategy.ledger.size_in_bytes + 4 * len(space)  # BERT has no buffers


class Seen(Monitor):
    """Records the tasks that are fine-tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[str] = []

    def phase(self, task: str, phase: Phase, steps: int) -> AbstractContextManager[Callable[[int, float], None]]:
        if phase == "fine_tune":
            self.tasks.append(task)
        return super().phase(task, phase, steps)


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("stored", [True, False])
def test_a_loaded_strategy_learns_on_as_if_it_had_learned_all(
    tiny_stream: MakeStream, tmp_path: Path, stored: bool, scenario: str
) -> None:
    """Models in the store are not fine-tuned again; without a store, all earlier tasks are. A failure changes nothing."""

    def begun(monitor: Monitor | None = None) -> Any:
        how = {} if scenario == "task" else {"task_inference": "router"}
        store = StateStore(tmp_path / "store") if stored else None
        return made(text_stream(tiny_stream, scenario), store, monitor, **how)

    strategy, seen = compared.learn(begun(), 2), Seen()
    strategy.save(tmp_path)
    resumed = begun(seen)
    resumed.load(tmp_path)
    third = list(resumed.stream.benchmark.train_stream)[2]
    localize, resumed.localize = resumed.localize, None
    with pytest.raises(TypeError):
        resumed.train(third)
    resumed.localize = localize
    strategy.train(list(strategy.stream.benchmark.train_stream)[2])
    resumed.train(third)
    assert seen.tasks == (["sst2"] if stored else [*TASKS, *TASKS])
    assert_same(logits(resumed), logits(strategy))


def test_options_that_choose_regions_otherwise_are_refused(tiny_stream: MakeStream) -> None:
    with pytest.raises(OptionError, match="expected region_from=movement, got snip"):
        made(tiny_stream(), region_from="snip")
