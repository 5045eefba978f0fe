"""One task grafted: fine-tune (or take a fine-tuned model), localize, answer, write the grafts.

OUT/config.json                 everything needed to repeat it
OUT/results.json                see docs/grafts.md; rewritten after every seed
OUT/report.md                   the tables
OUT/graft.safetensors           the graft; of several seeds or sparsities, graft-seed-S-sparsity-F.safetensors each
OUT/fine-tuned/                 the fine-tuned models, unless ``--cache DIR`` shares them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forgetfree.core.body import body_space
from forgetfree.core.graft import Graft
from forgetfree.core.graft_file import find_graft
from forgetfree.core.regions import Region, distribution, kind_of, layer_of
from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import load_task
from forgetfree.errors import UsageError
from forgetfree.files import write_atomically, write_json
from forgetfree.jobs.environment import (
    check_precision,
    environment,
    find_device,
    make_directory,
    refuse_held,
    set_threads,
    tell_shared_rows,
)
from forgetfree.jobs.graft_config import CheckedGraft, GraftConfig
from forgetfree.learning.localization import LocalizationOptions, check_localization
from forgetfree.learning.monitor import Monitor, Stopwatch
from forgetfree.learning.single_task import SingleTask
from forgetfree.learning.training import predict
from forgetfree.models.fine_tuned_directory import FineTunedModel, load_fine_tuned, readout_of
from forgetfree.models.loading import load_model
from forgetfree.models.state import ModelState, StateStore
from forgetfree.results.graft_report import lay_out_graft
from forgetfree.results.metrics import Predictions, agreement, constant_score
from forgetfree.results.rendering import render_page

SCHEMA = 1
MakeMonitor = Callable[[str], Monitor]
Json = dict[str, Any]


def run_graft(
    config: GraftConfig, *, resume: bool = False, jobs: int = 1, monitor: MakeMonitor | None = None, debug: bool = False
) -> Json:
    """Do it.

    Args:
        config: what was asked for.
        resume: continue in ``config.out``.
        jobs: units at a time.
        monitor: makes the monitor of one seed from a title.
        debug: let exceptions through.

    Returns:
        The content of results.json.

    Raises:
        UsageError: the configuration is wrong, or the directory is not empty.
        ForgetfreeError: data, model or graft cannot be loaded, or training cannot go on.
    """
    if resume or jobs > 1:
        raise UsageError("--resume and --jobs are not for grafts yet. Leave them out.")
    checked = config.checked()
    if config.fine_tuned is not None:
        _check_readout(config.readout, config.fine_tuned)
    out = Path(config.out)
    refuse_held(out, make_directory(out), "Give another directory.")
    cache = Path(checked.common.cache) if checked.common.cache else out / "fine-tuned"
    if checked.common.cache:
        make_directory(cache, "--cache")
    device = find_device(config.device)
    check_precision([options.precision for options in checked.options], device)
    set_threads(checked.common.threads)
    rows = load_task(config.task, config.data, checked.common.evaluate_on)
    tell_shared_rows([rows], checked.common.evaluate_on)
    store = StateStore(cache)
    results: Json = {}
    for seed in config.seeds:
        watch = Stopwatch((monitor or (lambda _: Monitor()))(f"{config.task} · graft · seed {seed}"))
        subject = _Subject.load(config, checked, rows, seed, device, store, watch)
        if not results:
            results = _described(config, checked, subject) | {"shared_rows": rows.shared}
            write_json(out / "config.json", _environment(config, checked, subject, device))
        found = _measure(config, checked, subject, watch)
        for key in ("rows", "regions", "grafts"):
            results[key] += found[key]
        for phase, seconds in watch.seconds.items():
            results["seconds"][phase] = round(results["seconds"].get(phase, 0.0) + seconds, 3)
        write_json(out / "results.json", results)
        write_atomically(out / "report.md", render_page(lay_out_graft(results), "markdown"))
    return results


@dataclass(frozen=True)
class _Subject:
    """What one seed works on: the workbench, and the fine-tuned model where it is given."""

    bench: SingleTask
    given: FineTunedModel | None
    base: Graft | None

    @classmethod
    def load(
        cls,
        config: GraftConfig,
        checked: CheckedGraft,
        rows: TaskRows,
        seed: int,
        device: str,
        store: StateStore,
        monitor: Monitor,
    ) -> _Subject:
        """Load the models, and check what only they can tell: before any training."""
        how: Json = {"graftable": checked.common.graftable, "max_length": checked.common.max_length}
        given = None
        if config.fine_tuned is not None:
            given = load_fine_tuned(config.fine_tuned, config.model, rows.task, **how)
            given.add_task(rows.task)
        bench = SingleTask(
            given.loaded if given else load_model(config.model, config.readout, **how),
            rows,
            shots=config.shots,
            seed=seed,
            test_limit=checked.common.test_limit,
            device=device,
            store=store,
            monitor=monitor,
        )
        for options in checked.options:
            check_localization(options, bench.space)
        return cls(bench, given, _load_base(config, bench))

    def fine_tuned(self, options: LocalizationOptions) -> ModelState:
        """θ_ft with its readout."""
        if self.given is None:
            return self.bench.fine_tuned(options)
        return ModelState(self.given.theta, {self.bench.task.name: self.given.head}, self.bench.pre.buffers)

    def fine_tuned_answers(self, fine_tuned: ModelState, options: LocalizationOptions) -> Predictions:
        """What the fine-tuned model answers; one that is given, with all tensors its own."""
        if self.given is None:
            return self.bench.answers(fine_tuned, options=options)
        rows = self.bench.task.test
        model = self.given.given.to(self.bench.device)
        logits = predict(model, rows, batch_size=options.evaluation_batch_size, precision=options.precision)
        return Predictions(logits.numpy(), rows.labels.numpy())

    def regions(self, fine_tuned: ModelState, all_options: Sequence[LocalizationOptions]) -> dict[float, Region]:
        """γ by sparsity, from the base of the graft that is given, or from one of the options' kind."""
        sparsities = [options.sparsity for options in all_options]
        base = None if self.base is None else self.base.region
        learned = self.bench.localized(fine_tuned, all_options[0], sparsities, base)
        return {sparsity: each.region for sparsity, each in zip(sparsities, learned, strict=True)}


