"""The registered names and their objects. Importing this module imports none of them: targets are ``package.module:object``.

Any installed package can add names by entry points, in the groups ``forgetfree.strategies``, ``forgetfree.streams``
(streams and tasks), ``forgetfree.kinds`` and ``forgetfree.metrics``; docs/plug-in.md describes the object for each group. A
plug-in cannot replace a name of ours, and a broken plug-in stops only the runs that name it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from forgetfree.tasks import TaskDefinition

#: The groups of names that packages may add.
Group = Literal["strategies", "streams", "kinds", "metrics"]


@dataclass(frozen=True)
class Entry:
    """One registered name.

    Attributes:
        target: ``package.module:object``.
        summary: one line.
        origin: the owner of the object, for messages.
        remedy: the remedy if it cannot be used, for messages.
    """

    target: str
    summary: str = ""
    origin: str = "A part of forgetfree"
    remedy: str = "Install forgetfree again."

    def load(self, check: Callable[[Any], Any] = lambda found: found) -> Any:
        """Import the target and return the result of ``check`` for it.

        Raises:
            UsageError: it cannot be imported, or ``check`` refuses it; the message names it and the reason.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return check(attrgetter(attribute)(importlib.import_module(module)))
        except (Exception, SystemExit) as error:  # a package may do anything while it is imported
            text = str(error) if isinstance(error, ForgetfreeError) else f"{type(error).__name__}: {error}"
            reason = " ".join(text.split()).rstrip(".")
            raise UsageError(f"{self.origin} ({self.target}) cannot be used: {reason}. {self.remedy}") from error


STRATEGIES: dict[str, Entry] = {
    "fine-tune": Entry("forgetfree.strategies.fine_tune:FineTune", "one model per task: the reference"),
    "continual-ft": Entry(
        "forgetfree.strategies.continual_ft:ContinualFT", "naive: fine-tunes one model on each task in turn"
    ),
    "grafting-continual": Entry(
        "forgetfree.strategies.grafting_continual:GraftingContinual",
        "trains a tiny region per task and then freezes it (Panigrahi et al., 2023)",
    ),
    "graft-retrain": Entry(
        "forgetfree.strategies.graft_retrain:GraftRetrain",
        "fine-tunes, finds a region per task and trains it again from θ_pre",
    ),
    "bare-graft": Entry(
        "forgetfree.strategies.bare_graft:BareGraft",
        "a region per task, with the values from fine-tuning and no further training",
    ),
    "packnet": Entry(
        "forgetfree.strategies.packnet:PackNet",
        "trains all free entries, keeps a share of them for the task and resets the rest (PackNet)",
    ),
    "wsn": Entry(
        "forgetfree.strategies.wsn:WSN", "learns a mask per task together with the weights (winning subnetworks)"
    ),
    "lotto": Entry(
        "forgetfree.strategies.lotto:LoTTO",
        "one model, in which each task trains a mask of free entries (LoTTO)",
    ),
    "bitfit": Entry("forgetfree.strategies.bitfit:BitFit", "trains only the biases, separately for each task (BitFit)"),
    "lora": Entry(
        "forgetfree.strategies.lora:LoRA", "low-rank adapters per task, trained independently on θ_pre (LoRA)"
    ),
    "o-lora": Entry(
        "forgetfree.strategies.lora:OLoRA", "low-rank adapters of all tasks, summed and kept orthogonal (O-LoRA)"
    ),
    "merge-task-arithmetic": Entry(
        "forgetfree.strategies.merging:MergeTaskArithmetic",
        "merges models: adds up their differences from θ_pre (task arithmetic)",
    ),
    "merge-ties": Entry(
        "forgetfree.strategies.merging:MergeTies",
        "merges models: averages their largest differences that agree in sign (TIES)",
    ),
    "merge-stitch": Entry(
        "forgetfree.strategies.merging:MergeStitch",
        "merges models: one region per task, averaged where regions overlap (Localize-and-Stitch)",
    ),
    "replay": Entry("forgetfree.strategies.avalanche_baselines:Replay", "adds examples of earlier tasks to each batch"),
    "agem": Entry(
        "forgetfree.strategies.gem:AGEM",
        "removes the component of the gradient that conflicts with stored examples (A-GEM)",
    ),
    "gem": Entry(
        "forgetfree.strategies.gem:GEM", "projects the gradient so that no earlier task's loss increases (GEM)"
    ),
    "gdumb": Entry(
        "forgetfree.strategies.avalanche_baselines:GDumb", "trains θ_pre on a balanced memory of examples (GDumb)"
    ),
    "der": Entry("forgetfree.strategies.avalanche_baselines:DER", "replays stored examples with their logits (DER++)"),
    "ewc": Entry(
        "forgetfree.strategies.avalanche_baselines:EWC", "one penalty per task, weighted by Fisher information (EWC)"
    ),
    "online-ewc": Entry(
        "forgetfree.strategies.avalanche_baselines:OnlineEWC",
        "one running penalty, weighted by Fisher information (online EWC)",
    ),
    "si": Entry(
        "forgetfree.strategies.avalanche_baselines:SI",
        "a penalty weighted by each weight's contribution to the decrease of the loss (synaptic intelligence)",
    ),
    "mas": Entry(
        "forgetfree.strategies.avalanche_baselines:MAS", "a penalty weighted by the sensitivity of the outputs (MAS)"
    ),
    "rwalk": Entry(
        "forgetfree.strategies.avalanche_baselines:RWalk", "the penalty of EWC combined with a path-based one (RWalk)"
    ),
    "lwf": Entry(
        "forgetfree.strategies.avalanche_baselines:LwF",
        "distils the previous model's outputs on the new examples (LwF)",
    ),
    "cumulative": Entry(
        "forgetfree.strategies.all_data:Cumulative", "trains each task on the examples of all tasks so far"
    ),
    "joint": Entry(
        "forgetfree.strategies.all_data:Joint",
        "trains on the examples of all tasks at once, for the sum of their steps",
    ),
}
DEFAULT_STRATEGIES = ("fine-tune", "continual-ft", "grafting-continual")

