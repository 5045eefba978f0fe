"""`forgetfree merge`: files in, a ledger out that answers all tasks; and what cannot be merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from forgetfree import Ledger, Predictor, cli
from forgetfree.core.merging import MergeRule
from forgetfree.data.sources import load_tasks
from forgetfree.ledger import merged_graft
from forgetfree.ledger.graft import Graft
from forgetfree.models.loading import load_model
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import TrainingOptions

TASKS = ("qnli", "ag_news", "sst2")
KINDS = {"bert": "linear", "bert-mlm": "prompt"}


class Grafts:
    """Three grafts on one tiny model, as files, and the workbenches that made them."""

    def __init__(self, root: Path, model: Path, readout: str, data: Path) -> None:
        self.root, self.model, self.readout = root, str(model), readout
        self.benches: dict[str, SingleTask] = {}
        self.grafts: dict[str, Graft] = {}
        self.rows: dict[str, Any] = {}
        for number, task in enumerate(TASKS):
            (rows,) = load_tasks(task, str(data))
            self.rows[task] = rows.test
            bench = SingleTask.of(load_model(self.model, readout), rows)
            fine_tuned = bench.fine_tuned(TrainingOptions(steps=2, learning_rate=0.5))
            region = bench.base("movement", fine_tuned, 200 + 50 * number)
            self.benches[task] = bench
            self.grafts[task] = bench.graft(fine_tuned, region, 0.1)
            self.grafts[task].save(root / f"{task}.safetensors")

    @property
    def files(self) -> list[str]:
        return [str(self.root / f"{task}.safetensors") for task in TASKS]


@pytest.fixture(scope="module")
def grafts(
    model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Grafts]:
    return {
        kind: Grafts(tmp_path_factory.mktemp(kind), model_directory(kind), readout, data_directory)
        for kind, readout in KINDS.items()
    }


@pytest.mark.sampled("task-arithmetic-bert")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", get_args(MergeRule))
def test_the_ledger_answers_every_task_by_the_same_merged_model(
    grafts: dict[str, Grafts], kind: str, rule: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = grafts[kind]
    (tmp_path / ".other.safetensors.abcdefgh.unfinished").touch()  # of a command that was killed
    assert cli.main(["merge", *own.files, "--by", rule, "--out", str(tmp_path / "merged.safetensors")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["merged.safetensors"]
    assert f"qnli, ag_news, sst2 merged by {rule}" in capsys.readouterr().out
    ledger = Ledger.load(tmp_path / "merged.safetensors")
    predictor = Predictor(load_model(own.model, own.readout), ledger)
    merged = merged_graft(list(own.grafts.values()), own.benches["qnli"].pre.theta, rule)
    assert merged.region == ledger.owned()
    for task, bench in own.benches.items():
        theta = bench.pre.theta.clone()
        theta[merged.region.indices] = merged.values
        state = replace(bench.pre, theta=theta, readouts={task: dict(own.grafts[task].readout)})
        expected = torch.from_numpy(bench.answers(state).logits)
        assert torch.equal(predictor.logits(task, own.rows[task]), expected), task
    assert cli.main(["ledger", "verify", str(tmp_path / "merged.safetensors"), "--model", own.model]) == 0


def test_what_cannot_be_merged_is_refused(
    grafts: dict[str, Grafts], data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = grafts["bert"], grafts["bert-mlm"]
    qnli, news, films = own.files

    def refusal(code: int, *words: str) -> str:
        assert cli.main(["merge", *words, *([] if "--out" in words else ["--out", str(tmp_path / "x")])]) == code
        assert not (tmp_path / "x").exists()
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    assert "takes two different grafts or more, got 1" in refusal(2, qnli, qnli)
    assert "takes two different grafts or more, got 0" in refusal(2)
    assert "they differ in the base model" in refusal(2, qnli, other.files[2])
    (rows,) = load_tasks("sst2", str(data_directory))
    bench = SingleTask.of(load_model(own.model, own.readout, dtype="bfloat16"), rows)
    fine_tuned = bench.fine_tuned(TrainingOptions(steps=1, learning_rate=0.5))
    narrow = str(tmp_path / "narrow.safetensors")
    bench.graft(fine_tuned, bench.base("movement", fine_tuned, 100), 0.1).save(narrow)
    assert "cannot be merged, they differ in the dtype: float32 and bfloat16. Merge grafts" in refusal(2, qnli, narrow)
    assert "There is no graft at" in refusal(1, qnli, str(tmp_path / "none.safetensors"))
    assert "Did you mean 'ties'" in refusal(2, qnli, news, "--by", "tie")
    assert "stitch has none" in refusal(2, qnli, news, "--weight", "0.5")
    assert "must be above 0 and at most 1" in refusal(2, qnli, news, "--by", "ties", "--density", "2")
    assert "exists. Give a new name" in refusal(2, qnli, news, "--out", films)
    assert "belongs to" in refusal(1, qnli, news, "--model", other.model)
    ledger = str(tmp_path / "merged.safetensors")
    assert cli.main(["merge", qnli, news, "--out", ledger]) == 0
    nameless = [str(tmp_path / f"{task}-of-ledger.safetensors") for task in TASKS[:2]]
    for task, file in zip(TASKS, nameless, strict=False):
        Ledger.load(ledger).graft(task).save(file)
    message = "The graft comes from a ledger and does not name its base model. Give it by --model."
    assert message in refusal(2, *nameless)
    for more in (["--model", own.model], []):  # without --model, by the name that another graft has
        files = nameless if more else [nameless[0], films]
        assert cli.main(["merge", *files, *more, "--out", str(tmp_path / f"named-{len(more)}.safetensors")]) == 0
    graft = own.grafts["sst2"]
    graft.save(tmp_path / "again.safetensors")
    assert "are both of task 'sst2'" in refusal(2, films, str(tmp_path / "again.safetensors"))
    assert graft.origin is not None
    for change, message in (
        ({"origin": None}, "does not say for which task"),
        ({"origin": replace(graft.origin, readout="classifier")}, "own head"),
        ({"origin": replace(graft.origin, max_length=7)}, "differ in the maximum length: 48 and 7"),
        ({"buffers": {"running_mean": torch.zeros(2)}}, "holds buffers (running_mean)"),
    ):
        replace(graft, **change).save(tmp_path / "odd.safetensors")
        assert message in refusal(2 if "maximum" in message else 1, qnli, str(tmp_path / "odd.safetensors")), message
