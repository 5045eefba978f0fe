"""Wrong command lines and damaged files: each ends in one paragraph that names the fault, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from edited import write_config

from forgetfree import cli

Change = Callable[[Path], Any]
#: Flags that are added to a command where a case does not give them.
USUAL = {
    "run": "--data data --model model --shots 4 --steps 1 --sparsity 0.01 --strategy grafting-continual --out out",
    "graft": "--data data --model model --shots 4 --steps 1 --sparsity 0.01 --out out",
    "apply": "--model model --out out",
    "predict": "--task sst2",
    "export": "--task sst2 --out out",
    "serve": "--port 0",
}


@dataclass(frozen=True)
class Case:
    """A command line, a change of the files before it, and its error."""

    line: str
    message: str
    code: int = 2
    change: Change = lambda place: None
    bare: bool = False  # without the usual flags
    stdin: bytes = b""

    @property
    def arguments(self) -> list[str]:
        words = [bytes(word, "ascii").decode("unicode_escape") if "\\" in word else word for word in _split(self.line)]
        if self.bare or not words or words[0] not in USUAL:
            return words
        usual = USUAL[words[0]].split()
        flags = dict(zip(usual[::2], usual[1::2], strict=True))
        more = [part for flag, value in flags.items() if flag not in words for part in (flag, value)]
        if words[0] == "predict":  # texts may follow DIR, but not a flag
            return [words[0], words[1], *more, *words[2:]]
        return [*words, *more]


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    return list(lexer)


# -- Changes of the files ----------------------------------------------------------------------------------


def write(name: str, content: str | bytes) -> Change:
    def change(place: Path) -> None:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def edit(name: str, act: Callable[[Any], Any]) -> Change:
    """Apply ``act`` to the content of a JSON file; a run's config.json changes as if its units had been made under it."""

    def change(place: Path) -> None:
        content = json.loads((place / name).read_text())
        act(content)
        if Path(name).name == "config.json" and "run" in content:
            write_config((place / name).parent, content)
        else:
            (place / name).write_text(json.dumps(content))

    return change


def flip(name: str) -> Change:
    """Flip one bit near the end of a file."""

    def change(place: Path) -> None:
        content = bytearray((place / name).read_bytes())
        content[-9] ^= 1
        (place / name).write_bytes(content)

    return change


def cut(name: str) -> Change:
    return lambda place: (place / name).write_bytes((place / name).read_bytes()[:-40])


def pipe(name: str) -> Change:
    def change(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)

    return change