KINDS: dict[str, Entry] = {
    "classification": Entry("forgetfree.kinds.classification:Classification", "one label per text or pair of texts"),
    "tagging": Entry("forgetfree.kinds.tagging:Tagging", "one tag per word of a sentence"),
    "generation": Entry("forgetfree.kinds.generation:Generation", "a reply to a prompt or a chat"),
    "multi-label": Entry("forgetfree.kinds.multi_label:MultiLabel", "any number of labels per text or pair of texts"),
}

#: Metrics of answers that are labels.
LABEL_METRICS: dict[str, Entry] = {
    "accuracy": Entry("forgetfree.results.metrics:ACCURACY", "the share of correct predictions"),
    "f1": Entry("forgetfree.results.metrics:F1", "F1 of label 1 for two labels, F1 of entities for tagging"),
    "macro_f1": Entry("forgetfree.results.metrics:MACRO_F1", "the unweighted mean of the F1 of all labels"),
    "micro_f1": Entry("forgetfree.kinds.multi_label:MICRO_F1", "F1 over all labels together, for multi-label tasks"),
}
#: Metrics of answers that are texts.
TEXT_METRICS: dict[str, Entry] = {
    "rouge_l": Entry(
        "forgetfree.results.text_metrics:ROUGE_L", "ROUGE-L: F1 of the longest common subsequence of words"
    ),
    "exact_match": Entry("forgetfree.results.text_metrics:EXACT_MATCH", "the share of texts that equal a reference"),
    "token_f1": Entry(
        "forgetfree.results.text_metrics:TOKEN_F1", "F1 of the words of a text and a reference, as in SQuAD"
    ),
    "bleu": Entry("forgetfree.results.text_metrics:BLEU", "BLEU over all texts, as computed by sacrebleu"),
    "numeric_answer": Entry(
        "forgetfree.results.text_metrics:NUMERIC_ANSWER",
        "the share of texts whose last number equals the last number of a reference",
    ),
}
METRICS = LABEL_METRICS | TEXT_METRICS

SOURCES: dict[str, Entry] = {
    "demo": Entry("forgetfree.data.demo:load", "ten small embedded tasks"),
}


