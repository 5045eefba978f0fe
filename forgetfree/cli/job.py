"""What run, graft and experiment have in common: flags made from their configuration, and how they begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from forgetfree import registry
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.usage import Debug, lacks
from forgetfree.cli.words import free_directory, no_empty_directories
from forgetfree.data.sources import default_data
from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError
from forgetfree.jobs.config import CommonOptions, JobConfig, key_of, section_types
from forgetfree.jobs.environment import quiet_libraries
from forgetfree.options import build
from forgetfree.results.config_file import read_config

Config = TypeVar("Config", bound=JobConfig)

#: Options of ``--set`` that have a flag of their own, too.
_PLAIN_FLAGS = {
    "learning_rate": "step size of the optimizer",
    "batch_size": "rows per update",
    "precision": "fp32, bf16, or on a GPU fp16",
    **{
        field.name: field.metadata["help"]
        for field in fields(CommonOptions)
        if field.name in ("test_limit", "cache", "threads")
    },
}
#: What stands for a value in the help, where it is no whole number.
_METAVARS = {
    **dict.fromkeys(("strategy", "task"), "NAME"),
    **dict.fromkeys(("model", "data", "fine_tuned", "out", "cache"), "DIR"),
    **dict.fromkeys(("sparsity", "learning_rate"), "F"),
    **{"model": "NAME|DIR", "data": "hub|demo|DIR", "set": "KEY=VALUE", "precision": "NAME", "base": "KIND|FILE"},
}
_WHAT, _HOW, _WHERE = map(Group.create_ordered, ("What to learn", "How to learn", "How to run"))
_GROUPS = {
    **dict.fromkeys(("shots", "steps", "seed", "sparsity", "base", "set"), _HOW),
    **dict.fromkeys(("learning_rate", "batch_size", "precision"), _HOW),
    **dict.fromkeys(("device", "out", "cache", "threads", "test_limit"), _WHERE),
}
_NAMES: Mapping[str, Callable[[], Any]] = {
    "strategy": registry.strategies,
    "task": registry.tasks,
    "stream": registry.streams,
    "name": lambda: registry.EXPERIMENTS,
    "model": lambda: registry.MODELS,
}


@dataclass(frozen=True)
class Execution(Generic[Config]):
    """A configuration, and how it is carried out.

    Attributes:
        resume: go on in the directory.
        jobs: units at a time; none: as the command chooses.
        debug: let exceptions through.
    """

    config: Config
    resume: bool
    jobs: int | None
    debug: bool


def command_of(config: type[Config], carry_out: Callable[[Execution[Config]], int]) -> Callable[..., int]:
    """Return a command whose flags are the options of a configuration.

    Args:
        config: a dataclass, whose first field of its own is the argument without a flag.
        carry_out: does the job and returns the exit code.
    """
    subject = next(name for name in config.__annotations__ if name != "command")

    def command(
        *subjects: str,
        config_file: str | None = None,
        resume: bool = False,
        jobs: int | None = None,
        debug: bool = False,
        **given: Any,
    ) -> int:
        if len(subjects) > 1:
            hint = f"Join the tasks of a stream by commas: {','.join(subjects)}. " if subject == "stream" else ""
            raise UsageError(
                f"Unrecognized arguments: {' '.join(subjects[1:])}. {hint}See 'forgetfree {config.command} --help'."
            )
        if resume and "out" not in given:
            raise UsageError("--resume needs --out DIR. Give the directory to continue.")
        if jobs is not None and jobs < 1:
            raise UsageError(f"--jobs must be at least 1, got {jobs}.")
        values = _values(config, given | dict(zip([subject], subjects, strict=False)), config_file)
        if not values.get(subject):
            _refuse_no_subject(config, subject, values.get("out", ""))
        values.setdefault("data", default_data())
        prefix = "" if config.command == "run" else f"{config.command}-"
        values.setdefault("out", free_directory(f"{prefix}{values[subject]}"))
        return carry_out(Execution(build(config, values, config.command), resume, jobs, debug))

    own = [
        _flag("config_file", str, "options in a TOML or JSON file, or a run's config.json", _WHERE, "FILE"),
        _flag("resume", bool, "continue in --out; what is finished is kept", _WHERE),
        _flag("jobs", int, "how many units run at a time", _WHERE, "N"),
        Argument("debug", Argument.KEYWORD_ONLY, default=False, annotation=Debug),
    ]
    command.__signature__ = Signature([*_arguments(config, subject), *own])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _arguments(config: type[JobConfig], subject: str) -> Iterator[Argument]:
    hints = get_type_hints(config)
    first, *rest = sorted(fields(config), key=lambda field: field.name != subject)
    what = Parameter(help=first.metadata["help"], completer=_completer(subject))
    yield Argument(subject, Argument.VAR_POSITIONAL, annotation=Annotated[str, what])
    for field in rest:
        key, hint = key_of(field.name), hints[field.name]
        several = get_origin(hint) is tuple or key == "set"
        choices = next((get_args(each) for each in (hint, *get_args(hint)) if get_origin(each) is Literal), None)
        yield _flag(
            key,
            list[str] if several else str,
            field.metadata["help"],
            _GROUPS.get(key, _WHAT),
            _METAVARS.get(key, "N"),
            choices,
        )
    for key, text in _PLAIN_FLAGS.items():
        yield _flag(key, str, text, _GROUPS[key], _METAVARS.get(key, "N"))


def _flag(
    name: str, hint: Any, text: str, group: Group, metavar: str | None = None, choices: Sequence[str] | None = None
) -> Argument:
    flag = "--config" if name == "config_file" else f"--{name.replace('_', '-')}"
    how = Parameter(
        name=flag,
        help=text,
        group=group,
        metavar=None if choices else metavar,
        choices=choices,
        completer=_completer(name),
    )
    return Argument(name, Argument.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, how])


def _completer(name: str) -> Callable[..., Any] | None:
    return (lambda context: list(_NAMES[name]())) if name in _NAMES else None


def _values(config: type[JobConfig], given: Mapping[str, Any], file: str | None) -> dict[str, Any]:
    """Return what is asked for by the names of the fields: the file's first, then the command line over it."""
    plain = dict.fromkeys(_PLAIN_FLAGS, Any)
    values = read_config(Path(file), config.command, section_types(config) | plain) if file else {}
    settings = _settings(given.get("set", ()))
    for key in _PLAIN_FLAGS & given.keys():
        if key in settings:
            flag = key.replace("_", "-")
            raise UsageError(f"--{flag} and --set {key}={settings[key]} are both given. Leave one of them out.")
    settings = {**values.get("set", {}), **_only(values, plain), **settings, **_only(given, plain)}
    values = {**values, **given, "set": settings}
    names = {key_of(field.name): field.name for field in fields(config)}
    return {names[key]: value for key, value in values.items() if key in names}


