"""Damaged directories of runs and grafts, read by all their readers: no damage may be wrongly taken.

One file is damaged at a time. A reader of the directory may refuse it in one paragraph, give the same output as before, or
report that it leaves something out. The file is wrongly taken if a reader gives other output without a message. A traceback,
a long wait and much memory are faults, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pictures
import tiny
from fuzz.mutations import BYTES, JSON, SIGNED, Mutation

from forgetfree import cli
from forgetfree.errors import ForgetfreeError
from forgetfree.jobs import checkpoints
from forgetfree.jobs.history import History
from forgetfree.results.table import load_results

TASKS = ("sst2", "qnli")
STRATEGIES = ("grafting-continual", "packnet", "lora", "fine-tune", "continual-ft")
TEXTS = {"sst2": "a good film", "qnli": "who is there\tit is a good film"}
#: Files that no command reads.
_LEFT_OUT = ("report.md", "report.html", ".gitignore")
#: Files that a page with figures reads.
_FIGURED = ["config.json", "results.json", "unit.json", "outcome.json", "predictions.safetensors", "history.jsonl"]
#: The longest time of one reader in seconds, and the most memory that it may add in kilobytes.
PATIENCE, ROOM = 60, 2**20
#: The output of a reader, and its messages.
Given = tuple[str, str]
Reader = Callable[[Path], Given]


# -- The world -------------------------------------------------------------------------------------------


@dataclass
class World:
    """The directories written by the commands.

    Attributes:
        root: a folder for each command, one for the model and one for the data.
        words: the command line of each folder, without ``--out``.
    """

    root: Path
    words: dict[str, list[str]] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """Return the files that may be damaged, relative to the root."""
        found = (path for name in self.words for path in sorted((self.root / name).rglob("*")) if path.is_file())
        return [path.relative_to(self.root) for path in found if path.name not in _LEFT_OUT]


def make_world(root: Path) -> World:
    """Run tiny models: five strategies with two seeds, three with more steps, unknown tasks, a run cut short, and a graft."""
    root.mkdir(exist_ok=True)
    world = World(root)
    tiny.write_model("bert", root / "model")
    tiny.write_data(root / "data", train=24, validation=12, test=12)
    common = ["--model", str(root / "model"), "--data", str(root / "data"), "--shots", "4", "--readout", "linear"]
    common += ["--set", "mask_steps=1", "--steps", "2"]
    stream, one = ["run", ",".join(TASKS), *common, "--sparsity", "0.01"], ["--strategy", "grafting-continual"]
    seeds, several = ["--seed", "0", "--seed", "1"], [word for name in STRATEGIES for word in ("--strategy", name)]
    world.words = {
        "run": [*stream, *several, *seeds],
        "other": [*stream, "--steps", "3", *one, "--strategy", "lora", "--strategy", "fine-tune"],
        "untold": [*stream, *one, "--set", "scenario=class", "--set", "task_inference=lda"],
        "cut": [*stream, *one, "--strategy", "continual-ft"],
        "graft": ["graft", "sst2", *common, "--sparsity", "0.01", *seeds],
    }
    world.words["other"] = tiny.last_of_each(world.words["other"], "--steps")
    with plain_figures():
        for name, words in world.words.items():
            with cut_short() if name == "cut" else redirect_stderr(io.StringIO()):
                code, _, said = called([*words, "--out", str(root / name)])
            assert code == (1 if name == "cut" else 0), said
    (root / "cut" / "results.json").unlink()
    return world


@contextmanager
def cut_short() -> Iterator[None]:
    """Interrupt a run during the second unit's second task, with checkpoints."""
    before, log_step, count = (checkpoints.INTERVAL, checkpoints.SHARE), History.log_step, 0

    def counting(self: Any, *told: Any) -> None:
        nonlocal count
        log_step(self, *told)
        count += self._path.parts[-3] == "continual-ft" and told[0] == TASKS[1]
        if count == 1:
            count += 1
            raise KeyboardInterrupt

    checkpoints.INTERVAL, checkpoints.SHARE = 0.0, float("inf")
    History.log_step = counting  # type: ignore[method-assign]
    try:
        yield
    finally:
        (checkpoints.INTERVAL, checkpoints.SHARE), History.log_step = before, log_step  # type: ignore[method-assign]


