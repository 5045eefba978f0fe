"""A task that stands on another task, in a custom trainer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import state_of
from loops import assert_same, classifier, labelled, logits, train
from torch import Tensor

from forgetfree import Ledger
from forgetfree.trainers.learning import answering, learning


@pytest.mark.parametrize("effect", ["written", "beside"])
def test_a_task_on_another_answers_with_the_entries_of_both(effect: Any, tmp_path: Path) -> None:
    """Each task keeps its bits, from memory and from the file."""
    model, x, seen = classifier(), labelled(9)[0], dict[str, Tensor]()
    ledger, before = Ledger.of_model(model, effect=effect), state_of(model)
    ways = {"one": None, "two": "one", "three": None, "four": "two", "five": "one"}
    for seed, (task, parent) in enumerate(ways.items()):
        with learning(model, ledger, task, batches=labelled(1), sparsity=0.02, parent=parent):
            with torch.no_grad():
                body = model.eval().bert(input_ids=x["input_ids"]).pooler_output
            with answering(classifier(), ledger, parent) if parent else nullcontext(classifier()) as other:
                expected = other.bert(input_ids=x["input_ids"]).pooler_output
            assert torch.equal(body, expected)  # training starts from the parent
            train(model, labelled(seed + 2))
            with torch.no_grad():
                learned = model.eval()(input_ids=x["input_ids"]).logits.clone()
        assert_same(model, before)
        torch.testing.assert_close(logits(model, ledger, task, x), learned)
        ledger.save(tmp_path / "skills.safetensors")
        for held in (ledger, Ledger.load(tmp_path / "skills.safetensors")):
            for each in held.tasks:
                answer = logits(model, held, each, x)
                assert torch.equal(seen.setdefault(each, answer), answer)
    assert [record.parent for record in ledger.records] == ["", "one", "", "two", "one"]
    one, two, three, four, five = (record.owned.region for record in ledger.records)
    assert ledger.taken("four") == one | two | four and ledger.taken("five") == one | five
    assert len(one & three) and len(two & five) and not len((one | two) & four)
