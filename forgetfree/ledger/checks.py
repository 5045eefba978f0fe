"""Checks that a ledger belongs to a model. Each raises ``LedgerError`` and says what differs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from forgetfree.core.body import POOLER, fingerprint_of
from forgetfree.core.tensors import check_buffers, persistent_buffers
from forgetfree.errors import LedgerError, RegionError
from forgetfree.ledger.binding import Binding, network_differences, network_of
from forgetfree.ledger.ledger import Ledger
from forgetfree.tasks import TaskDefinition


def check_weights(ledger: Ledger, backbone: nn.Module, fingerprint: str | None = None) -> None:
    """Check that ``backbone`` has the layout, the configuration and the weights of the ledger's base model.

    Args:
        ledger: the ledger to check.
        backbone: the base model. It may have a pooler that the ledger's model lacks, because no pooler is grafted.
        fingerprint: the model's, if it is known already.
    """
    try:
        ledger.space.check_dtypes(backbone)
        buffers = persistent_buffers(backbone)
        for record in ledger.records:
            check_buffers(buffers, record.buffers)
    except RegionError as error:
        raise LedgerError(
            f"The ledger belongs to a model of another layout: {error} Load the model the stream was trained on."
        ) from error
    if ledger.binding and (differ := network_differences(ledger.binding.network, network_of(backbone))):
        raise LedgerError(
            f"The ledger belongs to a model that computes otherwise: {'; '.join(differ)}. Load it with the config.json that "
            "the stream was trained with."
        )
    actual = fingerprint or fingerprint_of(backbone)
    if actual != ledger.fingerprint and fingerprint_of(backbone, without=POOLER) != ledger.fingerprint:
        raise LedgerError(
            f"The ledger belongs to other weights: expected fingerprint {ledger.fingerprint[:12]}, the model's is "
            f"{actual[:12]}. Load the very weights the stream was trained from."
        )


def check_binding(ledger: Ledger, now: Binding, where: str) -> None:
    """Check what answers depend on besides weights; ledgers of rows that are no texts do not say it, and pass.

    Args:
        ledger: the ledger to check.
        now: the binding of the model that will answer.
        where: the ledger's file, for the message.
    """
    if ledger.binding and (differ := ledger.binding.differences(now)):
        raise LedgerError(
            f"{where} would not answer as it did: {'; '.join(differ)}. Use the model as it was when the stream was "
            "trained."
        )


def check_definitions(ledger: Ledger, tasks: Mapping[str, TaskDefinition], where: str) -> None:
    """Check that tasks have the same labels in the same order, and the same prompts, as in the ledger.

    Args:
        ledger: the ledger to check.
        tasks: definitions by name.
        where: where these definitions are, for the message.
    """
    readout = ledger.binding.readout if ledger.binding else "linear"
    for record in ledger.records:
        if record.definition is None or record.task not in tasks:
            continue
        ours, theirs = record.definition.reading(readout), tasks[record.task].reading(readout)
        for key, expected in ours.items():
            if theirs[key] != expected:
                raise LedgerError(
                    f"The ledger and {where} have different {key} of task {record.task!r}: expected {_shown(expected)}, got "
                    f"{_shown(theirs[key])}. Put back what it was when the stream was trained."
                )


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
