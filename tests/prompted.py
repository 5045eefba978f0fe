"""Tasks with texts as answers, on tiny models: their rows, and runs of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import families

import forgetfree
from forgetfree.results.answers import TextAnswers
from forgetfree.results.run_folder import load_run
from forgetfree.results.runs import read_answers
from forgetfree.tasks import TaskDefinition

WORDS = ("great", "terrible", "film", "movie")
#: A task with a stop text, one of chats, and one with an instruction.
TASKS = ("first", "chat", "last")
COUNTS = {"train": 24, "validation": 9, "test": 11}
CHAT_TEMPLATE = (
    "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prompts(count: int, seed: int) -> list[str]:
    """Return prompts of a few words; the last is longer than the maximum length of a row."""
    draw = random.Random(seed)
    found = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 6))) for _ in range(count - 1)]
    return [*found, " ".join(["film"] * 200 + ["great"])]


def chat(prompt: str, answer: str = "") -> list[dict[str, str]]:
    """Return a chat of one question, with its answer if there is one."""
    turns = [{"role": "system", "content": "movie"}, {"role": "user", "content": prompt}]
    return [*turns, {"role": "assistant", "content": answer}] if answer else turns


def write_data(directory: Path) -> Path:
    """Write the three tasks."""
    for task, source in (("first", {"stop": ["film"]}), ("chat", {}), ("last", {"instruction": "terrible"})):
        (directory / task).mkdir(parents=True)
        (directory / task / "source.json").write_text(json.dumps({"max_new_tokens": 6, **source}))
        for split, count in COUNTS.items():
            rows: list[dict[str, Any]] = []
            for prompt in prompts(count, count):
                words = prompt.split()
                answer = words[0] if task != "last" else " ".join(words[-2:])
                rows.append(
                    {"messages": chat(prompt, answer)} if task == "chat" else {"prompt": prompt, "target": answer}
                )
            (directory / task / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def write_model(family: str, directory: Path, *, chats: bool = False) -> Path:
    """Write a tiny model; its tokenizer has a chat template if ``chats``."""
    families.write(family, directory)
    if chats:
        tokenizer = families.tokenizer(family)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(directory)
    return directory


def run(data: Path, model: Path, out: Path, *strategies: str, **options: Any) -> Path:
    """Learn the three tasks, and return the run's directory."""
    how = {"optimizer": "adamw", "learning_rate": 2e-2, "sparsity": 0.2, "steps": 8, "mask_steps": 1, "max_length": 128}
    if "grafting-continual" not in strategies:
        how = {name: value for name, value in how.items() if name not in ("sparsity", "mask_steps")}
    forgetfree.run(
        ",".join(TASKS), strategies=strategies, data=str(data), model=str(model), out=str(out), **(how | options)
    )
    return out


def answers_of_run(run: Path, strategy: str, seed: int = 0) -> dict[str, TextAnswers]:
    """Return a strategy's answers at the end of the run, by task."""
    tasks = [TaskDefinition.of_fields(task) for task in load_run(run)["tasks"]]
    found = read_answers(run / strategy / f"seed-{seed}", tasks)
    return {name: answers for name, answers in found.items() if isinstance(answers, TextAnswers)}
