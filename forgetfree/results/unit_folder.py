"""The folder of a unit: unit.json, which says size and SHA-256 of each file beside it, and what of these figures show.

Every reader of a file compares it with unit.json. What is not there, or not sound, is left out of figures.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, MetricError, ReportError, RunError, first_line
from forgetfree.files import sha256, size_of
from forgetfree.json_file import check, check_fields, check_signature, parse_json, read_bounded, read_json
from forgetfree.results.answers import LabelAnswers, WrittenTexts
from forgetfree.results.run_results import Run
from forgetfree.tasks import KIND_OF_FORM

if TYPE_CHECKING:
    import numpy.typing as npt

Json = dict[str, Any]
RECORD, CONFIG = "unit.json", "config.json"
#: The losses of a unit.
HISTORY = "history.jsonl"
#: What tells tasks apart, of a unit that does so by features.
FEATURES = "task-features.safetensors"
#: In the file of answers: the texts before training of the rows that a report shows.
BEFORE = "before"
#: How long each task took to learn.
SECONDS_PER_TASK = "seconds-per-task.json"
#: In results.json: the checksums of config.json and of the units.
MADE_OF = "made_of"
#: In the details of a unit: size and SHA-256 of the models that it answers with, where they lie outside its folder.
MODELS = "models"
_REMEDY = "Restore it from a copy, or run the stream again."
_ADVICE = "Restore it from a copy, or go on with --resume, which makes it again."


# ---- unit.json ------------------------------------------------------------------------------------------


def size_and_sha256(path: Path) -> Json:
    """Return size and SHA-256 of a file."""
    return {"bytes": size_of(path), "sha256": sha256(path)}


def read_record(directory: Path, error: type[ForgetfreeError] = RunError, remedy: str = _REMEDY) -> Json:
    """Return the unit.json of a folder.

    Raises:
        ForgetfreeError: ``error``: it is missing or damaged.
    """
    record: Json = read_json(directory / RECORD, error, remedy, _check_record)
    return record


def signatures(directory: Path, units: Iterable[str]) -> Json:
    """Return what results say that they are made of: config.json and each unit.json that is there, with its checksum."""
    checksums = {path: _signature(directory / path) for path in (CONFIG, *(f"{unit}/{RECORD}" for unit in units))}
    return {MADE_OF: {path: checksum for path, checksum in checksums.items() if checksum}}


def check_made_of(directory: Path, made: Any) -> None:
    """Check that results are those of config.json and the units beside them, as far as these are there and sound.

    Args:
        directory: of the results.
        made: what `signatures` returned under `MADE_OF`; nothing where an older version wrote the results.

    Raises:
        ReportError: they are those of others.
    """
    for path, checksum in made.items() if isinstance(made, dict) else ():
        if _signature(directory / path) not in (None, checksum):
            raise ReportError(
                f"{directory / 'results.json'} is not made of the {path} beside it, but of another. Restore both from one "
                "copy, or go on with --resume, which makes results.json again."
            )


def _signature(path: Path) -> str | None:
    """Return the checksum that a file says; ``None`` where it is missing or damaged, or says none."""
    try:
        return str(read_json(path, RunError, "", check_signature)["checksum"])
    except (RunError, LookupError, TypeError):
        return None


def check_own(path: Path, error: type[ForgetfreeError] = RunError, unit: Path | None = None) -> None:
    """Check that a file is the one that the unit made in whose folder it lies.

    A file passes where no unit.json lies beside it: its unit has not ended, or somebody took it out of its run. A graft beside
    the results of ``graft`` is compared with these.

    Args:
        path: the file.
        error: the error to raise.
        unit: the folder of the unit, if the file lies elsewhere: a fine-tuned model, which several units may use.

    Raises:
        ForgetfreeError: ``error``: the file is of another seed or run, has changed since, or nothing can be compared because
            unit.json is damaged or another unit's.
    """
    record, expected = _expected(path, error, unit)
    if record is None:
        return
    try:
        got = size_and_sha256(path) if isinstance(expected, dict) and expected.get("bytes") == size_of(path) else None
        if got is None or got != expected:
            got = got or {"bytes": size_of(path)}
            where = f"{record.name} beside it" if record.parent == path.absolute().parent else record
            raise error(
                f"{path} is not the file that its unit made: {where} expects {_in_words(expected)}, got "
                f"{_in_words(got)}. It is that of another seed or run, or has changed since. {_REMEDY}"
            )
    except OSError as fault:
        raise error(f"{path} cannot be read: {first_line(fault)}. {_REMEDY}") from fault


def _expected(path: Path, error: type[ForgetfreeError], unit: Path | None) -> tuple[Path | None, Any]:
    """Return which file says size and SHA-256 of another, and these; ``None`` where none does."""
    folder = unit or path.absolute().parent
    file, results = folder / RECORD, folder / "results.json"
    if not file.exists():
        grafts = _grafts(results)
        return (results, grafts[path.name]) if path.name in grafts else (None, None)
    record = read_record(folder, error)
    if differ := _other_unit(record["unit"], folder):
        raise error(f"{file} is another unit's: {differ}. {_REMEDY}")
    if unit is None:
        return file, record["files"].get(path.name)
    models = record.get("details", {}).get(MODELS, {})
    return (file, models[path.name]) if path.name in models else (None, None)


def _grafts(results: Path) -> Json:
    """Return size and SHA-256 of the grafts beside the results of ``graft``; nothing where there are none that are sound."""
    if not results.exists():
        return {}
    try:
        grafts = read_json(results, ReportError, "", signed=True)["grafts"]
        return {each["file"]: {key: each[key] for key in ("bytes", "sha256")} for each in grafts}
    except (ReportError, LookupError, TypeError):
        return {}


def is_own(path: Path) -> bool:
    """Say whether `check_own` lets a file pass."""
    try:
        check_own(path)
    except RunError:
        return False
    return True


def _other_unit(unit: Mapping[str, Any], folder: Path) -> str:
    """Say what of a unit's key is not that of its folder, STRATEGY/seed-S; nothing where the folder has another name."""
    if "seed" not in unit or not folder.name.startswith("seed-"):
        return ""
    places = {"seed": folder.name.removeprefix("seed-"), "strategy": folder.parent.name}
    differ = [key for key, place in places.items() if key in unit and str(unit[key]) != place]
    return f"expected the {differ[0]} {places[differ[0]]}, got {brief(unit[differ[0]])}" if differ else ""


