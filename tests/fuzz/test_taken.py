"""A small part of ``python tests/fuzz``: no damaged file is wrongly taken."""

from __future__ import annotations

import pytest
from fuzz.taken import Fuzz, kinds, make_world, plain_figures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    return Fuzz(make_world(tmp_path_factory.mktemp("taken") / "world"))


@pytest.mark.sampled(share=0.02)
@pytest.mark.parametrize("part", range(50))
def test_what_is_damaged_is_refused_told_or_the_same(part: int, fuzz: Fuzz) -> None:
    with plain_figures():
        verdicts = [fuzz.judge(seed) for seed in range(5 * part, 5 * (part + 1))]
    bad = [each for each in verdicts if each.outcome in ("wrongly taken", "fault")]
    assert not bad, "\n".join(map(str, bad))
    assert {each.outcome for each in verdicts} != {"same"}


def test_every_kind_of_file_is_damaged(fuzz: Fuzz) -> None:
    found = {kind.split(": ")[1] for kind in kinds(fuzz.world)}
    assert found >= {
        *("config.json", "results.json", "unit.json", "scores.csv", "history.jsonl", "predictions.safetensors"),
        *("ledger.safetensors", "adapters.safetensors", "checkpoint.safetensors", "fine-tuned.json"),
        *("fine-tuned/*.safetensors", "outcome.json", "task-features.safetensors"),
        *("graft.safetensors", "learned.safetensors", "answers.safetensors", "circumstances.json"),
    }
