"""A run that is ready: what the command line and calls from Python have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub, reach_hub
from forgetfree.deferred import deferred
from forgetfree.display import stderr, tell
from forgetfree.errors import UsageError
from forgetfree.jobs.config import BESIDE_ON, Execution, InMemory, RunConfig, prepared
from forgetfree.recipes import MODELS

if TYPE_CHECKING:
    from forgetfree.jobs.stream_loading import StreamLoader

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A run that is checked and ready.

    Attributes:
        config: what is asked for.
        train: trains what is missing, and returns the content of results.json.
        announcement: what is said before, a line each.
        loader: loads the stream; none: that of the run.
    """

    config: RunConfig
    train: Callable[[Execution], Json]
    announcement: tuple[str, ...]
    loader: StreamLoader | None = None

    @classmethod
    def of_config(cls, config: RunConfig, announcement: str) -> Job:
        """Return a run of its own.

        Raises:
            UsageError: naming every fault.
        """
        from forgetfree.jobs.run import run
        from forgetfree.jobs.stream_loading import StreamLoader

        config = prepared(config)
        loader = StreamLoader(config)
        return cls(config, partial(run, config, loader=loader), (announcement, recipe_of(config)), loader)

    @classmethod
    def on_run(
        cls,
        run: Path | None,
        without: str | None,
        stream: str,
        out: Path,
        options: Json,
        objects: InMemory | None = None,
    ) -> Job:
        """Return a run on top of a finished one.

        Args:
            run: that is finished.
            without: a task of it that is taken away.
            stream: the tasks that are learned on top of it, joined by commas.
            out: directory to write.
            options: what else is asked for, by the names that files have for it.
            objects: what is given in the place of names.

        Raises:
            UsageError: there is no run, an option is that run's own, or what is asked for cannot be done.
        """
        from forgetfree.jobs.revision import revise
        from forgetfree.jobs.run import run as train

        if run is None:
            raise UsageError("--without TASK needs the run that learned the task. Give it by --on RUN.")
        if wrong := [name for name in options if name not in BESIDE_ON]:
            raise UsageError(
                f"{wrong[0]} cannot be given with --on: a run goes on with its own options, so that it equals one that had all "
                "tasks from the start. Leave it out, or run the whole stream."
            )
        tasks = [name.strip() for name in stream.split(",") if name.strip()]
        revision = revise(run, tasks, without, out, options, objects)
        return cls(revision.config, partial(train, revision.config, revision=revision), (f"{revision}, into {out}",))

    def announced(self, execution: Execution, *, watched: bool) -> Execution:
        """Return how to `train`, if it is watched with the progress shown."""
        from forgetfree.jobs.directory import resumption
        from forgetfree.jobs.progress import make_progress

        config, out = self.config, Path(self.config.out)
        if watched:
            for line in self.announcement:
                tell(line)
            execution = replace(execution, progress=make_progress(stderr()))
        if needs_hub(config.model, config.data):
            if config.objects.model is None:
                from forgetfree.models.location import locate

                locate(config.model)  # before data are downloaded
            go_offline_if_cut_off()
        if watched and execution.resume:
            tell(resumption(out))
        return execution


def plan(config: RunConfig, *, resume: bool = False) -> Json:
    """Return what a run would do, as `forgetfree.jobs.preflight` says; nothing is written.

    Args:
        config: of the run.
        resume: whether it goes on in its directory.

    Raises:
        UsageError: naming all that is wrong.
        RunError: it cannot go on in its directory.
    """
    reach_hub(config.model)
    with deferred():
        from forgetfree.jobs.preflight import plan_of

    if resume:
        from forgetfree.jobs.run import check_resumption

        with redirect_stderr(StringIO()):  # the plan has the same notes
            check_resumption(prepared(config), Execution(resume=True))
    return plan_of(config, resume=resume)


def recipe_of(config: RunConfig) -> str:
    """Say what the model of a run brings; an empty text where it brings nothing, and the optimizer is set."""
    if chosen := {key: value for key, value in config.recipe().items() if _is_an_option(key)}:
        options = " ".join(f"{key}={value}" for key, value in chosen.items())
        return f"Recipe of {config.model}: {options} (--set changes any of them)"
    if config.model in MODELS and MODELS[config.model].recipe:
        return (
            f"note: the optimizer that is set drops the recipe of {config.model}; the defaults are used in its place."
        )
    trains = config.fine_tuned is None
    if trains and not any(key.rpartition(".")[2] == "optimizer" for key in config.set):
        return (
            f"No recipe for {config.model}: the paper's options train it, by SGD (--set optimizer=adamw, with a learning rate "
            "such as 1e-4, often needs fewer steps)"
        )
    return ""


def _is_an_option(key: str) -> bool:
    """Say whether a strategy has its option of a recipe, where the key names one of ours."""
    strategy, _, name = key.rpartition(".")
    return strategy not in registry.STRATEGIES or name in registry.strategy(strategy).Options.__dataclass_fields__
