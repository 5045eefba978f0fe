"""Runs from Python: `forgetfree.run`, `graft` and `plan`; and `Job`, a run that they or the command line begin."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from forgetfree import recipes, registry
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub, reach_hub
from forgetfree.cli.settings import Settings
from forgetfree.data.columns import listed_names
from forgetfree.data.sources import check_form, check_stream, tasks_of_files
from forgetfree.display import each_note_once, stderr, tell
from forgetfree.errors import RunError, UsageError
from forgetfree.files import StrPath, free_directory
from forgetfree.jobs.config import (
    BESIDE_ON,
    NO_OBJECTS,
    OF_RUN,
    Execution,
    InMemory,
    Readout,
    RunConfig,
    prepared,
    stream_of,
)
from forgetfree.jobs.environment import caller_untouched, quiet_libraries

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forgetfree.jobs.revision import Revision
    from forgetfree.jobs.stream_loading import StreamLoader
    from forgetfree.results.table import Results

Json = dict[str, Any]
#: The Python names of options that may be given several times.
_IN_PYTHON = {"strategy": "strategies", "seed": "seeds"}


def run(
    stream: str | Sequence[str] | None = None,
    *,
    data: StrPath | Sequence[StrPath] | Mapping[str, Any] | None = None,
    metric: str | Sequence[str] | None = None,
    model: StrPath | nn.Module | None = None,
    tokenizer: Any = None,
    strategies: Mapping[str, str | type] | Sequence[str | type] | str | type | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    seeds: Sequence[int] | int | None = None,
    shots: int | None = None,
    steps: int | recipes.StepsRule | None = None,
    sparsity: float | None = None,
    held_out: StrPath | None = None,
    fine_tuned: StrPath | None = None,
    readout: Readout | None = None,
    device: str | torch.device | None = None,
    out: StrPath | None = None,
    on: StrPath | None = None,
    without: str | None = None,
    resume: bool = False,
    jobs: int | str = 1,
    progress: bool = True,
    debug: bool = False,
    **settings: Unpack[Settings],
) -> Results:
    """Train strategies on a stream of tasks, like ``forgetfree run``: same recipes, defaults, checks and scores.

    >>> results = run("qnli-agnews-sst2", data="demo", shots=200, steps=150)  # doctest: +SKIP

    Args:
        stream: a registered stream, task names, or task names joined by commas; default: the tasks of ``data``, in their order.
        data: ``hub``, ``demo``, a directory, or rows in memory by task; default: ``FORGETFREE_DATA`` if set, else ``hub``.
        metric: the metric, or ``TASK=METRIC`` for each of several tasks; default: the metric of the task's kind.
        model: ``minilm``, the default, a directory, a hub name, or a model in memory, which is copied.
        tokenizer: the tokenizer of a model in memory.
        strategies: names, and your own classes, which can be given other names,
            ``{"upper": UpperHalf}``; ``all``: every strategy of forgetfree; default: `registry.DEFAULT_STRATEGIES`.
        options: options of single strategies, by the name of the strategy or class.
        seeds: random seeds for sampling and training; default: 0.
        shots: number of training rows per label; default: all.
        steps: updates per task, or ``auto`` or ``paper``, see `TrainingOptions`; default: the model's recipe, else ``paper``.
        sparsity: size of a region, as a share of the graftable entries.
        held_out: held-out texts, whose loss is measured before and after the stream: a file, or a task of ``data``.
        fine_tuned: for a run of one task with ``fine-tune`` and ``bare-graft``: directory of a model that is fine-tuned
            already.
        readout: ``auto``, the default, ``linear``, ``mean``, ``prompt``, ``causal`` or ``generate``.
        device: device for training; default: ``auto``, a GPU, if there is one.
        out: output directory; default: none, all results stay in memory.
        on: a finished run: ``stream`` is learned on top of it, with its options. It can be combined with ``data``, the
            place of the new rows, ``model``, if it has moved, ``strategies``, ``seeds``, and the arguments for reading rows.
        without: with ``on``: the task of that run to remove, as if it had never been learned.
        resume: resume the run in ``out``; finished work is kept.
        jobs: number of units to run in parallel, or ``auto``; units in parallel use worker processes: call this below
            ``if __name__ == "__main__":`` in a script; ``ray`` or ``ray://HOST:PORT``: run as Ray tasks, see docs/scaling.md.
        progress: show the progress on stderr, or in the notebook.
        debug: raise an exception of a strategy instead of continuing with the others.
        **settings: any other option, such as ``learning_rate=1e-3``, see `Settings`; ``optimizer`` and ``schedule`` may be
            functions. Options of your own strategy are given with ``options``.

    Returns:
        The scores and ledgers. Failures are reported on stderr and in the notes of the results.

    Raises:
        UsageError: an argument is wrong. The message names the command line's flag: ``--held-out`` is ``held_out``.
        RunError: no unit finished.
        ForgetfreeError: data or model cannot be loaded.
    """
    from forgetfree.jobs.progress import make_progress
    from forgetfree.jobs.run_directory import failures

    if out is None and resume:
        raise UsageError("resume=True needs out. Give the directory of the run to resume.")
    for key in _IN_PYTHON.keys() & settings.keys():
        raise UsageError(f"{key} is {_IN_PYTHON[key]} in Python. Write {_IN_PYTHON[key]}=.")
    if data is not None:
        check_form(data)
    rows = data if isinstance(data, Mapping) else None
    network = None if model is None or isinstance(model, str | os.PathLike) else model
    if network is not None:
        from forgetfree.models.loading import check_in_memory

        check_in_memory(network, tokenizer)
    names, classes = _named_strategies(strategies)
    objects = InMemory(classes, rows, network, tokenizer)
    arguments: Json = {
        "stream": stream if stream is None or isinstance(stream, str) else stream_of(stream),
        "data": data if rows is None else "in memory",
        "metric": None if metric is None else listed_names(metric),
        "model": model if network is None else f"a {type(model).__name__}{recipes.IN_MEMORY}",
        "strategy": names,
        "seed": seeds,
        "shots": shots,
        "steps": steps,
        "sparsity": sparsity,
        "held_out": held_out,
        "fine_tuned": fine_tuned,
        "readout": readout,
        "device": None if device is None else str(device),
    }
    run_options = {key: value for key, value in arguments.items() if value is not None} | settings
    run_options |= {f"{name}.{key}": value for name, own in (options or {}).items() for key, value in own.items()}
    place = nullcontext(out) if out is not None else tempfile.TemporaryDirectory(prefix="forgetfree-")
    with warnings.catch_warnings(), caller_untouched(), each_note_once(), place as directory:
        quiet_libraries()
        execution = Execution(
            resume=resume, jobs=jobs, progress=make_progress(stderr()) if progress else None, debug=debug
        )
        run_options["out"] = directory
        if on is not None or without is not None:
            job = Job.on(on, without, run_options, objects)
        else:
            config = RunConfig.of(run_options, objects=objects).completed()
            job = Job.of(config, "" if out is None else f" into {directory}")
        results = job.announced(execution)()
        if (failed := failures(results)) and results.scores.empty:
            raise RunError(f"No unit finished. {failed[0]}")
        for message in failed:
            tell(f"forgetfree: error: {message}")
        if out is None:
            results.hold()
        return results


class GraftArguments(Settings, total=False):
    """Arguments of `graft`: the arguments of `run` except the stream and the strategies."""

    data: StrPath | Sequence[StrPath] | Mapping[str, Any] | None
    metric: str | Sequence[str] | None
    model: StrPath | nn.Module | None
    tokenizer: Any
    options: Mapping[str, Mapping[str, Any]] | None
    seeds: Sequence[int] | int | None
    shots: int | None
    steps: int | recipes.StepsRule | None
    sparsity: float | None
    fine_tuned: StrPath | None
    readout: Readout | None
    device: str | torch.device | None
    out: StrPath | None
    resume: bool
    jobs: int | str
    progress: bool
    debug: bool


def graft(task: str, **arguments: Unpack[GraftArguments]) -> Results:
    """Find the region of one task and graft it, like ``forgetfree graft``; `Results.graft` returns the graft.

    It is a run of one task with the strategies ``fine-tune`` and ``bare-graft``.

    >>> found = graft("sst2", data="demo", shots=64, steps=200).graft()  # doctest: +SKIP

    Args:
        task: a registered task, or one of ``data``.
        **arguments: as for `run`.

    Returns, Raises: as for `run`.
    """
    RunConfig(stream=stream_of([task])).check_one_task()
    return run([task], strategies=recipes.GRAFT, **arguments)


def plan(config: RunConfig, *, resume: bool = False, revision: Revision | None = None) -> Json:
    """Return the plan of a run, see `forgetfree.jobs.preflight`; nothing is written.

    >>> plan(RunConfig(stream="sst2", data="demo"))["total"]["seconds"]  # doctest: +SKIP

    Args:
        config: configuration of the run.
        resume: whether the run is resumed in its directory.
        revision: the finished run that it is based on.

    Raises:
        UsageError: lists every fault.
        RunError: the run cannot be resumed, or cannot be based on that run.
    """
    reach_hub(config.model)
    from forgetfree.jobs.preflight import plan_of

    if resume or revision:
        from forgetfree.jobs.run import check_base

        with redirect_stderr(StringIO()):  # the plan has the same notes
            check_base(prepared(config), Execution(resume=resume), revision)
    return plan_of(config, resume=resume, revision=revision)


def _named_strategies(
    strategies: Mapping[str, str | type] | Sequence[str | type] | str | type | None,
) -> tuple[list[str] | None, Json]:
    """Return the strategies' names for the command line, and by name the classes that it could not name."""
    if strategies is None:
        return None, {}
    several = [strategies] if isinstance(strategies, str | type) else strategies
    names, classes = list[str](), dict[str, Any]()
    for name, each in several.items() if isinstance(several, Mapping) else [("", each) for each in several]:
        if isinstance(each, str):
            names.append(f"{name}={each}" if name not in ("", each) else each)
            continue
        registered = registry.name_of(registry.strategy_class(each))
        names.append(name or registered or each.__name__)
        if names[-1] != registered:
            registry.check_strategy_name(names[-1], f"strategies={{NAME: {each.__name__}}}")
            classes[names[-1]] = each
    return names, classes


