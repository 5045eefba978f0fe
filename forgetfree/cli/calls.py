"""The commands as functions: `forgetfree.run` and `forgetfree.graft` do what the command line does, and return the results."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from forgetfree import recipes, registry
from forgetfree.cli.hub import reach_hub
from forgetfree.cli.words import recipe_of
from forgetfree.data.columns import named_metrics
from forgetfree.data.sources import check_form, default_data, no_stream, tasks_of_files
from forgetfree.display import each_note_once, stderr, tell
from forgetfree.errors import RunError, UsageError, names_arguments
from forgetfree.files import no_empty_directories
from forgetfree.jobs.config import BESIDE_ON, Execution, InMemory, RunConfig, key_of, strategies_of, stream_of
from forgetfree.jobs.directory import failures, resumption
from forgetfree.jobs.environment import caller_untouched, quiet_libraries
from forgetfree.jobs.progress import make_progress
from forgetfree.options import build, by_name, name_of_function
from forgetfree.results.table import Results, load_results
from forgetfree.training.training_options import check_optimizer

Json = dict[str, Any]


@names_arguments
def run(
    stream: str | Sequence[str] | None = None,
    *,
    data: Any = None,
    metric: str | Mapping[str, str] | None = None,
    model: Any = "minilm",
    tokenizer: Any = None,
    strategies: Mapping[str, str | type] | Sequence[str | type] | str | type = registry.DEFAULT_STRATEGIES,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    seeds: Sequence[int] | int = (0,),
    shots: int | None = None,
    steps: int | recipes.StepsRule | None = None,
    sparsity: float | None = None,
    held_aside: Any = None,
    fine_tuned: Any = None,
    readout: str = "auto",
    device: str = "auto",
    out: Any = None,
    on: Any = None,
    without: str | None = None,
    resume: bool = False,
    allow_changed: bool = False,
    jobs: int | Literal["auto"] = 1,
    cluster: str | None = None,
    progress: bool = True,
    debug: bool = False,
    **settings: Any,
) -> Results:
    """Train strategies on a stream of tasks, as ``forgetfree run`` does: same recipes, checks and scores.

    >>> results = run("qnli-agnews-sst2", data="demo", shots=200, steps=150)  # doctest: +SKIP

    Args:
        stream: a registered stream, task names, or task names joined by commas; default: the tasks of ``data``, in their order.
        data: ``hub``, ``demo``, a directory, or rows in memory by task; default: ``FORGETFREE_DATA`` if set, else ``hub``.
        metric: what answers are scored by, or the metric of each task by its name; default: that of the task's kind.
        model: ``minilm``, a directory, a hub name, or a model in memory, which is copied.
        tokenizer: of a model in memory.
        strategies: names, and classes of your own under development, which may have other names than theirs,
            ``{"upper": UpperHalf}``; ``all``: every one of ours.
        options: of single strategies, by their names (of a class: its name).
        seeds: of sampling and training.
        shots: training rows per label; default: all.
        steps: updates per task, or ``auto`` or ``paper``, see `TrainingOptions`; default: the model's recipe, else ``paper``.
        sparsity: share of the parameters that a region may have.
        held_aside: texts that no task trains, to tell their loss before and after the stream: a file, or a task of ``data``.
        fine_tuned: of a run of one task with ``fine-tune`` and ``bare-graft``: the directory of a model that is fine-tuned
            already.
        readout: ``auto``, ``linear``, ``mean``, ``prompt``, ``causal`` or ``generate``.
        device: where to train; ``auto``: on a GPU, if there is one.
        out: directory to write; default: none, and all is kept in memory.
        on: a finished run: ``stream`` is learned on top of it, by its own options. Beside it may stand ``data``, where the
            further rows are, ``model``, if it lies elsewhere now, ``strategies``, ``seeds``, and what says how rows are read.
        without: with ``on``: the task of that run that is taken away, as if it had never been learned.
        resume: go on in ``out``; what is finished there is kept.
        allow_changed: resume with other versions or on another device, too.
        jobs: how many units run at a time, or ``auto``, more than one as worker processes: a script then calls this below
            ``if __name__ == "__main__":``.
        cluster: run units as tasks of Ray, see docs/scaling.md: ``ray`` or ``ray://HOST:PORT``.
        progress: show on stderr, or in the notebook, what is being done.
        debug: let an exception of a strategy through, instead of going on with the others.
        **settings: any option that ``--set`` takes, such as ``learning_rate=1e-3``; ``optimizer`` and ``schedule`` may be
            functions.

    Returns:
        The scores and ledgers. What failed is said on stderr and in the results' notes.

    Raises:
        UsageError: an argument is wrong, in the words of the command line.
        RunError: nothing could be finished.
        ForgetfreeError: data or model cannot be loaded.
    """
    execution = Execution(resume=resume, allow_changed=allow_changed, jobs=jobs, cluster=cluster, debug=debug)
    if stream is None and isinstance(data, Mapping):
        stream = stream_of(data)
    elif stream is None and _is_place(data):
        stream = stream_of(tasks_of_files(_place(data)))
    names, classes = _named_strategies(strategies)
    strategy_settings = {f"{name}.{key}": value for name, own in (options or {}).items() for key, value in own.items()}
    objects = InMemory(
        strategies=classes,
        data=None if data is None or _is_place(data) else data,
        model=None if _is_name(model) else model,
        tokenizer=tokenizer,
    )
    places = default_data() if data is None else data
    check_form(places)
    values: Json = {
        "stream": _joined(stream, data),
        "strategies": list(strategies_of(names)),
        "shots": shots,
        "sparsity": sparsity,
        "held_aside": None if held_aside is None else str(held_aside),
        "fine_tuned": None if fine_tuned is None else str(fine_tuned),
        "model": _named(model, f"a {type(model).__name__}{recipes.IN_MEMORY}"),
        "data": _place(places) if _is_place(places) else "in memory",
        "metrics": named_metrics(metric),
        "readout": readout,
        "steps": steps,
        "seeds": _listed(seeds),
        "device": str(device),
    }
    values |= _settings(values, settings | strategy_settings)
    if out is None and execution.resume:
        raise UsageError("resume=True needs out. Give the directory to continue.")
    cache = values["settings"].get("cache")
    with warnings.catch_warnings(), caller_untouched(), each_note_once(), _directory(out, cache) as directory:
        quiet_libraries()
        values["out"] = str(directory)
        if on is not None or without is not None:
            perform, told = _on(on, without, values if data is not None else values | {"data": None}, objects)
        else:
            perform, told = _whole(values, objects, "" if out is None else f" into {directory}")
        reach_hub("minilm" if objects.model is not None else values["model"], values["data"])
        if progress:
            for line in told.splitlines():
                tell(line)
            execution = replace(execution, progress=make_progress(stderr()))
            tell(resumption(directory) if execution.resume else "")
        failed = failures(perform(execution))
        results = load_results(directory)
        if failed and results.scores.empty:
            raise RunError(f"Nothing was finished. {failed[0]}")
        for message in failed:
            tell(f"forgetfree: error: {message}")
        if out is None:
            results.hold()
        return results


def graft(task: str, **arguments: Any) -> Results:
    """Find the region of one task and graft it, as ``forgetfree graft`` does; `Results.graft` returns the graft.

    It is a run of one task with the strategies ``fine-tune`` and ``bare-graft``.

    Args:
        task: a registered task, or one of ``data``.
        **arguments: as of `run`, but ``stream`` and ``strategies``.

    Returns, Raises: as `run`.
    """
    return run([task], strategies=recipes.GRAFT, **arguments)


#: Performs a run, and what is said before.
_Ready = tuple[Callable[[Execution], Json], str]


def _whole(values: Json, objects: InMemory, into: str) -> _Ready:
    """Return what performs a run of its own, and what is said before, with the words ``into`` which it is written."""
    from forgetfree.jobs.config import prepared
    from forgetfree.jobs.run import run as perform

    config = build(RunConfig, _without_none(values), "run")
    if not config.stream:
        raise no_stream(objects.data_or(config.data))
    config = prepared(replace(config, objects=replace(objects, call=_call(config, values))))
    recipe = recipe_of(config)
    return partial(perform, config), f"Running {config.stream}{into}" + (f"\n{recipe}" if recipe else "")


def _on(run: Any, without: str | None, values: Json, objects: InMemory) -> _Ready:
    """Return what performs a run on top of a finished one; raise ``UsageError`` for arguments that are that run's own."""
    from forgetfree.jobs.revision import revise
    from forgetfree.jobs.run import run_on

    if run is None:
        raise UsageError("--without TASK needs the run that learned the task. Give it by --on RUN.")
    if given := objects.listed({}):
        raise UsageError(
            f"A run on top of another reads files, and given are {', '.join(given)}. Give a file or directory."
        )
    usual = RunConfig()
    asked = {
        key_of(field): values[field.name]
        for field in fields(RunConfig)
        if values.get(field.name) and field.name not in ("out", "stream", "device", "settings")
        if field.name == "data" or values[field.name] not in (one := getattr(usual, field.name), _listed(one))
    }
    if wrong := [*(key for key in asked if key not in BESIDE_ON), *values["settings"]]:
        raise UsageError(
            f"{wrong[0]} cannot be given with on: a run goes on with its own options, so that it equals one that had all tasks "
            "from the start. Leave it out, or run the whole stream."
        )
    stream = "" if without and not asked.get("data") else values["stream"]
    tasks = [name.strip() for name in stream.split(",") if name.strip()]
    shown = {"stream": stream, "on": str(run), "without": without, **asked}
    call = f"forgetfree.run({', '.join(f'{key}={each!r}' for key, each in shown.items() if each)})"
    revision = revise(Path(run), tasks, without, Path(values["out"]), asked, replace(objects, call=call))
    return partial(run_on, revision), f"{revision}, into {values['out']}"