#: The classes that answer from the saved file of a strategy without a ledger, by file name; the first existing file is used.
WEIGHTS: dict[str, Entry] = {
    "adapters.safetensors": Entry("forgetfree.strategies.adapter_file:AdapterWeights"),
    "fine-tuned.json": Entry("forgetfree.serve.weights:ModelWeights"),
    "checkpoint.safetensors": Entry("forgetfree.serve.weights:ModelWeights"),
}


#: The function that lays out the report of `forgetfree.results.table.Results`.
REPORT = Entry("forgetfree.results.report.run_report:lay_out")


def strategies() -> dict[str, Entry]:
    """Return all strategies: ours first, then those of installed packages, which cannot replace ours."""
    return STRATEGIES | _plugins("strategies")


def strategy(reference: str) -> Any:
    """Return the strategy class of a registered name, of ``MODULE:CLASS`` or of ``NAME=MODULE:CLASS``.

    Raises:
        UnknownNameError: there is no such strategy.
        UsageError: its package or module is broken, or has something else under the name; or its name is taken, or cannot be a
            folder's name.
    """
    _, named, target = reference.rpartition("=")
    if named or ":" in target:
        candidate = _class_of_module(target)
        check_strategy_name(strategy_name(reference), f"--strategy NAME={target}")
        return candidate
    hint = "Give --strategy once for each." if "," in target else "A class of your own is named MODULE:CLASS."
    return _entry("strategy", target, strategies(), hint).load(strategy_class)


def strategy_name(reference: str) -> str:
    """Return the name of a strategy in tables, options and folders: its given name, or else the name of its class."""
    name, named, target = reference.rpartition("=")
    return name if named else target.rpartition(":")[2]


def check_strategy_name(name: str, remedy: str) -> None:
    """Raise ``UsageError``, with ``remedy``, unless a user's strategy class can have this name, also as its folder's name."""
    if name in strategies() or name == "all":
        raise UsageError(f"{name!r} is the name of a registered strategy. Give your class another: {remedy}.")
    if _TAKEN.fullmatch(name) or not _FOLDER.fullmatch(name):
        raise UsageError(
            "A strategy's folder in a run has its name, which must begin with a letter or a digit, be of letters, digits, - "
            f"and _, and have no other use as a folder, got {brief(name)}. Give another: {remedy}."
        )


def _entry(what: str, name: str, known: Mapping[str, Entry], hint: str) -> Entry:
    if name not in known:
        same = next((each for each, entry in known.items() if entry.summary.startswith(f"{name}:")), "")
        raise UnknownNameError(what, name, known, hint, same=same)
    return known[name]


def name_of(strategy: type) -> str | None:
    """Return the registered name of a strategy class, or ``None``."""
    target = f"{strategy.__module__}:{strategy.__qualname__}"
    return next((name for name, entry in strategies().items() if entry.target == target), None)


def kinds() -> dict[str, Entry]:
    """Return all kinds of tasks: ours first, then those of installed packages, which cannot replace ours."""
    return KINDS | _plugins("kinds")


def kind(name: str) -> Any:
    """Return the kind of tasks with a name, a `forgetfree.kinds.kind.Kind`.

    Args:
        name: the kind's name, or a form of rows from a definition: ``single``, ``pair``, ``tokens``.

    Raises:
        UnknownNameError: there is no such kind.
        UsageError: its package is broken, or has something else under the name.
    """
    from forgetfree.tasks import KIND_OF_FORM

    known = kinds()
    kind_name = KIND_OF_FORM.get(name, name)
    if kind_name not in known:
        raise UnknownNameError("kind of task", name, {*known, *KIND_OF_FORM}, "An installed package may add kinds.")
    return known[kind_name].load(_kind_class)()


def metrics() -> dict[str, Entry]:
    """Return all metrics: ours first, then those of installed packages, which cannot replace ours."""
    return METRICS | _plugins("metrics")


def metric(name: str) -> Any:
    """Return the metric with a name, a `forgetfree.results.metrics.Metric`.

    Raises:
        UnknownNameError: there is no such metric.
        UsageError: its package is broken, or has something else under the name.
    """
    return _entry("metric", name, metrics(), "An installed package may add metrics.").load(_metric)