def _in_words(file: Any) -> str:
    if not isinstance(file, dict):
        return "no such file"
    text = f"{file.get('bytes'):,} bytes"
    return f"{text} with the SHA-256 {str(file['sha256'])[:12]}" if "sha256" in file else text


def _check_record(record: Any) -> None:
    check_fields("", record, {"unit": dict, "files": dict, "checksum": str})
    check_signature(record)


# ---- what is shown beside the scores --------------------------------------------------------------------


@dataclass(frozen=True)
class UnitFiles:
    """What of a unit is shown beside its scores.

    Attributes:
        answers: the last ones on every task whose answers are probabilities; none where the file is missing or not sound.
        losses: the logged steps (``task``, ``phase``, ``step``, ``loss``); none where they are damaged.
        faults: by what is left out, why; nothing of what is not there.
        texts: the last ones on every task that is answered by texts.
        labels: by task, the names of the labels that its answers choose among, by their numbers; none where config.json does
            not say them, or words are labelled.
    """

    answers: Mapping[str, LabelAnswers]
    losses: Sequence[Json]
    faults: Mapping[str, str]
    texts: Mapping[str, WrittenTexts] = field(default_factory=dict)
    labels: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


def read_unit_files(run: Run, tasks: Sequence[str]) -> UnitFiles:
    """Read what lies in the folder of a run's unit; what is not sound is left out."""
    answers, texts, faults = dict[str, LabelAnswers](), dict[str, WrittenTexts](), dict[str, str]()
    try:
        answers, texts = _answers(run, tasks)
    except ReportError as error:
        faults["Answers"] = str(error)
    for what, name in (("Losses", HISTORY), ("Seconds per task", SECONDS_PER_TASK)):
        try:
            if (path := run.folder / name).exists():
                check_own(path, ReportError)
        except ReportError as error:
            faults[what] = str(error)
    losses = [] if "Losses" in faults else _losses(run.folder / HISTORY)
    labels, config = dict[str, dict[int, str]](), run.folder.parents[1] / CONFIG
    try:
        labels = _labels(config) if config.exists() else {}
    except (RunError, LookupError, TypeError, AttributeError) as error:
        faults["Names of labels"] = f"{config} does not say them: {type(error).__name__}, {first_line(error)}."
    return UnitFiles(answers, losses, faults, texts, labels)


