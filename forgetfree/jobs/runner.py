"""One run of the command line: a stream, some strategies, some seeds → a run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.errors import ForgetfreeError, LedgerError, MetricError, TrainingError, UsageError
from forgetfree.files import write_json
from forgetfree.jobs.environment import (
    check_precision,
    environment,
    find_device,
    make_directory,
    set_threads,
    tell_shared_rows,
)
from forgetfree.jobs.run_config import CheckedConfig, RunConfig
from forgetfree.jobs.run_directory import SCHEMA, RunDirectory
from forgetfree.learning.monitor import PHASES, Monitor
from forgetfree.results import metrics
from forgetfree.results.run_results import SECONDS_PER_TASK

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.streams import Stream
    from forgetfree.models.state import StateStore
    from forgetfree.results.metrics import Predictions

MakeMonitor = Callable[[str], Monitor]
#: The answers before training, by the precision and batch size they are computed in.
FirstRows = dict[tuple[str, int], "dict[str, Predictions]"]


def run(
    config: RunConfig, *, resume: bool = False, jobs: int = 1, monitor: MakeMonitor | None = None, debug: bool = False
) -> dict[str, Any]:
    """Run it.

    Args:
        config: what to run.
        resume: continue in ``config.out``: what is finished there is kept.
        jobs: units at a time.
        monitor: makes the monitor of one strategy and seed from a title.
        debug: let an unexpected exception of a strategy through, instead of going on with the others.

    Returns:
        The content of results.json. Runs that failed stand under ``failed``.

    Raises:
        UsageError: the configuration is wrong, or the directory is not empty.
        ForgetfreeError: data or model cannot be loaded.
    """
    if jobs > 1:
        raise UsageError(f"--jobs {jobs} is not for runs yet. Leave it out.")
    checked = config.checked()
    directory = RunDirectory(Path(config.out), config.section(), resume)
    cache = Path(checked.run.cache) if checked.run.cache else directory.path / "fine-tuned"
    if checked.run.cache or os.path.lexists(cache):
        make_directory(cache, "--cache" if checked.run.cache else "--out")

    from forgetfree.continual.streams import make_stream
    from forgetfree.data.sources import load_tasks
    from forgetfree.models.loading import load_model
    from forgetfree.models.state import StateStore

    device = find_device(config.device)
    check_precision([options.precision for options in checked.options.values()], device)
    set_threads(checked.run.threads)
    tasks = load_tasks(config.stream, config.data, checked.run.evaluate_on)
    tell_shared_rows(tasks, checked.run.evaluate_on)
    directory.results["shared_rows"] = {rows.task.name: rows.shared for rows in tasks}
    store = StateStore(cache)
    for seed in config.seeds:
        stream = make_stream(
            config.stream,
            tasks,
            load_model(
                config.model,
                config.readout,
                graftable=checked.run.graftable,
                max_length=checked.run.max_length,
            ),
            shots=config.shots,
            seed=seed,
            test_limit=checked.run.test_limit,
            scenario=checked.run.scenario,
        )
        for name, strategy in checked.classes.items():
            strategy.check(checked.options[name], stream)
        directory.describe(_description(config, checked, stream), _environment(config, checked, stream, device))
        for name in checked.classes:
            make_directory(directory.of(name, seed))
        _run_seed(config, checked, stream, seed, device, store, directory, monitor or (lambda _: Monitor()), debug)
    return directory.results


def _run_seed(
    config: RunConfig,
    checked: CheckedConfig,
    stream: Stream,
    seed: int,
    device: str,
    store: StateStore,
    directory: RunDirectory,
    monitor: MakeMonitor,
    debug: bool,
) -> None:
    """All strategies with one seed; each starts from the stream's θ_pre."""
    results = directory.results
    first_rows: FirstRows = {}
    for name in config.strategies:
        if directory.entry(name, seed):
            continue
        strategy = checked.classes[name](
            stream=stream,
            options=checked.options[name],
            seed=seed,
            device=device,
            monitor=monitor(f"{stream.name} · {name} · seed {seed}"),
            store=store,
        )
        try:
            entry, last = _run_strategy(name, strategy, first_rows, directory)
        except (TrainingError, MetricError, LedgerError) as error:
            # It diverged. The other strategies and seeds of a long run are worth having.
            results["failed"].append({**results["unfinished"].pop(), "error": str(error)})
            directory.save()
            continue
        except (ForgetfreeError, OSError):
            raise
        except Exception as error:
            # A fault of a strategy, of a plug-in's perhaps, is no fault of the others.
            if debug:
                raise
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            message = f"It stopped with {reason}. Run it alone with --debug to see where."
            results["failed"].append({**results["unfinished"].pop(), "error": message})
            directory.save()
            continue
        directory.save_predictions(name, seed, last)
        results["runs"].append(entry)
        results["unfinished"] = []
        _compare_with_fine_tuned(directory, seed)
        directory.save()


