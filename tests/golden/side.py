"""One side of ``python tests/golden``: runs all configurations with the package on the path, and saves their results."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import os
import shlex
import signal
import sys
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from forgetfree import Ledger, cli

#: Options known to both commits, by configuration; ``{folder}`` has the models and the data.
CONFIGURATIONS = {
    "main job": "qnli-agnews-sst2 --data demo --model {folder}/bert --readout linear --strategy fine-tune "
    "--strategy continual-ft --strategy grafting-continual --sparsity 0.05 --set mask_steps=4 --set mask_batch_size=8",
    "alone": "sst2,qnli --data {folder}/labels --model {folder}/bert --strategy grafting-continual --sparsity 0.05 "
    "--readout prompt --set composition=alone --set region_from=movement --set optimizer=adamw",
    "packnet": "sst2,qnli --data {folder}/labels --model {folder}/bert --strategy packnet --readout linear",
    "lora": "sst2,qnli --data {folder}/labels --model {folder}/bert --strategy lora --readout linear",
    "ewc": "sst2,qnli --data {folder}/labels --model {folder}/bert --strategy ewc --readout linear",
    "replay": "sst2,qnli --data {folder}/labels --model {folder}/bert --strategy replay --readout linear",
    "tagging": "ner-demo --data demo --model {folder}/bert --strategy grafting-continual --sparsity 0.05 "
    "--set region_from=movement --set optimizer=adamw",
    "texts of GPT-2": "first,chat,last --data {folder}/texts --model {folder}/gpt2 --strategy grafting-continual "
    "--sparsity 0.1 --set region_from=movement --set optimizer=adamw --set learning_rate=2e-2 --readout generate",
    "texts of T5": "first,last --data {folder}/texts --model {folder}/t5 --strategy grafting-continual "
    "--sparsity 0.1 --set region_from=movement --set optimizer=adamw --set learning_rate=2e-2 --readout generate",
    "class scenario": "sst2,qnli --data {folder}/labels --model {folder}/bert --readout linear --set scenario=class "
    "--strategy grafting-continual --sparsity 0.05 --set region_from=movement --set task_inference=router",
    "killed": "sst2,qnli --data {folder}/labels --model {folder}/bert --strategy continual-ft --strategy "
    "grafting-continual --sparsity 0.05 --set region_from=movement --set optimizer=adamw --readout linear",
}
COMMON = "--steps 8 --shots 4 --test-limit 16 --device cpu --threads 1"
#: Signals that end a run, each after a number of updates since it started or resumed; then the run is resumed to its end.
KILLS = {"killed": ((signal.SIGKILL, 13), (signal.SIGTERM, 13))}
#: Modules that each child would otherwise import itself.
IMPORTED = (
    "avalanche.training",
    "matplotlib.pyplot",
    "pandas",
    "peft",
    "sklearn.linear_model",
    "transformers.models.bert",
)
#: Ends of the names of columns that are not compared, because they differ from run to run.
UNCOMPARED = ("seconds", "time")


def main() -> int:
    """Run all configurations, each in a forked child that needs no imports; write the results of each."""
    code, folder, out = map(Path, sys.argv[1:])
    assert Path(cli.__file__).is_relative_to(code), f"{cli.__file__} is not in {code}"
    for module in IMPORTED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    for name, words in CONFIGURATIONS.items():
        run, log = out / name, out / f"{name}.log"
        command = [*shlex.split(f"run {words} {COMMON}".format(folder=folder)), "--out", str(run)]
        for number, kill in enumerate((*KILLS.get(name, ()), None)):
            status = in_child([*command, *["--resume"] * (number > 0)], log, kill)
            if (status == 0) == bool(kill):
                print(f"{name} ended with exit code {status}:\n{log.read_text()[-2000:]}", file=sys.stderr)
                return 1
        (out / f"{name}.json").write_text(json.dumps(measured(run), indent=1))
    return 0


def in_child(command: list[str], log: Path, kill: tuple[signal.Signals, int] | None) -> int:
    """Run a command in a forked process, killed after an update if requested, and return its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if kill:
            number, last = kill
            updates = count(1)
            register_optimizer_step_post_hook(
                lambda *_: os.kill(os.getpid(), number) if next(updates) == last else None
            )
        code = int(cli.main(command))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def measured(run: Path) -> dict[str, str]:
    """Return all values that must be equal to the bit, as texts, by their file and place in it."""
    found: dict[str, str] = {}
    for path in sorted(run.rglob("*/seed-*/*")):
        name = path.relative_to(run).as_posix()
        places: dict[str, str] = {}
        if path.name == "scores.csv":
            places = scores(path)
        elif path.name == "ledger.safetensors":
            places = grafts(path)
        elif path.name == "predictions.safetensors":
            places = answers(path)
        found |= {f"{name}, {place}": value for place, value in places.items()}
    return found


def scores(path: Path) -> dict[str, str]:
    """Return the value and the number of rows of each score, by the score's other columns."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        of = " ".join(value for column, value in row.items() if not column.endswith(("value", "rows", *UNCOMPARED)))
        found |= {f"{of}, {column}": row[column] for column in ("value", "rows")}
    return found


def grafts(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each part of each task's graft, as the package itself reads it."""
    ledger = Ledger.load(path)
    found = {}
    for task in ledger.tasks:
        graft = ledger.graft(task)
        parts: dict[str, Tensor] = {"region": graft.region.indices, "values": graft.values}
        parts |= {f"readout {name}": tensor for name, tensor in graft.readout.items()}
        found |= {f"{task}, {part}": digest(tensor) for part, tensor in parts.items()}
    return found


def answers(path: Path) -> dict[str, str]:
    """Return every row of the saved answers, exactly."""
    found = {}
    for name, tensor in load_file(path).items():
        found[f"{name}, shape"] = f"{tuple(tensor.shape)} {tensor.dtype}"
        found |= {f"{name}, row {row}": str(value) for row, value in enumerate(tensor.tolist())}
    return found


def digest(tensor: Tensor) -> str:
    """Return the number of entries, and the SHA-256 of type and bits."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.numel()} entries, {hashlib.sha256(str(tensor.dtype).encode() + bits).hexdigest()}"


if __name__ == "__main__":
    sys.exit(main())