@contextmanager
def plain_figures() -> Iterator[None]:
    """Let pages show a hash of each figure's data in place of the figure, which takes long."""

    def drawn(figure: Any) -> str:
        held = [
            [line.get_xydata().tolist() for line in ax.lines]
            + [patch.get_window_extent().bounds for patch in ax.patches]
            + [image.get_array().tolist() for image in ax.images]
            for ax in figure.axes
        ]
        return f'<svg viewBox="0 0 252 180"><text>{hashlib.sha256(repr(held).encode()).hexdigest()}</text></svg>'

    before = pictures.make(drawn)
    try:
        yield
    finally:
        pictures.make(before)


# -- Readers ---------------------------------------------------------------------------------------------


def called(words: Sequence[str]) -> tuple[int, str, str]:
    """Call the command line; return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(list(words))
    return int(code), out.getvalue(), err.getvalue()


class Refused(Exception):
    """The error of a reader, with its text."""


def _command(*words: str) -> Given:
    code, given, said = called(words)
    if code:
        raise Refused(said)
    return given, said


def _loaded(path: Path, *more: Callable[[Any], Any]) -> Given:
    try:
        results = load_results(path)
        parts = [results.scores, *(each(results) for each in more)]
    except ForgetfreeError as error:
        raise Refused(f"forgetfree: error: {error}\n") from error
    with pd.option_context("display.max_rows", None, "display.max_columns", None, "display.precision", 12):
        return "\n".join(map(str, parts)), ""


def _exported(words: Sequence[str], out: Path) -> Given:
    shutil.rmtree(out, ignore_errors=True)
    try:
        given, said = _command(*words, "--out", str(out))
        files = sorted(path for path in out.rglob("*") if path.is_file())
        return f"{given}{[(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]}", said
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _resumed(words: Sequence[str], run: Path) -> Given:
    """Resume a copy of the run; return its results without seconds."""
    copy = run.with_name(f"{run.name}-resumed")
    shutil.copytree(run, copy)
    try:
        _, said = _command(*words, "--resume", "--out", str(copy))
        held = {path.relative_to(copy): json.loads(path.read_text()) for path in copy.rglob("results.json")}
        given = json.dumps({str(name): _timeless(value) for name, value in sorted(held.items())})
        scores = {path.relative_to(copy): path.read_text() for path in copy.rglob("scores.csv")}
        return f"{given}\n{sorted(scores.items())}", said.replace(copy.name, run.name)
    finally:
        shutil.rmtree(copy)


def _timeless(value: Any) -> Any:
    apart = ("seconds", "seconds_per_task")
    if isinstance(value, dict):
        return {key: _timeless(each) for key, each in value.items() if key not in apart}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def readers(world: World, file: Path, rng: random.Random) -> dict[str, Reader]:
    """Return the readers of the folder that contains a file, by name."""
    folder, within = file.parts[0], file.parts[1:]
    out, seed, task = world.root / "exported", 0, rng.choice(TASKS)
    strategies = [name for name in STRATEGIES if name in world.words[folder]] or ["grafting-continual"]
    strategy = within[0] if within[0] in strategies else rng.choice(strategies)
    if within[0] == "fine-tuned":
        strategy = "fine-tune" if "fine-tune" in strategies else strategy
    if found := re.search(r"seed-(\d)/", file.as_posix()):
        seed = int(found[1])
    elif folder == "run" and within[0] == "fine-tuned":
        seed, task = _seed_and_task_of(world.root / folder, within[1])

    if folder == "cut":
        return {
            "load_results cut": lambda root: _loaded(root / folder),
            "resume cut": lambda root: _resumed(world.words[folder], root / folder),
        }
    if folder == "graft":
        return _of_graft(world, file, seed, out)
    found = _of_run(folder, strategy, seed, task, out)
    if folder == "run" and file.name not in _FIGURED:
        del found["page of run"]  # the page has ten strategies and seeds, and takes as long as all other readers
    return found


def _reports(name: str) -> dict[str, Reader]:
    return {
        f"report {name}": lambda root: _command("report", str(root / name), "--format", "json"),
        f"page of {name}": lambda root: _command("report", str(root / name), "--format", "html"),
    }


def _of_run(run: str, strategy: str, seed: int, task: str, out: Path) -> dict[str, Reader]:
    which, unit = ["--strategy", strategy, "--seed", str(seed)], f"{run} {strategy} {seed}"
    more: list[Callable[[Any], Any]] = [lambda results: results.matrix(strategy, seed).to_numpy().tolist()]
    more += [_ledger(strategy, seed)] if _has_ledger(strategy) else []
    found: dict[str, Reader] = {
        **_reports(run),
        f"load_results {unit}": lambda root: _loaded(root / run, *more),
        f"export {task} of {unit}": lambda root: _exported(["export", str(root / run), "--task", task, *which], out),
    }
    words = ["--task", task if run != "untold" else "auto", *which, "--json", TEXTS[task]]
    found[f"predict {task} by {unit}"] = lambda root: _command("predict", str(root / run), *words)
    if _has_ledger(strategy):
        path = f"{run}/{strategy}/seed-{seed}/ledger.safetensors"
        found[f"verify {unit}"] = lambda root: _command("ledger", "verify", str(root / path), "--json")
        found[f"show {unit}"] = lambda root: _command("ledger", "show", str(root / path), "--json")
    return found


def _of_graft(world: World, file: Path, seed: int, out: Path) -> dict[str, Reader]:
    place, found = f"graft/bare-graft/seed-{seed}/graft.safetensors", _reports("graft")
    found[f"load_results graft {seed}"] = lambda root: _loaded(root / "graft", lambda results: _graft(results, seed))
    found[f"apply {place}"] = lambda root: _exported(["apply", str(root / place)], out)
    if file.name == "config.json" or "fine-tuned" in file.parts or any(part.startswith("seed-") for part in file.parts):
        found["resume graft"] = lambda root: _resumed(world.words["graft"], root / "graft")
    return found


def _has_ledger(strategy: str) -> bool:
    return strategy in ("grafting-continual", "packnet")


def _ledger(strategy: str, seed: int) -> Callable[[Any], str]:
    def shown(results: Any) -> str:
        ledger = results.ledger(strategy, seed)
        return repr([(r.task, r.region.indices.tolist(), r.owned.values.tolist()) for r in ledger.records])

    return shown


def _graft(results: Any, seed: int) -> str:
    graft = results.graft(seed)
    return repr((graft.region.indices.tolist(), graft.values.tolist(), str(graft.origin)))


def _seed_and_task_of(run: Path, name: str) -> tuple[int, str]:
    """Return the seed and the task of a fine-tuned model."""
    for path in run.glob("fine-tune/seed-*/fine-tuned.json"):
        for task, key in json.loads(path.read_text()).items():
            if key == Path(name).stem:
                return int(path.parent.name.removeprefix("seed-")), task
    return 0, TASKS[0]


# -- Damage ----------------------------------------------------------------------------------------------


def change_cell(data: bytes, rng: random.Random) -> bytes:
    """Replace a cell of a table, or exchange two cells of a column."""
    lines = [line.split(",") for line in data.decode().splitlines()]
    row, column = rng.randrange(len(lines)), rng.randrange(len(lines[0]))
    if rng.random() < 0.5:
        other = rng.randrange(len(lines))
        lines[row][column], lines[other][column] = lines[other][column], lines[row][column]
    else:
        lines[row][column] = rng.choice(["", "x", "-1", "0", "1", "0.5", "nan", "1e999", "9" * 400, '"', "=1+1"])
    return "\n".join(map(",".join, lines)).encode() + b"\n"


def change_row(data: bytes, rng: random.Random) -> bytes:
    """Drop, double or exchange a line."""
    lines = data.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    what = rng.randrange(3)
    if what == 0:
        del lines[one]
    elif what == 1:
        lines.insert(other, lines[one])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


LINES: dict[str, Mutation] = {"row": change_row}
_BY_SUFFIX: Mapping[str, Mapping[str, Mutation]] = {
    ".json": JSON,
    ".safetensors": SIGNED,
    ".csv": {"cell": change_cell, **LINES},
    ".jsonl": LINES,
}


def damaged(world: World, file: Path, rng: random.Random) -> tuple[str, bytes]:
    """Return the name of the damage and the damaged bytes: any damage, one for the file's format, or another unit's file."""
    data = (world.root / file).read_bytes()
    # A checkpoint of an unfinished unit is trusted by its own checksum: a new checksum would make it a different checkpoint.
    own = {} if ".checkpoint" in file.parts and file.suffix == ".safetensors" else dict(_BY_SUFFIX.get(file.suffix, {}))
    likes = [other for other in world.files if _kind(other) == _kind(file) and other != file]
    families = {**BYTES, **own} if data else {"insert": BYTES["insert"]}
    own = own if data else {}
    name = rng.choice([*families, *([*own] * 2), *(["another's"] * 3 if likes else [])])
    if name == "another's":
        other = rng.choice(likes)
        return f"that of {other}", (world.root / other).read_bytes()
    return name, families[name](data, rng)


def _kind(file: Path) -> str:
    """Return the kind of a file, independent of its unit."""
    if "fine-tuned" in file.parts:
        return f"fine-tuned/*{file.suffix}"
    within = "checkpoint/" if "checkpoint" in file.parts[:-1] else ""
    return within + re.sub(r"\d+", "N", file.name)


def kinds(world: World) -> dict[str, list[Path]]:
    """Return the files by kind; those of a run, a graft and an interrupted run separately."""
    found: dict[str, list[Path]] = {}
    for file in world.files:
        root = {"graft": "graft", "cut": "cut"}.get(file.parts[0], "run")
        found.setdefault(f"{root}: {_kind(file)}", []).append(file)
    return found


# -- Judging ---------------------------------------------------------------------------------------------


class Late(BaseException):
    """A reader took too long."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise `Late` if the block takes too long, and ``AssertionError`` if it takes too much memory."""

    def late(*_: Any) -> None:
        raise Late

    before, peak = signal.signal(signal.SIGALRM, late), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert more < ROOM, f"it took {more // 1024} MB more"