def _measure(config: GraftConfig, checked: CheckedGraft, subject: _Subject, monitor: Monitor) -> Json:
    """One seed: the rows, regions and grafts of results.json."""
    bench, task, first = subject.bench, subject.bench.task, checked.options[0]
    fine_tuned = subject.fine_tuned(first)
    regions = subject.regions(fine_tuned, checked.options)
    under_head = bench.grafted(fine_tuned, Region.empty())
    # The head of a model that is given is fine-tuned, and there is no other.
    states = {"pre-trained": under_head if subject.given else bench.pre}
    if bench.loaded.readout == "linear" and not subject.given:
        states["readout alone"] = under_head
    rows: list[Json] = []
    with monitor.phase(task.name, "evaluate", 1 + len(states) + len(regions)) as on_step:
        reference = subject.fine_tuned_answers(fine_tuned, first)

        def add(model: str, answers: Predictions, sparsity: float | None = None, entries: int | None = None) -> None:
            rows.append(
                {
                    "seed": bench.seed,
                    "model": model,
                    "sparsity": sparsity,
                    "entries": entries,
                    "score": answers.score(task.definition.metric),
                    "ece": answers.ece,
                    "agreement": agreement(answers.logits, reference.logits),
                }
            )
            on_step(len(rows), float("nan"))

        for model, state in states.items():
            add(model, bench.answers(state, options=first))
        add("fine-tuned", reference)
        for sparsity, region in regions.items():
            answers = bench.answers(bench.grafted(fine_tuned, region), options=first)
            add("grafted", answers, sparsity, len(region))
    single = len(config.seeds) == len(regions) == 1
    grafts: list[Json] = []
    for sparsity, region in regions.items():
        name = "graft" if single else f"graft-seed-{bench.seed}-sparsity-{sparsity}"
        path = Path(config.out) / f"{name}.safetensors"
        bench.graft(fine_tuned, region, sparsity).save(path)
        grafts.append({"seed": bench.seed, "sparsity": sparsity, "file": path.name, "bytes": path.stat().st_size})
    where = [
        {"seed": bench.seed, "sparsity": sparsity, **_distributions(region, bench)}
        for sparsity, region in regions.items()
    ]
    return {"rows": rows, "regions": where, "grafts": grafts}