# -- Shared with the command line --------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A run that is checked and ready: ``title`` is printed first, and ``loader`` may have read its data already."""

    config: RunConfig
    title: str
    revision: Revision | None = None
    loader: StreamLoader | None = None

    @classmethod
    def of(cls, config: RunConfig, into: str) -> Job:
        """Return a new run, whose title ends with ``into``; raise ``UsageError`` with every fault."""
        from forgetfree.jobs.stream_loading import StreamLoader

        check_stream(config.stream, config.rows, config.read_options)
        config = prepared(config)
        doing = "Grafting" if config.strategy == recipes.GRAFT else "Running"
        return cls(config, f"{doing} {config.stream}{into}", loader=StreamLoader(config))

    @classmethod
    def on(cls, run: Any, without: str | None, options: Mapping[str, Any], objects: InMemory = NO_OBJECTS) -> Job:
        """Return a run based on a finished one, with the further tasks of ``stream`` or without one of its own.

        Raises:
            UsageError: ``run`` is missing, an option cannot be given with it, or the request cannot be met.
        """
        from forgetfree.jobs.revision import revise

        config = RunConfig.of(options, objects=objects)
        if run is None:
            raise UsageError("--without TASK needs the run that learned the task. Give it with --on RUN.")
        beside = {key: getattr(config, key) for key in OF_RUN if key in options and key not in ("stream", "out")}
        if wrong := [*config.unnamed, *(key for key in (*beside, *config.set) if key not in BESIDE_ON)]:
            raise UsageError(
                f"{wrong[0]} cannot be given with --on: the run continues with its own options, read from its files, "
                "so that the result equals a run that had all tasks from the start. Leave it out, or run the whole "
                "stream."
            )
        of_files = tasks_of_files(config.data) if "data" in options and without is None else ()
        out = Path(config.out or free_directory(Path(run).resolve().name))
        revision = revise(Path(run), config.names or of_files, without, out, beside)
        return cls(revision.config, f"{revision}, into {out}", revision)

    def announced(self, execution: Execution) -> Callable[[], Results]:
        """Announce the run, and return the function that runs all missing units and returns the results."""
        from forgetfree.jobs.run import run
        from forgetfree.jobs.run_directory import resumption

        config, out, is_watched = self.config, Path(self.config.out), execution.progress is not None
        if is_watched:
            tell(self.title)
            tell(self.revision.trained_again() if self.revision else recipe_of(config))
        if needs_hub(config.model, config.data):
            if config.objects.model is None:
                from forgetfree.models.location import locate

                locate(config.model)  # before data are downloaded
            go_offline_if_cut_off()
        if is_watched and execution.resume:
            tell(resumption(out))
        return partial(run, config, execution, self.revision, self.loader)


def recipe_of(config: RunConfig) -> str:
    """Return a line with the model's recipe, or that it has none; empty if an optimizer or ``fine_tuned`` is given instead."""
    told: Json = {}
    for name, cls in config.classes.items():
        for key, value in config.recipe(name).items():
            if key in cls.Options.model_fields:
                told[key if told.get(key, value) == value else f"{name}.{key}"] = value
    if told:
        options = " ".join(f"{key}={value}" for key, value in told.items())
        return f"Recipe of {config.model}: {options} (change any of them with --set)"
    if config.fine_tuned is None and not any(key.rpartition(".")[2] == "optimizer" for key in config.set):
        return (
            f"No recipe for {config.model}: using the paper's options, with SGD (--set optimizer=adamw with a "
            "learning rate such as 1e-4 often needs fewer steps)"
        )
    return ""
