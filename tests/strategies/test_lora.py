"""LoRA and O-LoRA: the effect of adapters on a model, their training, and their file."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.benchmarks.scenarios.deprecated.generators import tensors_benchmark
from avalanche.core import SupervisedPlugin
from compared import assert_same, everything, logits
from damage import note, rewrite, sealed, told
from small_strategies import learned_rows, make
from torch import nn

from forgetfree.continual.stream import benchmark_stream
from forgetfree.errors import OptionError, RunError
from forgetfree.models.lora_adapters import LoraAdapters, targets
from forgetfree.strategies.lora import adapter_training
from forgetfree.tensor_file import OpenFile

MODELS = {"bert": "linear", "roberta-mlm": "prompt", "gpt2-lm": "causal"}
BOTH = ["lora", "o-lora"]
MakeStream = Callable[..., Any]


# -- The effect of adapters --------------------------------------------------------------------------------


@pytest.mark.sampled("gpt2-lm-o-lora")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", ["bert", "gpt2-lm"])
def test_adapters_add_their_scaled_products_to_the_weight(tiny_stream: MakeStream, kind: str, name: str) -> None:
    """W_pre + (α/r)·B·A, written into a plain model by hand (transposed in GPT-2), gives the strategy's logits.

    The sum has the task's own adapters for LoRA, and those of all three tasks for O-LoRA.
    """
    stream, plain = (tiny_stream(kind, MODELS[kind]) for _ in range(2))
    strategy = make(name, stream, rank=2, lora_alpha=6)
    rows = learned_rows(strategy)
    suffixes = ("query", "value") if kind == "bert" else ("c_attn",)
    for acting in ["task-1"] if name == "lora" else ["task-0", "task-1", "task-2"]:
        tensors = strategy.adapters.adapters.tensors(acting)
        layers = sorted({key.partition(".lora_")[0] for key in tensors})
        assert len(layers) == 2 * len(suffixes) and all(layer.endswith(suffixes) for layer in layers)
        for layer in layers:
            product = 3 * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
            with torch.no_grad():
                weight = plain.model.backbone.get_submodule(layer).weight
                weight.add_(product.T if kind == "gpt2-lm" else product)
    plain.model.readouts.load_state_dict(stream.model.readouts.state_dict())
    x, _, t = plain.tasks[1].test.batch(range(16))
    with torch.no_grad():
        by_hand = plain.model.eval()(x, t)
    torch.testing.assert_close(rows[-1]["ag_news"], by_hand, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rows[0]["ag_news"], by_hand, atol=1e-2)


def test_the_layers_to_adapt_can_be_named(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("roberta-mlm", "prompt")
    backbone, space = stream.model.backbone, stream.model.space()
    everywhere = targets(backbone, space, ".")
    assert len(everywhere) == 12  # query, key, value, output, and two feed-forward in two layers; none in the head
    assert all(".encoder.layer." in f".{name}" for name in everywhere)
    assert targets(backbone, space, r"layer\.1.*key") == ["roberta.encoder.layer.1.attention.self.key"]
    backbone.config.model_type = "an architecture that PEFT does not know"
    assert targets(backbone, space) == everywhere
    strategy = make("lora", tiny_stream("bert", "linear"), target_modules=r"layer\.0.*intermediate")
    learned_rows(strategy)
    assert list(strategy.adapters.adapters.projections("task-0")) == ["encoder.layer.0.intermediate.dense"]


def test_adapters_share_every_tensor_with_the_backbone(tiny_stream: MakeStream) -> None:
    backbone = tiny_stream("bert", "linear").model.backbone
    adapters = LoraAdapters(backbone)
    own = {id(tensor) for tensor in (*backbone.parameters(), *backbone.buffers())}
    assert {id(tensor) for tensor in (*adapters.model.parameters(), *adapters.model.buffers())} == own
    assert not {id(module) for module in backbone.modules()} & {id(module) for module in adapters.model.modules()}


def test_torchs_own_encoder_layers_are_not_adapted() -> None:
    """In evaluation, these layers read their weights directly and would skip an adapter."""
    from forgetfree.core.parameters import ParameterSpace

    encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), encoder, nn.MultiheadAttention(8, 2))
    assert targets(model, ParameterSpace.of(model)) == ["0"]


def test_adapters_learn_at_ten_times_the_rate_unless_told_otherwise(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear")
    options = adapter_training(make("lora", stream, learning_rate=1e-3, lora_learning_rate=None, l1=0.1).options)
    assert (options.learning_rate, options.readout_learning_rate, options.l1) == (pytest.approx(1e-2), 1e-3, 0)
    options = adapter_training(make("lora", stream, lora_learning_rate=0.3, readout_learning_rate=0.2).options)
    assert (options.learning_rate, options.readout_learning_rate) == (0.3, 0.2)


@pytest.mark.parametrize(("start", "alike"), [("new", []), ("previous", [(0, 1), (0, 2), (1, 2)])])
def test_adapters_may_start_from_those_of_the_task_before(
    tiny_stream: MakeStream, start: str, alike: list[tuple[int, int]]
) -> None:
    """With a rate of nearly 0, A stays that of the previous task, or the random one that PEFT draws by the task's name."""
    strategy = make("lora", tiny_stream("bert", "linear"), adapter_start=start, lora_learning_rate=1e-30)
    for experience in strategy.stream.benchmark.train_stream:
        strategy.train(experience)
    adapters = [record.group("adapter") for record in strategy.adapters.records.values()]
    names = [name for name in adapters[0] if "lora_A" in name]
    for one, other in combinations(range(3), 2):
        same = [torch.equal(adapters[one][name], adapters[other][name]) for name in names]
        assert same == [(one, other) in alike] * len(names) and names