def metrics_of(name: str) -> list[str]:
    """Return the names of the metrics that can score tasks of a kind: the kind's own, and those of packages."""
    own = kind(name).metrics
    return [metric for metric in metrics() if metric in own or metric not in METRICS]


def unknown_names(task: TaskDefinition) -> list[str]:
    """Return a phrase for the kind and for the metric of a definition if they are unknown here."""
    from forgetfree.tasks import KIND_OF_FORM

    names = list(dict.fromkeys([*KIND_OF_FORM, *kinds()]))
    known = {"kind": names, "metric": metrics_of(task.kind) if task.kind in names else [*metrics()]}
    return [
        f"{what} must be one of {', '.join(names)}, got {getattr(task, what)!r}"
        for what, names in known.items()
        if getattr(task, what) not in names
    ]


def faults_of(task: TaskDefinition) -> list[str]:
    """Return a phrase for each fault of a definition: of its fields and names, or else those that its kind finds."""
    from forgetfree.json_file import checked
    from forgetfree.tasks import TaskDefinition

    try:
        checked(TaskDefinition, task)
    except ValueError as error:
        return [str(error)]
    faults: list[str] = unknown_names(task) or kind(task.kind).faults(task)
    return faults


def check_stored(task: TaskDefinition) -> None:
    """Raise ``ValueError`` for the faults of a stored definition, if its kind and metric are installed.

    A definition that needs a missing package is refused only when its task is used.
    """
    if not unknown_names(task) and (faults := faults_of(task)):
        raise ValueError("; ".join(faults))


def tasks() -> dict[str, TaskDefinition]:
    """Return all registered tasks: ours first, then those of installed packages that can be used."""
    from forgetfree.data.streams import TASKS
    from forgetfree.tasks import TaskDefinition

    return TASKS | {name: plugin for name, plugin in _loaded("streams").items() if isinstance(plugin, TaskDefinition)}


def streams() -> dict[str, tuple[str, ...]]:
    """Return all streams, each a tuple of task names: ours first, then those of installed packages that can be used."""
    from forgetfree.data.streams import STREAMS

    return STREAMS | {name: plugin for name, plugin in _loaded("streams").items() if isinstance(plugin, tuple)}


def broken(group: Group) -> dict[str, str]:
    """Return the plug-ins of a group that cannot be used, by name, with a paragraph on each. This imports all plug-ins."""
    taken = {
        f"{point.name} of {_package_of(point)}": f"{_origin(point)} ({point.value}) cannot be used: that name is forgetfree's "
        "own. Give its entry point another name."
        for point in _entry_points(group, tuple(sys.path))
        if _is_ours(group, point.name)
    }
    return {name: str(plugin) for name, plugin in _loaded(group).items() if isinstance(plugin, UsageError)} | taken


#: A name that every file system and archive accepts, and names with another use: in a run, and on Windows.
_FOLDER, _TAKEN = re.compile(r"[^\W_][\w-]{0,99}"), re.compile(r"fine-tuned|con|prn|aux|nul|(com|lpt)\d", re.IGNORECASE)
#: The names of the other columns in tables of scores.
_BESIDE_METRICS = (
    *("strategy", "seed", "task", "after", "metric", "value", "rows"),
    *("score", "ece", "agreement", "seconds"),
)


def _is_ours(group: Group, name: str) -> bool:
    from forgetfree.data.streams import STREAMS, TASKS
    from forgetfree.tasks import KIND_OF_FORM

    ours: dict[Group, Container[str]] = {
        "strategies": STRATEGIES,
        "streams": {*STREAMS, *TASKS},
        "kinds": {*KINDS, *KIND_OF_FORM},
        "metrics": {*METRICS, *_BESIDE_METRICS},
    }
    return name in ours[group] or (group == "metrics" and name.startswith("union_"))


def _loaded(group: Group) -> dict[str, Any]:
    """Return the object of each plug-in of a group, or the error that it raises."""
    checks = {"strategies": strategy_class, "kinds": _kind_class, "metrics": _metric}
    loaded: dict[str, Any] = {}
    for name, entry in _plugins(group).items():
        try:
            loaded[name] = entry.load(checks.get(group, partial(_stream_or_task, name)))
        except UsageError as error:
            loaded[name] = error
    return loaded


