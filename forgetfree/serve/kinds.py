"""Which class answers for the tasks of a kind: the one place in use that tells kinds apart."""

from __future__ import annotations

from forgetfree.kinds.kind import TaskKind, kind_of
from forgetfree.kinds.tagging import Tagging
from forgetfree.serve.labels import LabelTask, OneAnswer
from forgetfree.serve.served_task import ServedTask
from forgetfree.serve.tagging import OneSentence, TaggingTask
from forgetfree.tasks import TaskDefinition

#: By the class of the kind; the first that fits. A kind of a package is used as the one that it is made from.
SERVED: dict[type, type[ServedTask]] = {Tagging: TaggingTask, TaskKind: LabelTask}
#: What the server says of a text: one of these.
Response = OneAnswer | OneSentence


def served(task: TaskDefinition) -> ServedTask:
    """Return how a task is used."""
    kind = kind_of(task)
    return next(found for known, found in SERVED.items() if isinstance(kind, known))(task)