# -- Orthogonality -----------------------------------------------------------------------------------------


def test_the_loss_has_the_penalty_in_training_alone(tiny_stream: MakeStream) -> None:
    """The penalty is λ·Σ_i over both earlier tasks, measured at the first step of the third."""
    seen: list[float] = []

    class Watch(SupervisedPlugin):
        def after_forward(self, strategy: Any, **_: Any) -> None:
            if len(strategy.adapters.records) == 2 and not seen:
                plain = nn.functional.cross_entropy(strategy.mb_output, strategy.mb_y)
                newest = strategy.adapters.adapters.projections("task-2")
                products = [
                    a @ newest[layer].T
                    for name in ("task-0", "task-1")
                    for layer, a in strategy.adapters.adapters.projections(name).items()
                ]
                by_hand = (torch.stack(products) ** 2).sum()
                seen.extend([(strategy.criterion() - plain).item(), 0.7 * by_hand.item()])

        def after_eval_forward(self, strategy: Any, **_: Any) -> None:
            assert strategy.criterion() == nn.functional.cross_entropy(strategy.mb_output, strategy.mb_y)

    learned_rows(make("o-lora", tiny_stream("bert", "linear"), plugins=[Watch()], orthogonality=0.7))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4) and seen[1] > 0.01


# -- The file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_a_strategy_with_other_options_answers_and_learns_on(
    tiny_stream: MakeStream, name: str, tmp_path: Path
) -> None:
    """Tasks in the file keep the options of the file, and the next task uses those of the strategy."""
    strategy = make(name, tiny_stream(), lora_dropout=0.1)
    for experience in list(strategy.stream.benchmark.train_stream)[:2]:
        strategy.train(experience)
    strategy.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapters.safetensors"]
    again = make(name, tiny_stream(), rank=2, lora_alpha=3)
    again.load(tmp_path)
    assert_same(logits(again), logits(strategy))
    assert again.bytes_kept() == strategy.bytes_kept()
    again.train(again.stream.benchmark.train_stream[2])
    again.save(tmp_path)
    last = make(name, tiny_stream())
    last.load(tmp_path)
    assert_same(logits(last), logits(again))


