"""Grafting in the real trainers of transformers, TRL, Lightning and accelerate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from compared import assert_same, state_of
from datasets import Dataset
from torch import Tensor
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from forgetfree import Ledger
from forgetfree.testing.tiny import bert_config, pre_trained, wordpiece
from forgetfree.trainers.learning import answering, learning

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),  # libraries warn about each other
]


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    } | more


# -- transformers: three classification tasks with a head each ---------------------------------------------

QUESTIONS = {
    "colour": (["red", "blue"], "the thing is {}"),
    "size": (["big", "small"], "it looks {}"),
    "taste": (["sweet", "sour"], "that is {}"),
}


def classifier(dtype: torch.dtype = torch.float32) -> Any:
    return pre_trained(lambda: BertForSequenceClassification(bert_config(len(wordpiece())))).to(dtype)


def rows(task: str, count: int = 32) -> Dataset:
    tokenizer, (words, form) = wordpiece(), QUESTIONS[task]
    encoded = [tokenizer(form.format(words[i % 2])) for i in range(count)]
    return Dataset.from_list([{"input_ids": each["input_ids"], "labels": i % 2} for i, each in enumerate(encoded)])


def trainer(model: Any, task: str, tmp_path: Path, **more: Any) -> Trainer:
    return Trainer(
        model=model,
        args=TrainingArguments(**options(tmp_path, **more)),
        train_dataset=rows(task),
        eval_dataset=rows(task, 8),
        data_collator=DataCollatorWithPadding(wordpiece()),
        compute_metrics=lambda said: {"accuracy": float(np.mean(said.predictions.argmax(1) == said.label_ids))},
    )


def test_trainer_on_three_tasks(tmp_path: Path) -> None:
    model = classifier()
    ledger, before, seen = Ledger.of_model(model), state_of(model), {}
    for task in QUESTIONS:
        made = trainer(model, task, tmp_path, bf16=task == "size", gradient_accumulation_steps=2, max_grad_norm=0.5)
        with learning(model, ledger, task, batches=made.get_train_dataloader(), sparsity=0.01, heads=["classifier"]):
            made.train()
        assert_same(model.state_dict(), before)
        for each in ledger.tasks:
            with answering(model, ledger, each):
                said = trainer(model, each, tmp_path).predict(rows(each, 8)).predictions
            assert np.array_equal(seen.setdefault(each, said), said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_resumed_to_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each checkpoint is a plain model."""
    values = []
    for stop in (None, 2):
        model, place = classifier(dtype), tmp_path / str(stop)
        ledger = Ledger.of_model(model)
        batches = [made for made in trainer(model, "colour", place).get_train_dataloader()]
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
        if stop:
            made = trainer(model, "colour", place, **saving | {"max_steps": stop})
            with pytest.raises(KeyboardInterrupt), learning(model, ledger, "colour", batches=batches, sparsity=0.01):
                made.train()
                raise KeyboardInterrupt
        with learning(model, ledger, "colour", batches=batches, sparsity=0.01) as skill:
            trainer(model, "colour", place, **saving).train(resume_from_checkpoint=bool(stop))
            trained = skill.values.detach().clone()
        values.append((trained, *ledger.records[0].readout.values()))
        _, told = BertForSequenceClassification.from_pretrained(place / "checkpoint-2", output_loading_info=True)
        assert not told["missing_keys"]
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))


# -- TRL ---------------------------------------------------------------------------------------------------


def writer() -> tuple[Any, Any]:
    tokenizer = tiny.byte_level(causal=True)
    tokenizer.pad_token = tokenizer.eos_token
    return pre_trained(lambda: GPT2LMHeadModel(tiny.gpt2_config(len(tokenizer)))), tokenizer


def preferences() -> Dataset:
    return Dataset.from_list([{"prompt": f"number {i} is", "chosen": " good", "rejected": " bad"} for i in range(16)])


def test_sft_twice_then_dpo(tmp_path: Path) -> None:
    """The options are TRL's defaults, with gradient checkpoints; after each task, earlier tasks generate the same tokens.

    DPO's reference is the initial policy: the model after SFT.
    """
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    model, tokenizer = writer()
    ledger, before, seen = Ledger.of_model(model), state_of(model), {}
    prompt = tokenizer("number 1 is", return_tensors="pt")["input_ids"]

    def sft(word: str) -> Any:
        texts = Dataset.from_list([{"text": f"number {i} is {word}"} for i in range(32)])
        args = SFTConfig(**options(tmp_path, max_length=24))
        return SFTTrainer(model=model, args=args, train_dataset=texts, processing_class=tokenizer)

    def dpo() -> Any:
        with answering(model, ledger, "bad"):
            # A copy would have TRL's patched forward, which is bound to the original model.
            model.save_pretrained(tmp_path / "reference")
        reference = GPT2LMHeadModel.from_pretrained(tmp_path / "reference")
        args = DPOConfig(**options(tmp_path, max_length=24))
        return DPOTrainer(
            model=model, ref_model=reference, args=args, train_dataset=preferences(), processing_class=tokenizer
        )

    for task, make in {"good": lambda: sft("good"), "bad": lambda: sft("bad"), "prefer": dpo}.items():
        made = make()
        own: Any = {}
        if task == "prefer":
            own = {"parent": "bad", "loss": lambda m, b, trainer=made: trainer.compute_loss(m, b)}
        with learning(model, ledger, task, sparsity=0.01, batches=made.get_train_dataloader(), **own):
            if task == "prefer":
                with torch.no_grad():
                    assert torch.equal(model.eval()(prompt).logits, made.ref_model.eval()(prompt).logits)
            made.train()
        assert_same(model.state_dict(), before)
        losses = [log["loss"] for log in made.state.log_history if "loss" in log]
        assert task == "prefer" or losses[-1] < losses[0]
        for each in ledger.tasks:
            with answering(model, ledger, each), torch.no_grad():
                said = model(prompt).logits.clone(), model.generate(prompt, max_new_tokens=6, do_sample=False)
            assert all(map(torch.equal, seen.setdefault(each, said), said)), (task, each)