def _labels(path: Path) -> dict[str, dict[int, str]]:
    """Return the names of the labels of each task whose rows have one, as its answers number them."""
    config = read_json(path, RunError, "", signed=True)
    tasks = [(each["name"], each["kind"], each.get("closed_answers") or each["labels"]) for each in config["tasks"]]
    named, first = dict[str, dict[int, str]](), 0
    for name, kind, labels in tasks:
        if KIND_OF_FORM.get(kind, kind) != "tagging" and labels:
            named[name] = dict(enumerate(labels, first))
        first += len(labels) if config.get("scenario") == "class" else 0  # of all tasks, each has its own numbers
    return named


def _answers(run: Run, tasks: Sequence[str]) -> tuple[dict[str, LabelAnswers], dict[str, WrittenTexts]]:
    """Return the last answers on every task that are probabilities, or texts; none where the file is missing.

    Raises:
        ReportError: it is not sound.
    """
    from safetensors import SafetensorError

    path = run.folder / "predictions.safetensors"
    if not path.exists():
        return {}, {}
    check_own(path, ReportError)
    try:
        arrays, answers, texts = _arrays(path), dict[str, LabelAnswers](), dict[str, WrittenTexts]()
        for task, expected in zip(tasks, run.ece[-1], strict=True):
            if (kept := arrays.get(f"{task}/texts")) is not None:
                texts[task] = WrittenTexts.of_array(kept, arrays.get(f"{task}/{BEFORE}"))
            if expected is None:  # its answers are no probabilities of labels, and no figure shows them
                continue
            answers[task] = LabelAnswers(arrays[f"{task}/logits"], arrays[f"{task}/labels"])
            right = math.isclose(ece := answers[task].ece, expected, abs_tol=1e-6)
            check(f"the ECE of {task!r}", ece, right, f"{expected}, as in the results")
    except KeyError as error:
        raise ReportError(f"{path} lacks the tensor {error}. {_ADVICE}") from error
    except (OSError, ValueError, TypeError, IndexError, SafetensorError, MetricError) as error:
        raise ReportError(f"{path} cannot be read: {first_line(error).rstrip('.')}. {_ADVICE}") from error
    return answers, texts


def _losses(path: Path) -> list[Json]:
    try:
        lines = read_bounded(path).splitlines()
        steps = [parse_json(line) for line in lines]
        named = all(isinstance(each["task"], str) and isinstance(each["phase"], str) for each in steps)
        sound = named and all(math.isfinite(each["loss"]) and each["step"] >= 0 for each in steps)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    return steps if sound else []


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read what `forgetfree.tensor_file.TensorFile` wrote, without torch; raise ``ValueError`` where it is another file."""
    from safetensors import safe_open

    size_of(path)
    with safe_open(path, "np") as file:
        header, arrays = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    digest = hashlib.sha256()
    for key, value in sorted(header.items()):
        if key != "checksum":
            digest.update(f"{key}={value}\n".encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} torch.{array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    if header.get("checksum") != digest.hexdigest():
        raise ValueError("its contents do not match its checksum")
    return arrays


def made_of(run: Run) -> Json:
    """Return what a unit was computed with, under ``made``; nothing where its unit.json is missing or damaged."""
    if run.made:  # it was read from a file that has it
        return {}
    made = _made(run.folder / "unit.json")
    return {"made": made} if made else {}


def _made(path: Path) -> Json:
    """Return versions, code, command and machine of a unit.json; nothing where it is missing, damaged or of a failure."""
    try:
        record = parse_json(read_bounded(path))
        if record["status"] != "done":
            return {}
        machine = {key: value for key, value in record["machine"].items() if key != "system"}  # no bit depends on that
        return {key: record.get(key) for key in ("versions", "code", "command")} | {"machine": machine}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
