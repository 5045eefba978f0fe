"""One run of the command line: a stream, some strategies, some seeds → a run directory.

OUT/config.json                       everything needed to repeat it
OUT/results.json                      see docs/results-format.md; rewritten after every row of a matrix
OUT/report.md                         the tables
OUT/fine-tuned/                       each task's fine-tuned model, shared by the strategies
OUT/STRATEGY/seed-S/                  ledger.safetensors, or checkpoint.safetensors
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import __version__, metrics, registry
from forgetfree.errors import RunError, TrainingError, UnknownNameError, UsageError
from forgetfree.files import write_atomically, write_json
from forgetfree.monitor import PHASES, Monitor
from forgetfree.options import Options, build, option
from forgetfree.registry import DEFAULT_STRATEGIES

if TYPE_CHECKING:
    from forgetfree.models.state import StateStore
    from forgetfree.strategy import ContinualStrategy, Predictions
    from forgetfree.streams import Stream

SCHEMA = 1
_PACKAGES = ("torch", "transformers", "datasets", "avalanche-lib", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What ``--set`` reaches beside the strategies' own options."""

    test_limit: int | None = option(None, "evaluate on at most this many test rows a task", at_least=1)
    cache: str | None = option(None, "directory of fine-tuned models to share between runs; none: inside OUT")
    threads: int | None = option(None, "CPU threads; none: as torch chooses", at_least=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run as it was asked for. Checked as a whole by `checked`, all faults together."""

    stream: str
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    model: str = "minilm"
    data: str = "hub"
    readout: str = "auto"
    shots: int | None = None
    steps: int | None = None
    seeds: tuple[int, ...] = (0,)
    sparsity: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    out: str = ""

    def recipe(self) -> dict[str, Any]:
        """The model's recipe, for the options that are not set otherwise; none where ``optimizer`` is."""
        entry = registry.MODELS.get(self.model)
        if entry is None or any(key.rpartition(".")[2] == "optimizer" for key in self.settings):
            return {}
        return {key: value for key, value in entry.recipe.items() if key not in self.settings}

    def checked(self) -> CheckedConfig:
        """The strategies' classes and options.

        Raises:
            UsageError: naming every fault.
        """
        faults: list[str] = []

        def attempt(action: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return action(*arguments)
            except UsageError as error:
                faults.append(str(error))
                return None

        if self.shots is not None and self.shots < 1:
            faults.append(f"--shots must be at least 1, got {self.shots}.")
        if self.steps is not None and self.steps < 1:
            faults.append(f"--steps must be at least 1, got {self.steps}.")
        if not self.seeds or min(self.seeds) < 0:
            faults.append(f"--seed must be 0 or more, got {', '.join(map(str, self.seeds)) or 'none'}.")
        for kind, given in (("strategy", self.strategies), ("seed", self.seeds)):
            if len(set(given)) < len(given):
                faults.append(f"--{kind} names the same {kind} twice: {', '.join(map(str, given))}.")
        found = {name: attempt(registry.strategy, name) for name in self.strategies}
        classes = {name: cls for name, cls in found.items() if cls is not None}
        fields = {name: set(cls.Options.__dataclass_fields__) for name, cls in classes.items()}
        own = set(RunOptions.__dataclass_fields__)
        if len(classes) == len(found):  # else the options of one are unknown
            for key in self.settings:
                attempt(_check_setting, key, own, fields)
        if self.sparsity is not None and not any("sparsity" in names for names in fields.values()):
            faults.append("--sparsity is given, but none of the strategies has it.")
        options = {
            name: attempt(build, cls.Options, self._values_for(name, fields[name]), name)
            for name, cls in classes.items()
        }
        mine = {key: value for key, value in self.settings.items() if key in own}
        run_options = attempt(build, RunOptions, mine, "the run")
        if faults:
            raise UsageError(" ".join(dict.fromkeys(faults)))
        return CheckedConfig(classes, options, run_options)

    def _values_for(self, strategy: str, known: set[str]) -> dict[str, Any]:
        """Options of one strategy, weakest first: recipe, flags, ``--set key``, ``--set strategy.key``."""
        flags = {"steps": self.steps, "sparsity": self.sparsity}
        scoped = {k.removeprefix(f"{strategy}."): v for k, v in self.settings.items() if k.startswith(f"{strategy}.")}
        given = {key: value for key, value in flags.items() if value is not None}
        merged = {**self.recipe(), **given, **self.settings, **scoped}
        return {key: value for key, value in merged.items() if key in known}


def _check_setting(key: str, own: set[str], fields: Mapping[str, set[str]]) -> None:
    """Raise ``UnknownNameError`` unless some strategy (or the run itself) has the option."""
    strategy, _, name = key.rpartition(".")
    if strategy and strategy not in fields:
        raise UnknownNameError("strategy in --set", strategy, fields)
    known = fields[strategy] if strategy else own.union(*fields.values())
    if name not in known:
        raise UnknownNameError("option", key, known)


@dataclass(frozen=True)
class CheckedConfig:
    """Strategy classes and options by name, and the run's own."""

    classes: Mapping[str, type[ContinualStrategy]]
    options: Mapping[str, Any]
    run: RunOptions


def run(config: RunConfig, *, resume: bool = False, monitor: Callable[[str], Monitor] | None = None) -> dict[str, Any]:
    """Run it.

    Args:
        config: what to run.
        resume: continue in ``config.out``: what is finished there is kept.
        monitor: makes the monitor of one strategy and seed from a title.

    Returns:
        The content of results.json. Runs that failed stand under ``failed``.

    Raises:
        UsageError: the configuration is wrong, or the directory is not empty.
        ForgetfreeError: data or model cannot be loaded.
    """
    checked = config.checked()
    out = Path(config.out)
    results = _open_directory(out, config, resume)

    from forgetfree.data.sources import load_tasks
    from forgetfree.models.loading import load_model
    from forgetfree.models.state import StateStore
    from forgetfree.streams import StreamModel, make_stream

    device = _device(config.device)
    if checked.run.threads:
        import torch

        torch.set_num_threads(checked.run.threads)
    tasks = load_tasks(config.stream, config.data)
    store = StateStore(Path(checked.run.cache) if checked.run.cache else out / "fine-tuned")
    for seed in config.seeds:
        stream = make_stream(
            config.stream,
            tasks,
            load_model(config.model, config.readout, model_class=StreamModel),
            shots=config.shots,
            seed=seed,
            test_limit=checked.run.test_limit,
        )
        for name, strategy in checked.classes.items():
            strategy.check(checked.options[name], stream)
        if not results["model"]:
            _describe(results, config, stream)
            write_json(out / "config.json", _config_file(config, checked, stream, device))
        _run_seed(config, checked, stream, seed, device, store, results, out, monitor or (lambda _: Monitor()))
    write_report(results, out)
    return results


def _run_seed(
    config: RunConfig,
    checked: CheckedConfig,
    stream: Stream,
    seed: int,
    device: str,
    store: StateStore,
    results: dict[str, Any],
    out: Path,
    monitor: Callable[[str], Monitor],
) -> None:
    """All strategies with one seed; each starts from the model as the stream brought it."""
    first_row: dict[str, Predictions] = {}
    reference: dict[str, Predictions] = {}
    for name in config.strategies:
        directory = out / name / f"seed-{seed}"
        if any(run["strategy"] == name and run["seed"] == seed for run in results["runs"]):
            if name == "fine-tune":
                reference = _load_predictions(directory)
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
            entry, last = _run_strategy(name, strategy, first_row, directory, results, out)
        except TrainingError as error:
            # The other strategies and seeds of a long run are worth having.
            results["failed"].append({"strategy": name, "seed": seed, "error": str(error)})
            write_json(out / "results.json", results)
            continue
        finally:
            strategy.pristine.load_(stream.model)
        if name == "fine-tune":
            reference = last
        fine_tune = next((r for r in results["runs"] if r["strategy"] == "fine-tune" and r["seed"] == seed), entry)
        own = (
            [row[j] for j, row in enumerate(fine_tune["matrix"][1:])] if fine_tune["strategy"] == "fine-tune" else None
        )
        entry["summary"] = metrics.summarize(entry["matrix"], entry["ece"], own)
        if reference:
            entry["agreement"] = [
                metrics.agreement(last[task.name].logits, reference[task.name].logits) for task in stream.tasks
            ]
        _save_predictions(last, directory)
        results["runs"].append(entry)
        results["unfinished"] = []
        write_json(out / "results.json", results)
        write_report(results, out)


def _run_strategy(
    name: str,
    strategy: ContinualStrategy,
    first_row: dict[str, Predictions],
    directory: Path,
    results: dict[str, Any],
    out: Path,
) -> tuple[dict[str, Any], dict[str, Predictions]]:
    """One strategy over the whole stream: its entry of results.json, and its last answers."""
    tasks = strategy.stream.tasks
    if not first_row:  # before training, all strategies answer with the same model
        first_row |= strategy.evaluate()
    current = dict(first_row)
    rows = [dict(current)]
    unfinished: dict[str, Any] = {"strategy": name, "seed": strategy.seed, "matrix": []}
    results["unfinished"] = [unfinished]

    def scores(row: Mapping[str, Predictions]) -> list[float]:
        return [row[task.name].score(task.definition.metric) for task in tasks]

    for experience in strategy.stream.benchmark.train_stream:
        unfinished["matrix"] = [scores(row) for row in rows]
        write_json(out / "results.json", results)
        strategy.train(experience)
        strategy.save(directory)
        current |= strategy.evaluate(strategy.stale(strategy.stream.task(experience.task_label)))
        rows.append(dict(current))
    entry = {
        "strategy": name,
        "seed": strategy.seed,
        "options": asdict(strategy.options),
        "metric": [task.definition.metric for task in tasks],
        "matrix": [scores(row) for row in rows],
        "ece": [[row[task.name].ece for task in tasks] for row in rows],
        "summary": {},
        "ledger": _ledger_summary(strategy),
        **strategy.extra_results(),
        "seconds": {phase: round(strategy.seconds.get(phase, 0.0), 3) for phase in PHASES},
    }
    return entry, current


_PREDICTIONS = "predictions.safetensors"


def _save_predictions(predictions: Mapping[str, Predictions], directory: Path) -> None:
    from safetensors.numpy import save

    arrays = {f"{task}/logits": answers.logits for task, answers in predictions.items()}
    arrays |= {f"{task}/labels": answers.labels for task, answers in predictions.items()}
    write_atomically(directory / _PREDICTIONS, save(arrays))


def _load_predictions(directory: Path) -> dict[str, Predictions]:
    from safetensors.numpy import load_file

    from forgetfree.strategy import Predictions

    arrays = load_file(directory / _PREDICTIONS)
    tasks = {key.rpartition("/")[0] for key in arrays}
    return {task: Predictions(arrays[f"{task}/logits"], arrays[f"{task}/labels"]) for task in tasks}


def _ledger_summary(strategy: ContinualStrategy) -> dict[str, Any] | None:
    ledger = strategy.ledger
    if ledger is None:
        return None
    return {
        "tasks": ledger.tasks,
        "region_size": [len(record.region) for record in ledger.records],
        "owned_size": [len(record.owned.region) for record in ledger.records],
        "bytes": ledger.size_in_bytes,
        "overlap": ledger.overlap(),
    }


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda is asked for, and torch finds no CUDA device. Use --device auto or cpu.")
    return name


# -- The run directory ------------------------------------------------------------------------------------


def _open_directory(out: Path, config: RunConfig, resume: bool) -> dict[str, Any]:
    """An empty, writable directory, or with ``resume`` the results it holds already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in out.iterdir())
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"--out {str(out)!r} cannot be written: {error.strerror}. Give a directory of your own."
        ) from error
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "stream": config.stream,
        "tasks": [],
        "model": {},
        "data": {},
        "runs": [],
    }
    if resume and (out / "results.json").is_file():
        try:
            results = json.loads((out / "results.json").read_text(encoding="utf-8"))
            before = json.loads((out / "config.json").read_text(encoding="utf-8"))["run"]
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{out} cannot be resumed: {error}. Start anew with another --out.") from error
        now = run_section(config)
        differ = sorted(key for key in now if key not in ("seed", "strategy") and before.get(key) != now[key])
        if differ:
            raise UsageError(
                f"--resume needs the configuration that {out} was begun with; these differ: "
                + ", ".join(f"{key} (was {before.get(key)!r}, now {now[key]!r})" for key in differ)
                + ". Start anew with another --out."
            )
    elif held:
        raise UsageError(
            f"--out {str(out)!r} is not empty: it holds {', '.join(held[:5])}{' …' if len(held) > 5 else ''}. "
            "Give another directory, or --resume to continue that run."
        )
    results["unfinished"], results["failed"] = [], []
    return results


def run_section(config: RunConfig) -> dict[str, Any]:
    """The configuration under the names of the command line: what ``--config`` reads back."""
    return {
        "stream": config.stream,
        "strategy": list(config.strategies),
        "model": config.model,
        "data": config.data,
        "readout": config.readout,
        "shots": config.shots,
        "steps": config.steps,
        "seed": list(config.seeds),
        "sparsity": config.sparsity,
        "set": dict(config.settings),
        "device": config.device,
    }


def _describe(results: dict[str, Any], config: RunConfig, stream: Stream) -> None:
    results["tasks"] = [task.name for task in stream.tasks]
    results["model"] = {
        "name": config.model,
        "fingerprint": stream.loaded.fingerprint,
        "readout": stream.loaded.readout,
        "parameters": sum(parameter.numel() for parameter in stream.model.backbone.parameters()),
        "graftable": len(stream.model.space()),
    }
    results["data"] = {
        "shots": config.shots,
        "steps": config.steps,
        "fingerprints": {task.name: task.fingerprint for task in stream.tasks},
        "test_rows": {task.name: len(task.test) for task in stream.tasks},
    }


def _config_file(config: RunConfig, checked: CheckedConfig, stream: Stream, device: str) -> dict[str, Any]:
    import torch

    return {
        "schema": SCHEMA,
        "run": run_section(config),
        "options": {name: asdict(options) for name, options in checked.options.items()},
        "versions": {
            "forgetfree": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "machine": {"device": device, "system": platform.platform(), "threads": torch.get_num_threads()},
        "model": {
            "name": config.model,
            "readout": stream.loaded.readout,
            "fingerprint": stream.loaded.fingerprint,
        },
        "tasks": [asdict(task.definition) | {"hub": None} for task in stream.tasks],
        "data": {
            task.name: {
                "fingerprint": task.fingerprint,
                "train": len(task.train),
                "validation": len(task.validation),
                "test": len(task.test),
            }
            for task in stream.tasks
        },
        "command": " ".join(["forgetfree", *sys.argv[1:]]) if sys.argv else "",
        "pid": os.getpid(),
    }


def write_report(results: dict[str, Any], out: Path) -> None:
    """Write report.md, where there is anything to report."""
    from forgetfree.reports import merge, render

    if results["runs"]:
        write_atomically(out / "report.md", render(merge([results]), "markdown"))


__all__ = ["RunConfig", "RunOptions", "run", "run_section"]
