"""What a job is: its plan, its units, what each measures, and what is made of them. The engine asks nothing else.

OUT/config.json     what was asked for and found, and all that is needed to repeat it
OUT/…/unit.json     one folder for each unit, see `forgetfree.jobs.running.unit`
OUT/results.json    made from the units, whenever one has ended
OUT/report.md       the tables
OUT/report.html     of a run, figures and tables: made when it ends, however it ends
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from forgetfree.device import find_device
from forgetfree.errors import Faults
from forgetfree.jobs.config import CommonOptions, InMemory, JobConfig
from forgetfree.jobs.running.environment import check_precision
from forgetfree.jobs.running.trackers import track
from forgetfree.jobs.running.unit import Json, Unit
from forgetfree.jobs.running.workload import Workload
from forgetfree.training.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.core.parameters import ParameterSpace

Config = TypeVar("Config", bound=JobConfig)


class Job(ABC, Generic[Config]):
    """What one command asks for. It is pickled as its configuration alone, and loads in each process what it needs there.

    Its configuration is checked here, and only here.

    Args:
        config: what was asked for.
        checked: what its ``checked()`` returned.
        common: its threads and its cache of fine-tuned models; default: inside the directory.
        precisions: that it computes in.
        in_memory: objects in the place of names.
    """

    #: Lists that may be longer when the job is resumed.
    growing: Collection[str] = ("seed",)
    #: Whether each unit learns all tasks of a stream, one after the other; else it is about one task.
    learns_stream: ClassVar[bool] = False

    def __init__(
        self,
        config: Config,
        checked: Any,
        common: CommonOptions,
        precisions: Sequence[str],
        in_memory: InMemory | None = None,
    ) -> None:
        self.config, self.checked, self.in_memory = config, checked, in_memory or InMemory()
        self.out, self.threads = Path(config.out), common.threads
        check_precision(precisions, self.device)
        self.cache, self.cache_is_given = Path(common.cache or self.out / "fine-tuned"), bool(common.cache)

    # -- Plan ------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def workload(cls, config: Config, checked: Any, faults: Faults) -> Workload:
        """Return what a configuration asks for.

        Args:
            config: what was asked for.
            checked: what its ``checked()`` returned; ``None`` where it has faults: what can be said in spite of them.
            faults: takes those that are found only here.
        """

    def request(self) -> Json:
        """Return what was asked for, under the names of the command line: it must be the same when the job is resumed."""
        return self.config.section()

    @abstractmethod
    def describe(self) -> Json:
        """Load and check what the units need, before anything is trained, and return what config.json says of it.

        When the job is resumed, ``model``, ``tasks`` and ``data`` are compared; ``about`` begins results.json.
        """

    @abstractmethod
    def space(self) -> ParameterSpace:
        """Return the graftable tensors of the model that `describe` loaded, which alone knows its readout; called after it."""

    @abstractmethod
    def keys(self) -> Json:
        """Return the units in order, by the names of their folders; called after `describe`."""

    # -- Perform ---------------------------------------------------------------------------------------------

    @abstractmethod
    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Measure one unit; see `forgetfree.jobs.running.unit.Measure`."""

    def __call__(self, unit: Unit, monitor: Monitor, debug: bool = False, log: Sequence[str] = ()) -> None:
        """Run one unit."""
        tracked = partial(track, log, unit, self.out, self.config.section())
        unit.run(self.measure, monitor, self.device, debug, tracked)

    @property
    def device(self) -> str:
        """Return where this process computes."""
        return find_device(self.config.device)

    @property
    def objects(self) -> list[str]:
        """List what it has in memory and no file can name."""
        return self.in_memory.objects(self.config.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    def unload(self) -> None:
        """Let go of all that was loaded, for processes that load for themselves."""
        fresh, arguments = self.__reduce__()
        self.__dict__ = fresh(*arguments).__dict__