def outcome(read: Reader, root: Path) -> tuple[str, Given]:
    """Return the outcome of a reader, ``given``, ``refused`` or ``fault``, and its output or its error."""
    try:
        with limited():
            return "given", read(root)
    except Refused as refusal:
        said = str(refusal)
        errors = [line for line in said.splitlines() if line.startswith("forgetfree: error:")]
        whole = (
            len(errors) == 1
            and "fault of forgetfree" not in said
            and "Traceback" not in said
            and "It stopped with" not in said
        )
        return ("refused" if whole else "fault"), ("", said)
    except Late:
        return "fault", ("", f"it took more than {PATIENCE} s")
    except Exception as error:
        import traceback

        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        return "fault", ("", f"{type(error).__name__}: {error} ({Path(ours[-1].filename).name}:{ours[-1].lineno})")


@dataclass(frozen=True)
class Verdict:
    """The outcome of one damaged file.

    Attributes:
        outcome: ``refused`` by at least one reader, ``told`` that something was left out, ``same`` output from all readers,
            ``wrongly taken`` or ``fault``.
        file: the damaged file.
        damage: the name of the damage.
        reader: the reader that took it wrongly, or failed.
        why: the difference, or the error.
    """

    outcome: str
    file: Path
    damage: str
    reader: str = ""
    why: str = ""