def test_what_is_kept_is_adapters_and_readouts(tiny_stream: MakeStream, tmp_path: Path) -> None:
    """Rank 4, width 16, two layers, query and value: 4·4·(16 + 16) numbers a task; readouts have 17·(2 + 4 + 2)."""
    strategy = make("lora", tiny_stream("bert", "linear"))
    assert strategy.bytes_kept() == 0
    learned_rows(strategy)
    assert strategy.bytes_kept() == 4 * (3 * 4 * 4 * 32 + 17 * 8)
    strategy.save(tmp_path)
    tasks = json.loads(OpenFile(tmp_path / "adapters.safetensors").metadata["tasks"])
    config = tasks[0]["fields"]
    layers = "|".join(
        f"encoder\\.layer\\.{i}\\.attention\\.self\\.{part}" for i in range(2) for part in ("query", "value")
    )
    assert config == {"r": 4, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": layers}
    assert [task["task"] for task in tasks] == ["qnli", "ag_news", "sst2"]


@pytest.fixture(scope="module")
def saved(tiny_stream: MakeStream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    strategy = make("lora", tiny_stream("bert", "linear"))
    learned_rows(strategy)
    directory = tmp_path_factory.mktemp("saved")
    strategy.save(directory)
    return directory / "adapters.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: rewrite(path, sealed(told(0, r=5))), "'qnli'.r must be the rank of .*, got 5"),
        (lambda path: rewrite(path, sealed(note("together", "3"))), "together must be true or false, got 3"),
        (lambda path: rewrite(path, sealed(note("binding", "{}"))), "network is missing"),
        (lambda path: path.unlink(), "adapters.safetensors cannot be read"),
    ],
    ids=["rank", "together", "binding", "gone"],
)
def test_a_damaged_file_is_refused_with_the_reason(
    tiny_stream: MakeStream, saved: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / saved.name
    path.write_bytes(saved.read_bytes())
    damage(path)
    strategy = make("lora", tiny_stream("bert", "linear"))
    before = logits(strategy)
    with pytest.raises(RunError, match=message):
        strategy.load(tmp_path)
    assert_same(logits(strategy), before)
    assert strategy.learned == []


def test_a_file_of_something_else_is_refused(tiny_stream: MakeStream, saved: Path) -> None:
    with pytest.raises(RunError, match=r"each alone \(lora\).*uses them all together \(o-lora\)"):
        make("o-lora", tiny_stream("bert", "linear")).load(saved.parent)
    with pytest.raises(RunError, match="belong to other weights"):
        make("lora", tiny_stream("bert-pooler", "linear")).load(saved.parent)
    with pytest.raises(RunError, match="contains the task 'ag_news', which is not in this stream"):
        make("lora", tiny_stream("bert", "linear", stream="qnli,sst2")).load(saved.parent)
    with pytest.raises(RunError, match="do not fit the readout of 'qnli'"):
        make("lora", tiny_stream("bert", "linear", scenario="class")).load(saved.parent)
    with pytest.raises(RunError, match=r"would make other predictions than before: max_length \(expected 48, got 20\)"):
        make("lora", tiny_stream("bert", "linear", max_length=20)).load(saved.parent)


# -- Any network -----------------------------------------------------------------------------------------------


def _benchmark() -> Any:
    """Return two tasks of two classes each, with task labels; rows have 8 numbers."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for task in range(2):
        y = torch.arange(24) % 2 + 2 * task
        tensors.append((torch.randn(24, 8, generator=generator) + y[:, None], y))
    return tensors_benchmark(train_tensors=tensors, test_tensors=tensors, task_labels=[0, 1])


@pytest.mark.parametrize("name", BOTH)
def test_buffers_that_training_changes_come_and_go_with_their_adapters(name: str, tmp_path: Path) -> None:
    """BatchNorm's running statistics change in every forward pass of training."""

    def stream() -> Any:
        torch.manual_seed(0)
        return benchmark_stream(_benchmark(), nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))

    strategy = make(name, stream())
    before = everything(strategy.stream.model.backbone)
    rows = learned_rows(strategy)
    kept = [set(record.group("buffer")) for record in strategy.adapters.records.values()]
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert kept == ([statistics, statistics] if name == "lora" else [set(), statistics])
    steps = [
        int(buffers["1.num_batches_tracked"])
        for record in strategy.adapters.records.values()
        if (buffers := record.group("buffer"))
    ]
    assert steps == ([4, 4] if name == "lora" else [8])
    assert torch.equal(rows[1]["experience-0"], rows[2]["experience-0"]) == (name == "lora")
    assert_same(everything(strategy.stream.model.backbone), before)
    strategy.save(tmp_path)
    again = make(name, stream())
    again.load(tmp_path)
    assert_same(logits(again), rows[-1])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("quary", "found none to adapt in BertModel by target_modules='quary'.*Name some"), ("(", "regular expression")],
)
def test_target_modules_must_name_layers(tiny_stream: MakeStream, pattern: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make("o-lora", tiny_stream("bert", "linear"), target_modules=pattern)