def reward(model: Any, tokenizer: Any, out: Path) -> Any:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model, args=RewardConfig(**options(out)), train_dataset=preferences(), processing_class=tokenizer
    )


def grpo(model: Any, tokenizer: Any, out: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(**options(out, max_steps=2), num_generations=4, max_completion_length=6)
    return GRPOTrainer(
        model,
        args=args,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=preferences().select_columns(["prompt"]),
        processing_class=tokenizer,
    )


def kto(model: Any, tokenizer: Any, out: Path) -> Any:
    from trl.experimental.kto import KTOConfig, KTOTrainer

    rows = [
        {"prompt": f"number {i} is", "completion": f" {('good', 'bad')[i % 2]}", "label": i % 2 == 0} for i in range(16)
    ]
    return KTOTrainer(
        model, args=KTOConfig(**options(out)), train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


@pytest.mark.parametrize("make", [reward, grpo, kto])
def test_a_trainer_computes_the_loss(make: Any, tmp_path: Path) -> None:
    """The trainer's loss chooses the region, in the documented form."""
    model, tokenizer = writer()
    if make is reward:
        config = tiny.gpt2_config(len(tokenizer))
        config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
        model = pre_trained(lambda: GPT2ForSequenceClassification(config))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base")  # trainers load a reference model by its name
    ledger, before = Ledger.of_model(model), state_of(model)
    trainer = make(model, tokenizer, tmp_path)
    ready = trainer._prepare_inputs if make is grpo else lambda batch: batch
    with learning(
        model,
        ledger,
        "one",
        sparsity=0.01,
        batches=trainer.get_train_dataloader(),
        loss=lambda m, b: trainer.compute_loss(m, ready(b)),
    ):
        trainer.train()
    assert_same(model.state_dict(), before)
    assert len(ledger.owned()) > 0


# -- Lightning, accelerate ---------------------------------------------------------------------------------


def test_lightning(tmp_path: Path) -> None:
    import lightning
    from torch.utils.data import DataLoader

    model = classifier()
    ledger, before = Ledger.of_model(model), state_of(model)
    loader = DataLoader(rows("colour"), batch_size=4, collate_fn=DataCollatorWithPadding(wordpiece()))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)

    module = Module()
    runner = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with learning(model, ledger, "colour", batches=loader, sparsity=0.01, heads=["classifier"]):
        runner.fit(module, loader)
    assert_same(model.state_dict(), before)
    assert module.losses[-1] < module.losses[0]
    with answering(model, ledger, "colour"):
        assert float(model(**next(iter(loader))).loss.detach()) < module.losses[0]


# -- Two processes -----------------------------------------------------------------------------------------

TWO = """
import sys, torch
sys.path.insert(0, "tests/trainers"); sys.path.insert(0, "tests")
from accelerate import Accelerator
from forgetfree.trainers.learning import learning
from forgetfree import Ledger
import test_libraries
accelerator = Accelerator(cpu=True)
model = test_libraries.classifier(); ledger = Ledger.of_model(model)
model.eval()  # no dropout, which each process would draw for itself
from transformers import DataCollatorWithPadding
rows = DataCollatorWithPadding(test_libraries.wordpiece())([test_libraries.rows("colour")[i] for i in range(16)])
several, rank = accelerator.num_processes, accelerator.process_index
parts = [{k: v[i * 4:(i + 1) * 4] for k, v in rows.items()} for i in range(4)]
own = parts[rank::several]
with learning(model, ledger, "colour", batches=own, sparsity=0.05, heads=["classifier"]) as skill:
    wrapped = accelerator.prepare(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    for step in range(4):
        batches = [own[step % len(own)]] if several == 2 else [parts[(2 * step) % 4], parts[(2 * step + 1) % 4]]
        for batch in batches:
            (wrapped(**dict(batch)).loss / len(batches)).backward()
        optimizer.step(); optimizer.zero_grad()
if rank == 0:
    record = ledger.records[0]
    torch.save({"region": record.owned.region.indices, "values": record.owned.values, **record.readout}, sys.argv[1])
"""


@pytest.mark.sampled(share=0.25)
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO)
    for count in (1, 2):
        flags = "--cpu --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
        launch = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), "--num_processes", str(count)]
        launch += ["--num_cpu_threads_per_process", "1", str(script), str(tmp_path / f"{count}.pt")]
        done = subprocess.run(launch, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{count}.pt", weights_only=True) for count in (1, 2))
    assert torch.equal(one["region"], two["region"])
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-6) for name in one)
