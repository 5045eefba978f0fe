"""The commands as functions: `forgetfree.run` and `forgetfree.graft` do what the command line does, and return the results."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin

from forgetfree import recipes, registry
from forgetfree.cli.job import Job
from forgetfree.data.columns import named_metrics
from forgetfree.data.sources import check_form, default_data, no_stream, tasks_of_files
from forgetfree.display import each_note_once, tell
from forgetfree.errors import RunError, UsageError
from forgetfree.jobs.config import IN_PYTHON, Execution, InMemory, RunConfig, strategies_of, stream_of
from forgetfree.jobs.directory import failures
from forgetfree.jobs.environment import caller_untouched, quiet_libraries
from forgetfree.options import build, by_name, name_of_function
from forgetfree.results.config_file import TYPES
from forgetfree.results.table import Results, load_results
from forgetfree.training.training_options import check_optimizer

Json = dict[str, Any]


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
    held_out: Any = None,
    fine_tuned: Any = None,
    readout: str = "auto",
    device: str = "auto",
    out: Any = None,
    on: Any = None,
    without: str | None = None,
    resume: bool = False,
    jobs: int | str = 1,
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
        held_out: texts that no task trains, to tell their loss before and after the stream: a file, or a task of ``data``.
        fine_tuned: of a run of one task with ``fine-tune`` and ``bare-graft``: the directory of a model that is fine-tuned
            already.
        readout: ``auto``, ``linear``, ``mean``, ``prompt``, ``causal`` or ``generate``.
        device: where to train; ``auto``: on a GPU, if there is one.
        out: directory to write; default: none, and all is kept in memory.
        on: a finished run: ``stream`` is learned on top of it, by its own options. Beside it may stand ``data``, where the
            further rows are, ``model``, if it lies elsewhere now, ``strategies``, ``seeds``, and what says how rows are read.
        without: with ``on``: the task of that run that is taken away, as if it had never been learned.
        resume: go on in ``out``; what is finished there is kept.
        jobs: how many units run at a time, or ``auto``, more than one as worker processes: a script then calls this below
            ``if __name__ == "__main__":``; ``ray`` or ``ray://HOST:PORT``: as tasks of Ray, see docs/scaling.md.
        progress: show on stderr, or in the notebook, what is being done.
        debug: let an exception of a strategy through, instead of going on with the others.
        **settings: any option that ``--set`` takes, such as ``learning_rate=1e-3``; ``optimizer`` and ``schedule`` may be
            functions.

    Returns:
        The scores and ledgers. What failed is said on stderr and in the results' notes.

    Raises:
        UsageError: an argument is wrong. The message names the command line's flag: ``--held-out`` is ``held_out``.
        RunError: nothing could be finished.
        ForgetfreeError: data or model cannot be loaded.
    """
    execution = Execution(resume=resume, jobs=jobs, debug=debug)
    if out is None and execution.resume:
        raise UsageError("resume=True needs out. Give the directory to continue.")
    check_form(default_data() if data is None else data)
    rows = data if isinstance(data, Mapping) else None
    places = [_text(each) for each in data] if isinstance(data, list | tuple) else _text(data)
    if stream is None and data is not None and without is None:
        tasks = list(rows) if rows is not None else tasks_of_files(places)
        stream = stream_of(tasks) if rows is not None or tasks else None
    names, classes = _named_strategies(strategies)
    network = None if isinstance(model, str | os.PathLike) else model
    if network is not None:
        from forgetfree.models.loading import check_in_memory

        check_in_memory(network, tokenizer)
    objects = InMemory(strategies=classes, data=rows, model=network, tokenizer=tokenizer)
    values: Json = {
        "stream": _joined(stream, rows),
        "strategy": list(strategies_of(names)),
        "shots": shots,
        "held_out": _text(held_out),
        "fine_tuned": _text(fine_tuned),
        "model": _text(model) if network is None else f"a {type(model).__name__}{recipes.IN_MEMORY}",
        "data": places if rows is None else "in memory",
        "metric": named_metrics(metric),
        "readout": readout,
        "seed": _listed(seeds),
        "device": str(device),
    }
    strategy_settings = {f"{name}.{key}": value for name, own in (options or {}).items() for key, value in own.items()}
    flagged = {key: value for key, value in (("steps", steps), ("sparsity", sparsity)) if value is not None}
    values |= _settings(values, flagged | settings | strategy_settings)
    with warnings.catch_warnings(), caller_untouched(), each_note_once(), _directory(out) as directory:
        quiet_libraries()
        values["out"] = str(directory)
        if on is not None or without is not None:
            job = _job_on(on, without, values, objects)
        else:
            job = _job(values, objects, "" if out is None else f" into {directory}")
        failed = failures(job.train(job.announced(execution, watched=progress)))
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


