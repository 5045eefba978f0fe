"""lm-eval evaluates an exported task of texts, on a local task of its own that needs no hub."""

from __future__ import annotations

import json
from pathlib import Path

import prompted
import pytest

from forgetfree import Predictor, cli

PROMPTS = ["great film", "terrible movie film", "film", "great movie"]
#: A local task; YAML reads a line break only in double quotes.
TASK = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["film"], do_sample: false, max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.slow
@pytest.mark.sampled("Llama", share=0.15)
@pytest.mark.filterwarnings("ignore")  # warnings of lm-eval and its imports
@pytest.mark.parametrize("family", ["Llama", "T5"])
def test_an_exported_model_answers_lm_eval_as_predict(family: str, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="not installed: pip install 'forgetfree[lm-eval]'")
    from lm_eval.tasks import TaskManager

    data = prompted.write_data(tmp_path / "data")
    model = prompted.write_model(family, tmp_path / "model", chats=family == "Llama")
    run, out = prompted.run(data, model, tmp_path / "run", "grafting-continual"), tmp_path / "exported"
    assert cli.main(["export", str(run), "--task", "first", "--out", str(out)]) == 0
    expected = [each.text for each in Predictor.of_run(run).answer("first", PROMPTS)]

    (tmp_path / "own").mkdir()
    rows = [{"prompt": prompt, "target": text} for prompt, text in zip(PROMPTS, expected, strict=True)]
    rows[0]["target"] += "not this"
    (tmp_path / "own" / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "own" / "own.yaml").write_text(TASK.replace("FILE", str(tmp_path / "own" / "test.jsonl")))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(out)},
        tasks=["own"],
        task_manager=TaskManager(include_path=str(tmp_path / "own"), include_defaults=False),
        apply_chat_template=True,
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    written = [
        sample["resps"][0][0].strip() for sample in sorted(found["samples"]["own"], key=lambda each: each["doc_id"])
    ]
    assert written == expected
    assert 0 < found["results"]["own"]["exact_match,none"] < 1