def _distributions(region: Region, bench: SingleTask) -> Json:
    return {
        "layers": distribution(region, bench.space, layer_of),
        "kinds": distribution(region, bench.space, kind_of),
    }


def _load_base(config: GraftConfig, bench: SingleTask) -> Graft | None:
    """The graft whose region is γ_base, if there is one.

    Raises:
        UsageError: it belongs to another model.
    """
    if config.base_file is None:
        return None
    graft = Graft.load(find_graft(config.base_file))
    assert graft.space is not None  # of every file
    space = body_space(bench.model.backbone, bench.space)
    if graft.space.layout_hash != space.layout_hash:
        ours, theirs = ([(t.name, t.shape) for t in each.tensors] for each in (space, graft.space))
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        expected, got = (each[at] if at < len(each) else "no further tensor" for each in (ours, theirs))
        raise UsageError(
            f"The graft {str(config.base_file)!r} is of another parameter space than {config.model!r} has: expected "
            f"{expected}, got {got}. Give a graft of this model to --base, or its model to --model."
        )
    return graft


def _check_readout(readout: str, directory: str) -> None:
    """Raise ``UsageError`` if a readout is asked for that the fine-tuned model does not have."""
    kind = readout_of(directory)
    if readout not in ("auto", kind):
        how = "its own head" if kind == "classifier" else f"--readout {kind}"
        raise UsageError(
            f"--readout {readout} does not suit {directory!r}, which is read by {how}. Leave --readout out."
        )


def _described(config: GraftConfig, checked: CheckedGraft, subject: _Subject) -> Json:
    """What results.json says of task, model and data, before any result."""
    bench, given = subject.bench, subject.given
    return {
        "schema": SCHEMA,
        "task": bench.task.name,
        "evaluated_on": checked.common.evaluate_on,
        "model": {
            "name": config.model,
            "fingerprint": bench.loaded.fingerprint,
            "readout": bench.loaded.readout,
            "parameters": sum(parameter.numel() for parameter in bench.model.backbone.parameters()),
            "graftable": len(bench.space),
        },
        "data": {
            "shots": config.shots,
            "steps": config.steps,
            "fingerprint": bench.task.fingerprint,
            "test_rows": len(bench.task.test),
        },
        "metric": bench.task.definition.metric,
        "floors": {"constant": constant_score(bench.task.test.labels.numpy(), bench.task.definition.metric)},
        "base": checked.options[0].base if config.base_file is None else config.base_file.name,
        "fine_tuned": given
        and {"architecture": given.architecture, "fingerprint": given.fingerprint, "left_out": list(given.left_out)},
        "space": _distributions(Region(torch.arange(len(bench.space))), bench),
        "rows": [],
        "regions": [],
        "grafts": [],
        "seconds": {},
    }


def _environment(config: GraftConfig, checked: CheckedGraft, subject: _Subject, device: str) -> Json:
    """What config.json says."""
    bench, given = subject.bench, subject.given
    task = bench.task
    return {
        "schema": SCHEMA,
        "graft": config.section(),
        "options": [asdict(options) for options in checked.options],
        **environment(device),
        "model": {
            "name": config.section()["model"],
            "readout": bench.loaded.readout,
            "fingerprint": bench.loaded.fingerprint,
            "max_length": bench.loaded.max_length,
        },
        "fine_tuned": given and {"architecture": given.architecture, "fingerprint": given.fingerprint},
        "task": task.definition.fields,
        "data": {
            "fingerprint": task.fingerprint,
            "train": len(task.train),
            "validation": len(task.validation),
            "test": len(task.test),
        },
    }


__all__ = ["GraftConfig", "run_graft"]