def strategy_class(candidate: Any) -> Any:
    """Return a strategy class unchanged; raise ``UsageError`` if it is no strategy class."""
    from forgetfree.options import build

    _subclass(candidate, "forgetfree.continual.strategy:ContinualStrategy")
    _subclass(candidate.Options, "forgetfree.training.training_options:TrainingOptions")
    # This fails if an option has a type that cannot be parsed, or a default that it would refuse.
    build(candidate.Options, dict(candidate.Options()), candidate.__name__)
    return candidate


def _kind_class(candidate: Any) -> Any:
    return _subclass(candidate, "forgetfree.kinds.kind:Kind")


def _subclass(candidate: Any, target: str) -> Any:
    """Return a class unchanged; raise ``UsageError`` unless it is a subclass of ``target`` without abstract methods."""
    base = Entry(target).load()  # by name: it is in a layer above
    if not (isinstance(candidate, type) and issubclass(candidate, base)):
        raise UsageError(f"expected a subclass of {base.__name__}, got {brief(candidate)}")
    if missing := sorted(getattr(candidate, "__abstractmethods__", ())):
        raise UsageError(f"{candidate.__name__} has no {' and no '.join(f'{each}()' for each in missing)}")
    return candidate


def _metric(candidate: Any) -> Any:
    if not isinstance(candidate, Entry("forgetfree.results.metrics:Metric").load()):
        raise UsageError(f"expected a Metric, got {brief(candidate)}")
    return candidate


def _stream_or_task(name: str, candidate: Any) -> Any:
    """Return a stream as a tuple, or a task with its registered name and the default prompts."""
    from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE, TaskDefinition

    if isinstance(candidate, TaskDefinition):
        labels = tuple(candidate.labels)
        task = replace(
            candidate,
            name=name,
            labels=labels,
            label_words=tuple(candidate.label_words) or labels,
            template=candidate.template or DEFAULT_TEMPLATE.get(candidate.kind, ""),
            causal_template=candidate.causal_template or DEFAULT_CAUSAL_TEMPLATE.get(candidate.kind, ""),
        )
        if faults := faults_of(task):
            raise UsageError("; ".join(faults))
        return task
    if isinstance(candidate, tuple | list) and candidate and all(isinstance(task, str) and task for task in candidate):
        return tuple(candidate)
    raise UsageError(f"expected a tuple or list of task names, or a TaskDefinition, got {brief(candidate)}")


# -- Installed packages, and modules of the user's own ----------------------------------------------------


@lru_cache(maxsize=8)
def _entry_points(group: Group, places: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of a group. Reading those of all packages is slow, so cache them by ``places``, the path."""
    return entry_points(group=f"forgetfree.{group}")


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown"


def _origin(point: EntryPoint) -> str:
    return f"The plug-in {point.name!r} of package {_package_of(point)!r}"


def _plugins(group: Group) -> dict[str, Entry]:
    """Return the entries that installed packages add to a group, by name, without those with one of our names."""
    entries: dict[str, Entry] = {}
    for point in sorted(_entry_points(group, tuple(sys.path)), key=_package_of):
        if not _is_ours(group, point.name):  # if two packages add one name, the first by package name counts
            summary = f"from {_package_of(point)}"
            entries.setdefault(
                point.name, Entry(point.value, summary, _origin(point), "Fix or uninstall that package.")
            )
    return entries


def _class_of_module(name: str) -> Any:
    """Return the strategy class with a name ``module:Class``; the module may also be in the working directory."""
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)) or module.endswith(".py"):
        raise UsageError(
            f"A strategy of your own is named MODULE:CLASS, got {brief(name)}. Write my_strategy:MyStrategy for the class "
            "MyStrategy in the file my_strategy.py of this directory."
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that no file there hides a library's module
    remedy = (
        f"Correct it (docs/plug-in.md), or start forgetfree in the directory of the module's file ({here} is this one)."
    )
    return Entry(name, origin="The strategy", remedy=remedy).load(strategy_class)