def _only(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in keys}


def _settings(given: Sequence[str]) -> dict[str, str]:
    """Return what ``--set key=value`` says.

    Raises:
        UsageError: it says nothing, or two things of one key.
    """
    settings: dict[str, str] = {}
    for setting in given:
        key, separator, value = (part.strip() for part in setting.partition("="))
        if not separator or not key:
            raise UsageError(f"--set needs key=value, got {brief(setting)}. Write, say, --set batch_size=16.")
        if key in settings:
            raise UsageError(f"--set {key} is given twice, as {brief(settings[key])} and {brief(value)}. Give it once.")
        settings[key] = value
    return settings


def _refuse_no_subject(config: type[JobConfig], subject: str, out: str) -> None:
    begun = Path(out) / "config.json"
    if out and begun.is_file():
        raise UsageError(f"No {subject} is given. To continue that {config.command}, give --config {begun}, too.")
    if subject == "stream":
        raise UsageError(f"No stream is given. Known: {', '.join(registry.streams())}, or task names with commas.")
    raise lacks(f"forgetfree {config.command}", [subject.upper()])


@contextmanager
def begun(
    execution: Execution[Any],
    model: str,
    holdings: Callable[[Path], str],
    *,
    cache: Path | None = None,
    passed: tuple[type[Exception], ...] = (UsageError, RunError, ReportError),
) -> Iterator[None]:
    """Carry out a job inside: what is cut short says what it leaves behind, and how it goes on.

    Args:
        execution: what is carried out.
        model: that is loaded.
        holdings: says what a directory holds.
        cache: directory of fine-tuned models, where it is not in the job's directory.
        passed: errors that say themselves what to do.
    """
    config, out = execution.config, Path(execution.config.out)
    quiet_libraries()
    if needs_hub(model, config.data):
        go_offline_if_cut_off()
    try:
        with no_empty_directories(out, cache or config.settings.get("cache")):
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. {holdings(out)}".strip()) from None
    except (ForgetfreeError, OSError) as error:
        if execution.debug or isinstance(error, passed) or not (held := holdings(out)):
            raise
        raise RunError(f"{error} {held}") from error