def _job(values: Json, objects: InMemory, into: str) -> Job:
    """Return a run of its own, with the words ``into`` which it is written."""
    given = {key: value for key, value in values.items() if value is not None}
    given.setdefault("data", default_data())
    config = build(RunConfig, given, "run")
    if not config.stream:
        raise no_stream(objects.data_or(config.data))
    config = replace(config, objects=replace(objects, call=_call(_changed(given) | dict(config.set))))
    return Job.of_config(config, f"Running {config.stream}{into}")


def _job_on(on: Any, without: str | None, values: Json, objects: InMemory) -> Job:
    """Return a run on top of a finished one, of the arguments that are not their defaults."""
    if given := objects.listed({}):
        raise UsageError(
            f"A run on top of another reads files, and given are {', '.join(given)}. Give a file or directory."
        )
    asked = {key: each for key, each in _changed(values).items() if key not in ("stream", "device")} | values["set"]
    if values["data"]:
        asked["data"] = values["data"]  # of the default, too: it is where the further tasks are
    stream = values["stream"]
    shown = {"stream": stream, "on": on, "without": without} | asked
    call = _call({key: each for key, each in shown.items() if each})
    return Job.on_run(on and Path(on), without, stream, Path(values["out"]), asked, replace(objects, call=call))


def _changed(values: Json) -> Json:
    """Return the values that are not their fields' defaults."""
    usual = RunConfig()
    return {
        key: each
        for key, each in values.items()
        if key not in ("set", "out") and each and each not in (one := getattr(usual, key), _listed(one))
    }


def _call(arguments: Json) -> str:
    """Return the call as config.json says it."""
    shown = {key: name_of_function(each) if callable(each) else repr(_text(each)) for key, each in arguments.items()}
    return f"forgetfree.run({', '.join(f'{IN_PYTHON.get(key, key)}={each}' for key, each in shown.items())})"


@contextmanager
def _directory(out: Any) -> Iterator[Path]:
    """Give the directory that is asked for, or a temporary one."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="forgetfree-") as temporary:
        yield Path(temporary)


def _settings(values: Json, arguments: Json) -> Json:
    """Return ``settings``, and what has a flag of its own on the command line, such as the column of the texts."""
    check_optimizer(arguments.get("optimizer"))  # once, not for every strategy
    own = {key: value for key, value in arguments.items() if key in TYPES.keys() - values.keys() - {"set"}}
    settings = {key: by_name(value) for key, value in arguments.items() if key not in own}
    listed = {key: _listed(value) if get_origin(TYPES[key]) is tuple else value for key, value in own.items()}
    return listed | {"set": settings}


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


def _joined(stream: Any, rows: Mapping[str, Any] | None) -> str:
    """Return a stream as one text. A list of one name of rows in memory means these, not a registered stream of that name."""
    if isinstance(stream, str):
        return stream
    names = [str(each) for each in stream or ()]
    return stream_of(names) if rows is not None and {*names} <= {*rows} else ",".join(names)


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values]


def _text(value: Any) -> Any:
    """Return a path as a text; anything else as it is."""
    return str(value) if isinstance(value, os.PathLike) else value