def _run_strategy(
    name: str, strategy: ContinualStrategy, first_rows: FirstRows, directory: RunDirectory
) -> tuple[dict[str, Any], dict[str, Predictions]]:
    """One strategy over the whole stream: its entry of results.json, and its last answers."""
    tasks = strategy.stream.tasks
    unfinished: dict[str, Any] = {"strategy": name, "seed": strategy.seed, "matrix": []}
    directory.results["unfinished"] = [unfinished]
    current = _before_training(name, strategy, first_rows)
    rows, kept, seconds = [dict(current)], list[int](), list[float]()

    def scores(row: Mapping[str, Predictions]) -> list[float]:
        return [row[task.name].score(task.definition.metric) for task in tasks]

    for experience in strategy.stream.benchmark.train_stream:
        unfinished["matrix"] = [scores(row) for row in rows]
        directory.save()
        begin = time.perf_counter()
        strategy.train(experience)
        seconds.append(round(time.perf_counter() - begin, 3))
        strategy.save(directory.of(name, strategy.seed))
        current |= strategy.evaluate(strategy.stale(strategy.stream.task_of(experience)))
        rows.append(dict(current))
        kept.append(strategy.bytes_kept())
    entry = {
        "strategy": name,
        "seed": strategy.seed,
        "options": asdict(strategy.options),
        "metric": [task.definition.metric for task in tasks],
        "matrix": [scores(row) for row in rows],
        "ece": [[row[task.name].ece for task in tasks] for row in rows],
        "summary": {},
        "ledger": _ledger_summary(strategy),
        "kept_bytes": kept,
        **strategy.extra_results(),
        "seconds": {phase: round(strategy.seconds.get(phase, 0.0), 3) for phase in PHASES},
    }
    # Beside results.json, which repeats but for one key.
    write_json(directory.of(name, strategy.seed) / SECONDS_PER_TASK, seconds)
    return entry, current


def _before_training(name: str, strategy: ContinualStrategy, first_rows: FirstRows) -> dict[str, Predictions]:
    """Ours all answer with the pre-trained model then, so one evaluation serves them; of others that is not known."""
    if name not in registry.STRATEGIES:
        return dict(strategy.evaluate())
    how = strategy.options.precision, strategy.options.evaluation_batch_size
    if how not in first_rows:
        first_rows[how] = dict(strategy.evaluate())
    return dict(first_rows[how])


def _compare_with_fine_tuned(directory: RunDirectory, seed: int) -> None:
    """Summaries of all runs of one seed, with intransigence and agreement as soon as ``fine-tune`` is among them."""
    reference = directory.entry("fine-tune", seed)
    learned = [row[task] for task, row in enumerate(reference["matrix"][1:])] if reference else None
    fine_tuned = directory.load_logits("fine-tune", seed) if reference else {}
    for entry in directory.results["runs"]:
        if entry["seed"] != seed:
            continue
        entry["summary"] = metrics.summarize(entry["matrix"], entry["ece"], learned)
        if reference and "agreement" not in entry:
            logits = directory.load_logits(entry["strategy"], seed)
            entry["agreement"] = [
                metrics.agreement(logits[task], fine_tuned[task]) for task in directory.results["tasks"]
            ]


def _ledger_summary(strategy: ContinualStrategy) -> dict[str, Any] | None:
    ledger = strategy.ledger
    if ledger is None:
        return None
    return {
        "tasks": ledger.tasks,
        "composition": ledger.composition,
        "region_size": [len(record.region) for record in ledger.records],
        "owned_size": [len(record.owned.region) for record in ledger.records],
        "bytes": ledger.size_in_bytes,
        "overlap": ledger.overlap(),
    }


def _description(config: RunConfig, checked: CheckedConfig, stream: Stream) -> dict[str, Any]:
    """What results.json says of tasks, model and data."""
    return {
        "tasks": [task.name for task in stream.tasks],
        "scenario": stream.scenario,
        "evaluated_on": checked.run.evaluate_on,
        "model": {
            "name": config.model,
            "fingerprint": stream.loaded.fingerprint,
            "readout": stream.loaded.readout,
            "parameters": sum(parameter.numel() for parameter in stream.model.backbone.parameters()),
            "graftable": len(stream.model.space()),
        },
        "data": {
            "shots": config.shots,
            "steps": _shared(options.steps for options in checked.options.values()),
            "fingerprints": {task.name: task.fingerprint for task in stream.tasks},
            "test_rows": {task.name: len(task.test) for task in stream.tasks},
        },
        "floors": {
            "constant": metrics.constant_scores(
                [task.test.labels.numpy() for task in stream.tasks],
                [task.definition.metric for task in stream.tasks],
                task_known=stream.scenario == "task",
            )
        },
    }


def _shared(values: Iterable[Any]) -> Any:
    """The value that all have; ``None`` where they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _environment(config: RunConfig, checked: CheckedConfig, stream: Stream, device: str) -> dict[str, Any]:
    """What config.json says beside the configuration itself."""
    from forgetfree.models.loading import config_of

    return {
        "schema": SCHEMA,
        "scenario": stream.scenario,
        "options": {name: asdict(options) for name, options in checked.options.items()},
        **environment(device),
        "model": {
            "name": config.section()["model"],
            "readout": stream.loaded.readout,
            "fingerprint": stream.loaded.fingerprint,
            "max_length": stream.loaded.max_length,
            "config": config_of(stream.model.backbone),
        },
        "tasks": [asdict(task.definition) | {"hub": None} for task in stream.tasks],
        "data": {
            task.name: {
                "fingerprint": task.fingerprint,
                "encoded": task.test.digest,
                "train": len(task.train),
                "validation": len(task.validation),
                "test": len(task.test),
            }
            for task in stream.tasks
        },
    }


__all__ = ["RunConfig", "run"]
