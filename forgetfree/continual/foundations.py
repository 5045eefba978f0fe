"""What a task is built on: θ_pre, or θ_pre under the union of the regions that were learned so far.

In C.3 a task is fine-tuned from θ_pre, γ is sought on θ_pre, and its region is trained on the union so far. Beyond C.3, a task
that is met again, such as ``sst2@2``, builds on what was learned since with its last version's readout; ``localize_at=union``
seeks γ on the union, among what is free; and a task that stands alone has its region on θ_pre.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from forgetfree.continual.regions import RegionStrategy
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.learning.encoded_task import EncodedTask
from forgetfree.learning.single_task import SingleTask
from forgetfree.ledger import Ledger, Record
from forgetfree.models.state import ModelState
from forgetfree.tasks import version_of

LocalizeAt = Literal["pretrained", "union"]


class Foundations:
    """Gives the bench of a task on what the task is built on, step by step.

    Args:
        strategy: with its `regions`.
        localize_at: where γ is sought.
    """

    def __init__(self, strategy: RegionStrategy, localize_at: LocalizeAt = "pretrained") -> None:
        self._strategy, self._localize_at = strategy, localize_at

    @contextmanager
    def fine_tuning(self, task: EncodedTask) -> Iterator[SingleTask]:
        """Inside, the model holds what θ_ft starts from: θ_pre; of a task that is met again, what its region is built on."""
        met, model = self.versions(task), self._strategy.model
        with self._strategy.regions.holding(union=bool(met) and not self.stands_alone(task)):
            if not met:
                yield self._strategy.bench(task)
                return
            readout = model.readout_module(task.label)
            untrained = tensors_of(readout)
            load_tensors_(readout, met[-1].readout)
            try:
                yield self._bench_as_is(task)
            finally:
                load_tensors_(readout, untrained)

    @contextmanager
    def search(self, task: EncodedTask) -> Iterator[SingleTask]:
        """Inside, the model holds what γ is sought on: as for `fine_tuning`, unless ``localize_at`` says the union."""
        if self._localize_at == "union" and not self.versions(task):
            with self._strategy.regions.holding(union=True):
                yield self._bench_as_is(task)
        else:
            with self.fine_tuning(task) as bench:
                yield bench

    @contextmanager
    def region(self, task: EncodedTask, *, alone: bool) -> Iterator[SingleTask]:
        """Inside, the model holds what the region is trained on: the union so far, or θ_pre where it is to stand alone."""
        with self._strategy.regions.holding(union=not alone):
            yield self._bench_as_is(task)

    def stands_alone(self, task: EncodedTask) -> bool:
        """Return whether ``task`` is to stand on θ_pre alone, whatever others have: all do, or its last version does."""
        met = self.versions(task)
        return self._strategy.regions.ledger.composition == "alone" or (bool(met) and met[-1].alone)

    def versions(self, task: EncodedTask) -> list[Record]:
        """Return the records of what is the same task by its name: ``sst2``, ``sst2@2``."""
        base = version_of(task.name)[0]
        return [record for record in self._strategy.regions.ledger.records if version_of(record.task)[0] == base]

    def _bench_as_is(self, task: EncodedTask) -> SingleTask:
        """Return the bench on what the model holds; γ takes none of the entries that are owned there."""
        strategy = self._strategy
        return strategy.bench(task, ModelState.of(strategy.model, [task.name]), taken=strategy.regions.carried())


def sought_on_theta_pre(ledger: Ledger) -> dict[str, Region]:
    """Return γ of the tasks of a ledger that were sought on θ_pre: later versions were sought on a union."""
    return {record.task: record.region for record in ledger.records if version_of(record.task)[1] == 1}