@contextmanager
def _directory(out: Any, cache: Any) -> Iterator[Path]:
    """Give the directory that is asked for, or a temporary one."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="forgetfree-") as temporary:
            yield Path(temporary)
    else:
        with no_empty_directories(out, cache):
            yield Path(out)


def _settings(values: Json, arguments: Json) -> Json:
    """Return ``settings``, and what has a flag of its own on the command line, such as the column of the texts."""
    check_optimizer(arguments.get("optimizer"))  # once, not for every strategy
    hints = get_type_hints(RunConfig)
    flags = {
        key_of(field): field.name
        for field in fields(RunConfig)
        if field.metadata and field.name not in {*values, "settings", "out"}
    }
    own = {
        flags[key]: _listed(value) if get_origin(hints[flags[key]]) is tuple else value
        for key, value in arguments.items()
        if key in flags
    }
    return own | {"settings": {key: by_name(value) for key, value in arguments.items() if key not in flags}}


def _call(config: RunConfig, values: Json) -> str:
    """Return the call as config.json says it: what is not the default."""
    usual = RunConfig()
    arguments = {
        "metric" if key == "metrics" else key: each
        for key, each in values.items()
        if key not in ("settings", "out") and getattr(config, key) != getattr(usual, key)
    }
    shown = [f"{key}={each!r}" for key, each in arguments.items()]
    shown += [
        f"{key}={name_of_function(each) if callable(each) else repr(each)}" for key, each in config.settings.items()
    ]
    return f"forgetfree.run({', '.join(shown)})"


def _named_strategies(
    strategies: Mapping[str, str | type] | Sequence[str | type] | str | type,
) -> tuple[list[str], Json]:
    """Return strategies as the command line names them, and the classes that no command line could name, by name.

    Raises:
        UsageError: one is no strategy, or cannot have its name.
    """
    chosen = [strategies] if isinstance(strategies, str | type) else strategies
    pairs = chosen.items() if isinstance(chosen, Mapping) else [("", each) for each in chosen]
    names, classes = list[str](), dict[str, Any]()
    for name, each in pairs:
        if isinstance(each, str):
            names.append(f"{name}={each}" if name not in ("", each) else each)
            continue
        registered = registry.name_of(registry.strategy_class(each))
        if registered is None:
            name = name or each.__name__
            registry.check_strategy_name(name, f"strategies={{NAME: {each.__name__}}}")
            classes[name] = each
        elif name not in ("", registered):
            raise UsageError(
                f"{each.__name__} is the registered strategy {registered!r}. Give it by that name, not {name!r}."
            )
        names.append(registered or name)
    return names, classes


def _joined(stream: Any, data: Any) -> str:
    """Return a stream as one text. A list of one name of rows in memory means these, not a registered stream of that name."""
    if isinstance(stream, str):
        return stream
    names = [str(each) for each in stream or ()]
    return stream_of(names) if isinstance(data, Mapping) and {*names} <= {*data} else ",".join(names)


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values]


def _is_name(value: Any) -> bool:
    return isinstance(value, str | Path)


def _is_place(data: Any) -> bool:
    """Return whether data are named, by one name or the paths of several files."""
    return _is_name(data) or isinstance(data, list | tuple)


def _place(data: Any) -> str | list[str]:
    return str(data) if _is_name(data) else [str(each) for each in data]


def _named(value: Any, otherwise: str) -> str:
    return str(value) if _is_name(value) else otherwise


def _without_none(values: Json) -> Json:
    return {key: value for key, value in values.items() if value is not None}