class Fuzz:
    """Damages files of a world, one at a time, and judges the outcomes of its readers.

    Args:
        world: the directories with the files.
    """

    def __init__(self, world: World) -> None:
        self.world, self.kinds = world, kinds(world)
        self._expected: dict[str, Given] = {}

    def judge(self, seed: int) -> Verdict:
        """Damage one file, drawn by ``seed``, run its readers, and restore it."""
        rng = random.Random(seed)
        file = rng.choice(self.kinds[sorted(self.kinds)[seed % len(self.kinds)]])
        damage, content = damaged(self.world, file, rng)
        path = self.world.root / file
        original, worst, read_by = path.read_bytes(), Verdict("same", file, damage), readers(self.world, file, rng)
        if content == original:
            return worst
        for name, read in read_by.items():
            if name not in self._expected:
                how, given = outcome(read, self.world.root)
                assert how == "given", f"{name}: {given}"
                self._expected[name] = given
        path.write_bytes(content)
        try:
            for name, read in read_by.items():
                how, given = outcome(read, self.world.root)
                verdict, why = _judged(file, how, given, self._expected[name])
                if _RANK.index(verdict) > _RANK.index(worst.outcome):
                    worst = Verdict(verdict, file, damage, name, why)
                if verdict in ("fault", "wrongly taken"):
                    break
        finally:
            path.write_bytes(original)
        return worst


#: Outcomes from good to bad.
_RANK = ("same", "told", "refused", "wrongly taken", "fault")


def _judged(file: Path, how: str, given: Given, expected: Given) -> tuple[str, str]:
    """Return the verdict on an outcome, and the difference."""
    if how != "given":
        return how, given[1]
    if given[0] == expected[0]:
        return "same", ""
    whole, before = "".join(given), "".join(expected)
    unit = "/".join(file.parts[-3:-1])
    if any(whole.count(word) > before.count(word) for word in (file.name, unit)) or (given[1] and not expected[1]):
        return "told", ""
    place = next(
        (i for i, (one, other) in enumerate(zip(given[0], expected[0], strict=False)) if one != other),
        min(len(given[0]), len(expected[0])),
    )
    start = max(0, place - 60)
    return "wrongly taken", f"…{expected[0][start : place + 60]!r} became …{given[0][start : place + 60]!r}"
