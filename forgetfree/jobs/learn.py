"""One unit of a run: one strategy learns the stream from its first task to its last with one seed, and answers after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.errors import RunError
from forgetfree.files import write_json
from forgetfree.jobs.diagnostics import (
    floors,
    loss_before,
    losses_after,
    right_rows,
    write_floors,
)
from forgetfree.jobs.ledger_summary import ledger_summary
from forgetfree.jobs.predictions import save_predictions
from forgetfree.jobs.stream_checkpoint import LearnedStream, StreamCheckpoint
from forgetfree.jobs.stream_loading import Row, StreamLoader
from forgetfree.json_file import read_json
from forgetfree.options import recorded
from forgetfree.results.answers import Answers
from forgetfree.results.scores import SCORES_FILE, Score, write_scores
from forgetfree.results.unit_folder import MODELS, SECONDS_PER_TASK, size_and_sha256
from forgetfree.serve.source import bound_of
from forgetfree.training.monitor import Monitor, seconds_by_phase

if TYPE_CHECKING:
    from forgetfree.jobs.stream_prefix import StreamPrefix

Json = dict[str, Any]


def learn(
    loader: StreamLoader,
    key: Mapping[str, Any],
    directory: Path,
    monitor: Monitor,
    carried: StreamPrefix | None = None,
) -> Json:
    """Let one strategy learn the stream; write scores, answers, and what it keeps.

    Args:
        loader: of the run's tasks and model.
        key: ``strategy`` and ``seed``.
        directory: of the unit.
        monitor: is told of it; has the unit's checkpoint.
        carried: what a finished run has of the unit, where this one stands on top of it.

    Returns:
        What results.json needs beside the files.
    """
    from forgetfree.continual.evaluation import StreamAnswers

    name, seed, config = key["strategy"], key["seed"], loader.config
    stream, texts = loader.stream(seed), loader.held_out_texts(seed)
    loss_of_texts = texts and loss_before(stream, texts, config.options[name], loader.device)
    bound = _bound(loader, key)
    table, checkpoint = _ScoreTable(key, directory, loader, monitor, carried), monitor.checkpoint()
    try:
        strategy = loader.strategy(name, seed, monitor)
        unlearned = loader.answers_unlearned(strategy.model)
        answers = StreamAnswers(strategy, upper_triangle=unlearned)
        learned = LearnedStream(strategy, [], answers.broken)
        kept = StreamCheckpoint(checkpoint, name, learned, answers)
        if carried:
            carried.hand_over(strategy, directory)
        done = kept.restore()
        if new := not learned.rows:
            if carried and carried.tasks:
                done = carried.put_into(learned, answers, directory, unlearned)
                kept.learn(done)
            else:
                learned.rows.append(loader.before_training(name, answers))
        for count in range(1, len(learned.rows) + 1):
            table.write(learned.rows[:count])
        if new:
            kept.answer(*range(len(learned.rows)))
        for number, experience in enumerate(stream.benchmark.train_stream, 1):
            if number > done:
                begin = checkpoint.clock()
                strategy.train(experience)
                learned.seconds.append(round(checkpoint.clock() - begin, 3))
                kept.learn(number)
            if number >= done:
                strategy.save(directory)
            if number == len(learned.rows):
                learned.rows.append(answers.after(stream.task_of(experience)))
                learned.kept_bytes.append(strategy.bytes_kept())
                table.write(learned.rows)
                kept.answer(number)
    except Exception:
        _write_floors(loader, key, directory)
        raise
    _write_floors(loader, key, directory)  # after learning, whose losses are awaited
    last = learned.rows[-1]
    by_task: Json = {"updates": {task.name: strategy.updates[task.name] for task in stream.tasks}}
    by_task["updates"] |= carried.updates if carried else {}
    by_task |= right_rows(stream.tasks, last)
    aside = texts and {"before": loss_of_texts, **losses_after(strategy, texts), **texts.counts}
    save_predictions(directory, last, (carried.texts_before if carried else {}) | _texts_before(learned.rows[0]))
    write_json(directory / SECONDS_PER_TASK, learned.seconds)
    return {
        "options": recorded(strategy.options),
        "ledger": ledger_summary(strategy.ledger),
        "kept_bytes": learned.kept_bytes,
        "by_task": by_task,
        **({"held_aside": aside} if aside else {}),
        "bound": bound,
        **models_of(directory, loader.store),
        "extra": strategy.extra_results() | ({"broken_claims": learned.broken} if learned.broken else {}),
        "seconds": seconds_by_phase(strategy.seconds),
    }


class _ScoreTable:
    """Writes scores.csv, whenever a task was learned."""

    def __init__(
        self,
        key: Mapping[str, Any],
        directory: Path,
        loader: StreamLoader,
        monitor: Monitor,
        carried: StreamPrefix | None,
    ) -> None:
        self._unit, self._path, self._monitor = (key["strategy"], key["seed"]), directory / SCORES_FILE, monitor
        self._tasks = loader.stream(key["seed"]).tasks
        before = carried.scores if carried else []
        self._scores = [score for score in before if carried and score.after < len(carried.tasks)]
        self._known: dict[int, list[tuple[str, float]]] = {}  # most answers stay the same objects from row to row

    def write(self, rows: list[Row]) -> None:
        """Write the scores of the last row beside those of the others."""
        more = [
            Score(*self._unit, task.name, len(rows) - 1, metric, value, len(task.test))
            for task in self._tasks
            if task.name in rows[-1]
            for metric, value in self._measured(rows[-1][task.name], task.definition.metric)
        ]
        self._scores = sorted([*self._scores, *more], key=lambda score: score.after)
        write_scores(self._path, self._scores)
        self._monitor.log_scores(more)

    def _measured(self, answers: Answers, metric: str) -> list[tuple[str, float]]:
        if id(answers) not in self._known:
            self._known[id(answers)] = [(metric, answers.score(metric)), *answers.more_scores().items()]
        return self._known[id(answers)]


def _texts_before(row: Row) -> dict[str, Sequence[str]]:
    """Return the texts before training, by task, of the rows that a report shows."""
    return {task: texts for task, each in row.items() if (texts := each.shown_texts())}


def _bound(loader: StreamLoader, key: Mapping[str, Any]) -> Json:
    """Return what the answers of a unit depend on besides what its strategy keeps."""
    stream, options = loader.stream(key["seed"]), loader.config.options[key["strategy"]]
    binding = stream.loaded.binding(options.answering["precision"])
    definitions = (task.definition for task in stream.tasks)
    return bound_of(definitions, binding, stream.loaded.fingerprint, stream.scenario == "class")


def _write_floors(loader: StreamLoader, key: Mapping[str, Any], directory: Path) -> None:
    """Measure the scores of a seed that take no fine-tuning: they are the same for all strategies, and the first one does."""
    config, common = loader.config, loader.config.common
    if key["strategy"] != config.strategy_names[0] or common.floors == "constant":
        return
    probe = loader.device if common.floors == "probe" else None
    stream = loader.stream(key["seed"])
    write_floors(directory, floors(stream, loader.tasks, config.shots, common.or_fewer, common.test_limit, probe))


def models_of(directory: Path, store: Path) -> Json:
    """Return under `MODELS` size and SHA-256 of the fine-tuned models that a unit's fine-tuned.json names in the store."""
    try:
        keys = read_json(directory / "fine-tuned.json", RunError, "")
    except RunError:
        return {}
    files = [store / f"{key}.safetensors" for key in keys.values()]
    return {MODELS: {path.name: size_and_sha256(path) for path in files if path.is_file()}}
