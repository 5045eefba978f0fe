"""Refuses a strategy that is written for the hooks of version 0.2, or that overrides what is final."""

from __future__ import annotations

from forgetfree.errors import ConformanceError

#: Hooks of version 0.2, and what says the same now. The names go with version 0.4.
_NOW = {
    "prepare": "begin(task), which also returns what is trained",
    "parameters": "begin(task): Training.trained and Training.readout",
    "gradients": "begin(task): Training.trained.touched",
    "steps": "begin(task): Training.steps",
    "training_options": "begin(task): Training.options",
    "training_phase": "begin(task): Training.phase",
    "before_step": "begin(task): the collect() of Training.trained",
    "after_step": "begin(task): the write() of Training.trained",
    "suspend": "answering(task), which leaves the model as it found it, and undo_on_error for errors",
    "snapshot": "answering(task), which leaves the model as it found it",
    "resume": "answering(task), which leaves the model as it found it",
    "enter_evaluation": "answering(task), a context manager",
    "leave_evaluation": "answering(task), a context manager",
    "stale": "changed_by(task)",
    "own_plugins": "setup(): add to self.plugins",
    "template_arguments": "forgetfree.continual.adapter.TemplateStrategy",
    "save": "setup(): set self.kept to an object with save(), load() and bytes_kept()",
    "load": "setup(): set self.kept to an object with save(), load() and bytes_kept()",
    "bytes_kept": "setup(): set self.kept to an object with save(), load() and bytes_kept()",
}

#: Where no author of a strategy writes.
_LIBRARIES = ("forgetfree.", "avalanche.", "builtins")


def check_hooks(cls: type) -> None:
    """Raise ``ConformanceError`` where a class or a mixin of it defines an old hook, or a final name of another base."""
    faults = []
    authors = [base for base in cls.__mro__ if base is cls or not base.__module__.startswith(_LIBRARIES)]
    for name in dict.fromkeys(name for base in authors for name in vars(base)):
        _, *others = [base for base in cls.__mro__ if name in vars(base)]
        final = next((base for base in others if _is_final(vars(base)[name])), None)
        if name in _NOW and (final is not None or all(base in authors for base in others)):
            faults.append(f"{name}: expected no such hook. Write {_NOW[name]}.")
        elif final is not None:
            faults.append(f"{name}: expected {final.__name__}'s own, which is final. Give yours another name.")
    if faults:
        subject = f"{cls.__name__} is not written for the contract of a strategy (docs/plug-in.md)"
        raise ConformanceError(subject, faults)


def _is_final(member: object) -> bool:
    return bool(getattr(getattr(member, "fget", member), "__final__", False))