def at(*path: str | int, to: Any) -> Callable[[Any], None]:
    def act(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return act


def without(*path: str | int) -> Callable[[Any], None]:
    def act(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return act


STRATEGY = "run/grafting-continual"
LEDGER, GRAFT = f"{STRATEGY}/seed-0/ledger.safetensors", "graft/bare-graft/seed-0/graft.safetensors"
NULL = 'stream = "sst2"\n[set]\ncache = "a\\u0000b"'

CASES = [
    # -- Commands and flags --------------------------------------------------------------------------------
    Case("", "The following arguments are required: COMMAND. See 'forgetfree --help'."),
    Case("train --data x.csv", "Unknown command 'train'. Did you mean 'run'?"),
    Case("run sst2 --strategy naive", "Unknown strategy 'naive'. Did you mean 'continual-ft'?"),
    Case("rum sst2", "Unknown command 'rum'. Did you mean 'run'? Known: apply, export"),
    Case("run sst2 --strategy ewc,si", "Give --strategy once for each."),
    Case("run sst2 --sparsty 0.1", "Unknown flag of 'forgetfree run' '--sparsty'. Did you mean '--sparsity'?"),
    Case("run sst2 more", "Unrecognized arguments: more. Join the tasks of a stream by commas: sst2,more. See"),
    Case(
        "predict run --task sst x",
        "There is no task 'sst' to answer. Did you mean 'sst2'? The run learned: qnli, sst2.",
        1,
    ),
    Case("predict run --model minilm x", "The ledger belongs to a model of another layout: BertModel does not fit", 1),
    Case("run sst2 --shots", "--shots needs a value. See 'forgetfree run --help'."),
    Case(r"run \udcff", "The argument '\\udcff' is not in UTF-8."),
    Case(
        "list",
        "The following arguments are required: WHAT (strategies, streams, tasks, kinds, metrics, models). See 'forgetfree",
    ),
    Case(
        "list planets",
        "Unknown argument 'planets'. Known: kinds, metrics, models, strategies, streams, tasks.",
    ),
    Case("list tasks --verbose --json", "--verbose goes with 'list strategies', got 'list tasks'. Leave it out."),
    # -- run: flags ----------------------------------------------------------------------------------------
    Case("run", "No stream was given. data contains ag_news, qnli, sst2. Give task names with commas"),
    Case("run --data demo", "No stream was given. Known: qnli-agnews-sst2"),
    Case(
        "run --data data/sst2",
        "data/sst2 contains one task, which may have any name without a comma or a slash. Give task names",
    ),
    Case("run sst2 --strategy lora --set rank=1000000000", "rank must be at most 65,536, got 1000000000."),
    Case("run qnly", "Unknown stream or task 'qnly'. Did you mean 'qnli'?"),
    Case("run sst2,sst2", "The stream names 'sst2' twice. Name each task only once;"),
    Case("run data/sst2", "'data/sst2' is a file or a directory, not a task. To read its rows, give --data data/sst2."),
    Case(r"run \x1b[31m", "Unknown stream or task '\\x1b[31m'."),
    Case("run sst2 --model nosuch/", "The model directory 'nosuch/' does not exist. Give one in Hugging Face layout"),
    Case("run sst2 --model data", "'data' is no model directory: it holds no config.json. Save with", 1),
    Case("run sst2 --model owner/name", "Model 'owner/name' cannot be loaded: ", 1),
    Case("run sst2 --model ''", "--model needs a value, got an empty text. Give one, or leave --model out."),
    Case(r"run sst2 --model a\x00b", "The argument 'a\\x00b' is not in UTF-8."),
    Case(
        "run sst2 --readout prompt", "The readout 'prompt' needs a masked language model, and 'model' is BertModel.", 1
    ),
    Case(
        "run ag_news --metric f1",
        "--metric f1 cannot be used for task 'ag_news': metric must be 'accuracy' or 'macro_f1'",
        1,
    ),
    Case(
        "run sst2,ag_news --set scenario=class --metric sst2=f1",
        "scenario=class predicts among the labels of all tasks, which only accuracy and macro_f1 can score, but --metric",
    ),
    *(
        case
        for job in ("run sst2", "graft sst2")
        for case in (
            Case(f"{job} --skip-bad-rows --data nosuch", "The data directory 'nosuch' does not exist."),
            Case(f"{job} --map-label neg", "--map-label needs OLD=NEW or TASK:OLD=NEW, got 'neg'."),
        )
    ),
    Case(
        "run sst2 --data data/sst2/train.jsonl --data nosuch.csv",
        "The data directory 'nosuch.csv' does not exist.",
    ),
    Case("run --data data/sst2/train.jsonl --data data/qnli/train.jsonl", "would both be the task 'train'"),
    Case("run sst2 --set seed=1", "Unknown option 'seed'. Did you mean '--seed'? Known: accumulation, "),
    Case("run sst2 --set steps=3", "--steps and --set steps=3 are both given. Leave one of them out."),
    Case("run sst2 --nothing adamw", "--version, --without. Options without a flag are set with --set KEY=VALUE."),
    Case(
        "run sst2 --compostion alone",
        "Unknown flag of 'forgetfree run' '--compostion'. Did you mean --set composition=VALUE?",
    ),
    Case("run sst2 --composition alone", "--composition is no flag. Give this option with --set composition=VALUE."),
    Case("run sst2 --sparsity 1e-9", "sparsity 1e-09 leaves no entry of the 4448 graftable ones. Give at least"),
    Case(
        "run sst2 --sparsity 0.1 --strategy lora", "'sparsity' is not an option of lora. Strategies with this option: "
    ),
    Case(
        "run sst2 --held-out sst2",
        "--held-out sst2 is a task of the stream, so its texts are trained on. Give other texts.",
    ),
    Case("run sst2 --held-out qnli", "--held-out measures a causal language model's loss on the next token, which"),
    Case("run sst2 --device cuda:99", "--device cuda:99: torch does not find this device; it finds cpu"),
    Case("run sst2 --resume", "--resume needs --out DIR. Give the directory of the run to resume.", bare=True),
    Case("run sst2 --out run", "--out 'run' is not empty: it contains config.json, "),
    Case(
        "run sst2 --out model/config.json", "--out 'model/config.json' cannot be written: File exists. Give a directory"
    ),
    Case(f"run sst2 --out {'x' * 300}", "cannot be written: File name too long."),
    # -- run: options --------------------------------------------------------------------------------------
    Case("run sst2 --set steps", "--set needs key=value, got 'steps'."),
    Case("run sst2 --set steps=1 --set steps=2", "--set steps is given twice, as '1' and '2'. Give it once."),
    Case("graft sst2 --set optimizer=nowhere:made", "'nowhere:made' cannot be imported: No module named 'nowhere'."),
    Case(
        "run sst2 --set ewc.ewc_lambda=1",
        "Unknown strategy in --set 'ewc'. Known: grafting-continual. Add others with --strategy.",
    ),
    Case(
        "run sst2 --config x.toml",
        "--batch-size and --set batch_size=3 are both given. Leave one of them out.",
        change=write("x.toml", "batch_size = 5\n[set]\nbatch_size = 3"),
    ),
    Case("graft sst2 --set cache=c --fine-tuned model", "cache=c cannot be given with --fine-tuned"),
    Case(
        "run sst2 --readout linear --set task_inference=router",
        "task_inference=router is for streams with unknown tasks",
    ),
    Case("run sst2 --set precision=fp16", "precision=fp16 is for GPUs; on this run's device, the CPU"),
    Case("run sst2 --set graftable=(", "graftable must be a regular expression, got '('"),
    Case("run sst2 --set graftable=nosuch", "No graftable tensor in BertModel: expected at least one name matching", 1),
    Case(f"run sst2 --seed {'9' * 400}", "--seed must be below 9,223,372,036,854,775,808, got 9999999999"),
    Case("run --config x.toml", "cannot be written: embedded null byte", change=write("x.toml", NULL)),
    # -- run: files of options -----------------------------------------------------------------------------
    Case(
        "run sst2 --config nosuch.toml",
        "nosuch.toml cannot be read: No such file or directory. Give a TOML or JSON file",
    ),
    Case("run sst2 --config x.toml", "x.toml cannot be read: it is a pipe or a device", change=pipe("x.toml")),
    Case("run sst2 --config x.toml", "x.toml cannot be read: Invalid value", change=write("x.toml", "seed = nosuch")),
    Case("run sst2 --config x.json", "x.json is not valid JSON: ", change=write("x.json", "{")),
    Case(
        "run sst2 --config x.json",
        "x.json: the options and their set must be tables, got",
        change=write("x.json", "[1]"),
    ),
    Case(
        "run sst2 --config x.json", "Unknown option 'sead'. Did you mean 'seed'?", change=write("x.json", '{"sead": 1}')
    ),
    Case(
        "run sst2 --config x.toml",
        "shots must be a whole number or none, got True",
        change=write("x.toml", "shots = true"),
    ),
    Case(
        "run sst2 --config x.toml", "cache must be a text or none, got 5.", change=write("x.toml", "[set]\ncache = 5")
    ),
    Case(
        "run --config run/config.json",
        "run/config.json: model must be a text, got None.",
        change=edit("run/config.json", at("run", "model", to=None)),
    ),
    # -- run: resuming -------------------------------------------------------------------------------------
    Case(
        "run qnli --out run --resume",
        "--resume needs the configuration that run was started with; these differ: stream",
    ),
    Case(
        "run qnli,sst2 --out run --resume",
        "run/config.json is not valid JSON",
        1,
        change=write("run/config.json", "{"),
    ),
    Case(
        "run qnli,sst2 --out run --resume",
        "run cannot be resumed: labels, label words",
        1,
        change=edit("run/config.json", without("tasks", 1)),
    ),
    Case(
        "run qnli,sst2 --out run --resume --seed 0 --seed 1",
        "--out 'run/grafting-continual/seed-1' cannot be written: File exists.",
        change=write("run/grafting-continual/seed-1", ""),
    ),
    # -- Data ----------------------------------------------------------------------------------------------
    Case("run sst2", "train.jsonl cannot be read: it is a pipe or a device", 1, pipe("data/sst2/train.jsonl")),
    # -- Models --------------------------------------------------------------------------------------------
    Case("run sst2", "model/config.json is not valid JSON", 1, write("model/config.json", "{")),
    Case("run sst2", "Model 'model' cannot be loaded: ", 1, cut("model/model.safetensors")),
    # -- graft ---------------------------------------------------------------------------------------------
    Case("graft", "No stream was given. data contains ag_news, qnli, sst2."),
    Case("graft qnli,sst2", "Expected one task, got the 2 of 'qnli,sst2'"),
    Case(
        "graft sst2 --fine-tuned nosuch",
        "--fine-tuned 'nosuch' is no model. Expected a directory in Hugging Face layout",
    ),
    Case("graft sst2 --fine-tuned model", "--fine-tuned 'model' is BertModel without a head"),
    Case("graft sst2 --out graft", "--out 'graft' is not empty: it contains bare-graft, config.json"),
    *(Case(f"{job} --log x", "Unknown --log 'x'.") for job in ("run sst2", "graft sst2")),
    *(
        case
        for job in ("run sst2", "graft sst2")
        for case in (
            Case(f"{job} --check --model nowhere/at/all", "The model directory 'nowhere/at/all' does not exist."),
        )
    ),
    # -- Missing files and columns -------------------------------------------------------------------------
    *(
        Case(line, " does not exist. Check the name and the current directory.")
        for line in (
            "report nosuch",
            "predict runs/nosuch --deterministic x",
            "predict run --file nosuch.csv",
            "export nosuch",
            "serve nosuch --deterministic",
            "apply me/mine",
            "ledger show nosuch --json",
            "ledger verify nosuch --json",
            "run sst2 --on nosuch",
        )
    ),
    *(
        Case(f"{command} sst2 --{column}-column phrase", f"no column 'phrase', which {column}_column names", 1)
        for command in ("run", "graft")
        for column in ("text", "label")
    ),
    # -- Shared by run and graft -----------------------------------------------------------------
    *(
        Case(f"{command} {flags}", message)
        for command in ("run sst2", "graft sst2")
        for flags, message in (
            ("--learning-rate fast", "learning_rate must be a number, got 'fast'."),
            ("--learning-rate 1 --set learning_rate=2", "--learning-rate and --set learning_rate=2 are both given."),
            ("--batch-size 0", "batch_size must be at least 1, got 0."),
            ("--precision fp8", "precision must be fp32 or bf16 or fp16 or auto, got 'fp8'."),
            ("--test-limit 0", "test_limit must be at least 1, got 0."),
            ("--threads 0", "threads must be at least 1, got 0."),
            ("--cache model/config.json", "--cache 'model/config.json' cannot be written: File exists."),
            ("--jobs 0", "--jobs must be auto, ray or at least 1, got 0."),
            (
                "--resume --out nosuch",
                "There is nothing to resume in 'nosuch'. Give the --out of the run to resume, or leave",
            ),
            ("--resume --resume", "--resume is given twice. Give it once."),
            ("--steps 0", "steps must be at least 1, got 0."),
            ("--config nosuch.json", "nosuch.json cannot be read: No such file or directory."),
            ("--kind nosuch", "Unknown kind of task 'nosuch'."),
            ("--metric acuracy", "Unknown metric 'acuracy'. Did you mean 'accuracy'?"),
            ("--device tpu", "Unknown --device 'tpu'. Did you mean 'cpu'? Known: auto, "),
            ("--seed -1", "--seed must be at least 0, got -1."),
            (
                "--readout magic",
                "--readout must be auto or prompt or linear or mean or causal or generate, got 'magic'.",
            ),
        )
    ),
    # -- report --------------------------------------------------------------------------------------------
    Case("report", "The following arguments are required: DIR."),
    Case("report run --format pdf", "Unknown --format 'pdf'. Known: csv, html, json, latex, markdown, rich."),
    Case("report data", "data contains no results: it has no config.json. Give the directory that", 1),
    Case("report run", "run/config.json is not valid JSON", 1, cut("run/config.json")),
    Case("report run", "scores.csv is not the file that its unit wrote", 1, cut(f"{STRATEGY}/seed-0/scores.csv")),
    # -- predict -------------------------------------------------------------------------------------------
    Case("predict", "The following arguments are required: DIR.", bare=True),
    Case("predict run x", "There are several tasks: qnli, sst2. Choose one with --task.", bare=True),
    Case(f"predict {STRATEGY} x", "run/grafting-continual/config.json cannot be read: No such file or directory.", 1),
    *(
        Case(
            f"{command} run --strategy lora --seed 7",
            "run has no model or ledger of lora of seed 7 to predict with. It has those of: grafting-continual (seed-0).",
            1,
        )
        for command in ("predict", "export", "serve")
    ),
    Case(
        "predict run --keep id --text-column review --device tpu x",
        "--text-column names a column of --file, which must be a csv, tsv, json, jsonl or parquet file.",
    ),
    Case(
        "predict run --file data/sst2/test.jsonl --keep label --csv",
        "--keep label is also the name of a column that predict writes. Rename it in data/sst2/test.jsonl.",
    ),
    Case(
        "predict run --tsak sst2 x", "Unknown flag of 'forgetfree predict' '--tsak'. Did you mean '--task'?", bare=True
    ),
    Case("ledger --modle model verify x", "Unknown flag of 'forgetfree ledger' '--modle'."),
    Case(
        "predict run --task qnli one", "Task 'qnli' reads pairs of texts, got 1 text(s) in 'one'. Give the two as two"
    ),
    Case(
        "predict run data/sst2/test.jsonl",
        "'data/sst2/test.jsonl' is the name of a file, but TEXT arguments are classified themselves.",
    ),
    Case("predict run", "The texts on stdin are not in UTF-8: ", stdin=b"good\n\xff\n"),
    Case("predict run --task qnli", "Task 'qnli' reads pairs of texts", stdin=b"one\n"),
    Case("predict run x", "ledger.safetensors is not the file that its unit wrote", 1, flip(LEDGER)),
    Case("predict run --json --csv x", "--json and --csv are both given. Give one of them."),
    Case("predict run --file data/sst2/test.jsonl x", "--file and texts are both given. Give one of them."),
    Case("predict run --file data", "data has an unknown format: expected a name that ends in .parquet, .jsonl,", 1),
    Case(
        "predict run --file x.jsonl", "row 1, column 'text': expected a text, got 5", 1, write("x.jsonl", '{"text": 5}')
    ),
    Case('predict run ""', "Text 1 is empty. Write it, or leave it out."),
    # -- export --------------------------------------------------------------------------------------------
    Case("export run", "The following arguments are required: --task, --out.", bare=True),
    Case("export run --merge", "Nothing is to be merged: the task is in the weights themselves. Leave --merge out."),
    Case("export run --model other", "The ledger belongs to a model of another layout: GPT2Model does not fit", 1),
    # -- serve ---------------------------------------------------------------------------------------------
    Case("serve run --port 70000", 'Invalid value "70000" for --port. Must be < 65536.'),
    Case("serve run --model nosuch/ --device tpu", "Unknown --device 'tpu'. Did you mean 'cpu'?"),
    Case("serve run --host 192.0.2.1", "The server cannot listen on 192.0.2.1, port 0: "),
    Case("serve run --most-tokens 0", 'Invalid value "0" for --most-tokens. Must be >= 1.'),
    Case(
        "serve run --allow-host my.site --allow-origin my.site",
        "--allow-origin must be an origin such as https://my.site or",
    ),
    # -- ledger --------------------------------------------------------------------------------------------
    Case("ledger", "The following arguments are required: ACTION. See 'forgetfree ledger --help'."),
    Case("ledger shw x", "Unknown action 'shw'. Did you mean 'show'? Known: show, verify."),
    Case(f"ledger show {GRAFT}", "is no ledger: expected the format 'forgetfree.ledger', got 'forgetfree.graft'.", 1),
    Case(f"ledger verify {LEDGER}", "is not a sound ledger: ", 1, flip(LEDGER)),
    Case(
        f"ledger verify {LEDGER} --model other",
        "The ledger belongs to a model of another layout: GPT2Model does not fit",
        1,
    ),
    Case(f"ledger show {LEDGER} --model model", "Unknown flag of 'forgetfree ledger show' '--model'."),
    # -- apply ---------------------------------------------------------------------------------------------
    Case("apply", "The following arguments are required: GRAFT, --out.", bare=True),
    Case(
        "apply run",
        "'run' must hold one graft file, got none. Give the path of a graft.safetensors. To write a task of a run: "
        "forgetfree export.",
    ),
    Case(f"apply {LEDGER}", "is no graft: expected the format 'forgetfree.graft', got 'forgetfree.ledger'.", 1),
    Case("apply graft", "is not a sound graft: ", 1, flip(GRAFT)),
    Case("apply graft --out graft", "--out 'graft' exists and is not an empty directory. Give another one."),
    # -- fetch ---------------------------------------------------------------------------------
    Case("fetch", "The following arguments are required: NAME (smollm2)."),
    Case(
        "fetch minilm",
        "Unknown argument 'minilm'. Known: smollm2.",
    ),
    Case("run sst2 --jobs slurm", "--jobs must be a number, auto, ray or ray://HOST:PORT, got 'slurm'."),
    Case(
        "run --on run --without nosuch --out C --resume --data data --model model",
        "run did not learn a task 'nosuch'.",
        1,
        bare=True,
    ),
]


# -- The files ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, data_directory: Path, model_directory) -> Path:
    """Return a folder with models and data, and a run and a graft on them."""
    place = tmp_path_factory.mktemp("world")
    shutil.copytree(data_directory, place / "data")
    for name, kind in (("model", "bert"), ("other", "gpt2"), ("masked", "bert-mlm")):
        shutil.copytree(model_directory(kind), place / name)
    before = Path.cwd()
    os.chdir(place)
    try:
        for line in (
            "run qnli,sst2 --out run",
            "run qnli --model masked --out prompts",
            "graft sst2 --out graft",
        ):
            assert cli.main(Case(line, "").arguments) == 0
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def place(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a copy of that folder, as the working directory."""
    place = tmp_path / "place"
    shutil.copytree(world, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield place


def held(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.line[:60]} | {case.message[:30]}")
def test_bad_input_ends_in_one_paragraph(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    case.change(place)
    before = held(place)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(case.stdin), encoding="utf-8"))
    code = cli.main(case.arguments)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("forgetfree: error: "))
    at_once = (
        "The data directory",
        "Unknown stream",
        "Unknown task",
        "Expected one task",
    )
    is_at_once = case.message.startswith(at_once) or " is not empty: it contains " in case.message
    assert start == 0 or not is_at_once, "it is told before anything else"
    first, *more = lines[start:]
    if more:  # several faults, one per line
        assert first == f"forgetfree: error: {len(more)} faults:" and len(more) > 1
    assert not any("error" in note for note in lines[:start])
    paragraphs = [line.removeprefix("- ") for line in more] or [first]
    assert any(case.message in paragraph for paragraph in paragraphs)
    assert code == case.code
    for paragraph in paragraphs:
        assert "Traceback" not in printed.err and "fault of forgetfree" not in paragraph
        told = " must " in paragraph and ", got " in paragraph  # the expected value is the remedy
        assert paragraph.endswith(".") and (told or re.search(r"[.?)] [A-Z'-]", paragraph)), (
            "what to do, in whole sentences"
        )
        assert len(paragraph) < 4100 and paragraph.isprintable()
    assert printed.out == ""
    assert held(place) == before


def test_there_are_many_cases_and_every_flag_of_every_command_is_among_them() -> None:
    assert len(CASES) >= 120

    def flags(app: App, *chain: str) -> Iterator[str]:
        if app.default_command:
            for argument in app.assemble_argument_collection(default_parameter=cli.app.default_parameter):
                if argument.show and argument.field_info.is_keyword_only and argument.name != "--debug":
                    yield from (f"{' '.join(chain)} {name}" for name in argument.names)
        for name in app:
            if not name.startswith("-"):
                yield from flags(app[name], *chain, name)

    given = set()
    for case in CASES:
        words = case.arguments
        name = " ".join(words[: 2 if words[:1] == ["ledger"] else 1])
        given |= {f"{name} {word}" for word in words if word.startswith("--")}
    assert set(flags(cli.app)) - given == set()


def test_texts_that_look_like_flags_follow_two_dashes(place: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["predict", "run", "--task", "sst2", "--", "--lovely", "-5"]) == 0
    assert [line.split("\t")[2] for line in capsys.readouterr().out.splitlines()] == ["--lovely", "-5"]
