"""Two processes that train as one: the bits of one process, and what they send."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from together import ENTRIES, follow, loaded, train

from forgetfree.errors import RunError
from forgetfree.parallel import exchange
from forgetfree.parallel.exchange import ProcessLost, connected, joined, meeting_point


@pytest.fixture(scope="module")
def made(model_directory: Callable[[str], Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one process makes, and what the first of two makes."""
    directory = str(model_directory("bert"))
    threads = torch.get_num_threads()
    store = meeting_point(2)
    other = multiprocessing.get_context("spawn").Process(target=follow, args=(directory, store.port), daemon=True)
    other.start()
    try:
        alone = train(directory)
        while not store.check(["here"]):
            assert other.is_alive()
            time.sleep(0.1)
        with connected(0, 2, store), joined():
            together = train(directory)
            exchange.check_alike("values", "same", "Look.")
            with pytest.raises(RunError, match=r"The 2 processes of this run hold different values.*Look\."):
                exchange.check_alike("values", "mine", "Look.")
            other.join(30)
            with pytest.raises(ProcessLost, match="has lost another one"):
                exchange.gathered(["nobody hears it"])
        return alone, together
    finally:
        other.kill()
        torch.set_num_threads(threads)


@pytest.mark.parametrize("what", ["fine-tuned", "readout", "region", "scores", "logits"])
def test_two_processes_have_the_bits_of_one(made: tuple[dict[str, Any], dict[str, Any]], what: str) -> None:
    alone, together = made
    assert torch.equal(alone[what], together[what])


def test_two_processes_tell_the_losses_of_one(made: tuple[dict[str, Any], dict[str, Any]]) -> None:
    alone, together = made
    assert alone["losses"] == together["losses"] and len(alone["losses"]) == 4
    assert alone["mask losses"] == together["mask losses"]


def test_a_region_exchanges_its_entries_and_not_the_model(
    made: tuple[dict[str, Any], dict[str, Any]], model_directory: Callable[[str], Path]
) -> None:
    """A step sends the vector once in two halves: gradients, the loss, and whether each tensor has a gradient."""
    alone, together = made
    model = loaded(str(model_directory("bert")))
    readout = list(model.readout_module(0).parameters())
    of_readout, tensors = sum(each.numel() for each in readout), len(model.space().tensors)

    def sent(values: int, parameters: int) -> int:
        vector = values + of_readout + 1 + parameters + len(readout)
        return (
            4 * 2 * ((vector + 1) // 2)
        )  # padded to be even; the half that is the other's, and the half that is summed

    assert alone["fine-tuned sent"] == alone["region sent"] == 0
    assert together["fine-tuned sent"] == 4 * sent(len(model.space()), tensors)
    assert together["region sent"] == 3 * sent(ENTRIES, 1)
