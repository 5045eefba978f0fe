"""What two processes of a test train as one; a module of its own, so that the second process can import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from forgetfree.core.base_regions import most_moved
from forgetfree.core.batch_loss import CrossEntropy
from forgetfree.core.mask import MaskOptions, MaskSearch
from forgetfree.core.readout_model import TaskHead
from forgetfree.core.regions import Region
from forgetfree.core.saliency import mean_gradient, most_salient
from forgetfree.core.trained import RegionParameters, in_training, trainable
from forgetfree.data.examples import EncodedRows
from forgetfree.errors import RunError
from forgetfree.jobs.running.unit import Unit
from forgetfree.models.loading import load_model
from forgetfree.models.task_model import TaskModel
from forgetfree.parallel import exchange
from forgetfree.parallel.exchange import connected, joined, meeting_point
from forgetfree.parallel.parts import NumberedLoss
from forgetfree.training.loop import fine_tune, predict
from forgetfree.training.monitor import Monitor
from forgetfree.training.training_options import TrainingOptions

#: Entries in training; odd, so that their vector cannot be cut evenly.
ENTRIES = 13


def loaded(directory: str) -> TaskModel:
    model = load_model(directory, "linear").model
    model.add_task(TaskHead("task", 3))
    return model


def rows_of(model: TaskModel) -> Any:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 13, (13,), generator=draw).tolist()
    rows = [torch.randint(10, 100, (length,), generator=draw).tolist() for length in lengths]
    return EncodedRows.of(rows, torch.randint(0, 3, (13,), generator=draw).tolist(), 0, model.tokens.pad)


def train(directory: str) -> dict[str, Any]:
    """Fine-tune everything, train a region, take steps of the mask search, and answer."""
    torch.set_num_threads(1)
    model, made = loaded(directory), {}
    rows, space = rows_of(model), model.space()
    options = TrainingOptions(
        parts=4, batch_size=8, optimizer="adamw", learning_rate=1e-3, max_gradient_norm=1.0, l1=1e-4
    )
    theta_pre, losses = space.flatten(model.backbone), list[float]()

    def after(name: str, begin: int) -> None:
        made[name] = space.flatten(model.backbone)
        made[f"{name} sent"] = exchange.bytes_sent() - begin

    begin = exchange.bytes_sent()
    # 13 rows make a batch of 8 and one of 5 an epoch: some parts of the latter have a row more, or less, than others.
    fine_tune(model, rows, options, steps=4, seed=1, on_step=lambda step, loss: losses.append(loss))
    after("fine-tuned", begin)
    made["losses"], made["readout"] = losses, model.readout_module(0).weight.detach().clone()
    theta_ft = space.flatten(model.backbone)

    region = Region(torch.arange(0, len(space), len(space) // ENTRIES)[:ENTRIES])
    begin = exchange.bytes_sent()
    fine_tune(model, rows, options, steps=3, seed=2, trained=RegionParameters(model.backbone, space, region))
    after("region", begin)

    space.load_(model.backbone, theta_pre)
    model.eval()
    search = MaskSearch(
        model.backbone,
        space,
        theta_pre,
        theta_ft,
        Region(torch.arange(5)),
        MaskOptions(learning_rate=1e4),
        NumberedLoss(CrossEntropy(model, torch.device("cpu"), "fp32"), space.parameters(model.backbone), 4),
    )
    batch = [rows.batch([row]) for row in range(7)]  # fewer in the first part than in the others
    made["mask losses"] = [search.step_(batch, step) for step in (1, 2)]
    made["scores"] = search.scores()
    made["logits"] = predict(model, rows, batch_size=3)
    return made


def follow(directory: str, port: int) -> None:
    store = meeting_point(2, port)
    store.set("here", "")
    with connected(1, 2, store), joined():
        train(directory)
        for value in ("same", "other"):
            try:
                exchange.check_alike("values", value, "Look.")
            except RunError:
                continue
    # and this process ends, without a word


def first_five(model: Any) -> Callable[..., torch.Tensor]:
    """Return what answers rows with five numbers of their first hidden states."""

    def forward(x: torch.Tensor, t: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = model(x).last_hidden_state[:, 0, :5]
        return logits

    return forward


def drawn() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return two mini-batches of rows for `first_five`."""
    draw = torch.Generator().manual_seed(4)
    return [
        (torch.randint(10, 100, (3, 6), generator=draw), torch.randint(0, 5, (3,), generator=draw), torch.zeros(3))
        for _ in range(2)
    ]


def skill(model: Any, search: Any, tensors: list[Any], reset: Any, trained_of: Any) -> tuple[Any, ...]:
    """Search for a mask, and train its region from θ_pre."""
    batch = drawn()
    with trainable(model, tensors):
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)  # as an earlier backward pass may have left it
        losses = [search.step_(batch, step) for step in (1, 2, 3)]
    begun, region = (search.region(step, 40) for step in (0, 3))
    reset()
    trained = trained_of(region)
    optimizer = torch.optim.AdamW(trained.parameters, lr=1e-2)
    with in_training(model, trained, [], sampling=False):
        for x, y, _ in batch:
            torch.nn.functional.cross_entropy(first_five(model)(x), y).backward()  # type: ignore[no-untyped-call]
            trained.collect()
            optimizer.step()
            trained.write()
    reset()
    return losses, begun, region, trained.values.detach()


def sharded(directory: str, rank: int, size: int, store: Any, out: str) -> None:
    """Shard a model over processes, put a graft on it and take it off again, build a ledger from it, and learn a region."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from forgetfree.core.graft import grafted
    from forgetfree.core.parameters import ParameterSpace
    from forgetfree.errors import RegionError
    from forgetfree.ledger import Ledger
    from forgetfree.ledger.graft import Graft
    from forgetfree.ledger.records import Record
    from forgetfree.parallel.sharded import ShardedMaskSearch, ShardedRegion, ShardedSpace, Shards

    model = loaded(directory).backbone
    space, x = ParameterSpace.of(model), torch.arange(10, 22).view(2, 6)
    draw = torch.Generator().manual_seed(3)
    first, second = (Region(torch.randperm(len(space), generator=draw)[:n].sort().values) for n in (300, 200))
    values = torch.randn(300, generator=draw)
    values[:2] = torch.tensor([-0.0, 0.0])
    graft = Graft(first, values)

    def ledger_of(own: ParameterSpace, its: Any) -> bytes:
        ledger = Ledger(own, "0" * 64)
        with grafted(its, own, first, values):
            ledger.append(Record("one", first, Graft.of(its, own, first), 0.1))
        left = second - first
        ledger.append(Record("two", second, Graft.of(its, own, left), 0.1))
        path = f"{out}-{rank}-{type(own).__name__}"
        ledger.save(path)
        with open(path, "rb") as file:
            return file.read()

    def answer(its: Any) -> torch.Tensor:
        with torch.no_grad():
            hidden: torch.Tensor = its(x).last_hidden_state
        return hidden

    model.eval()
    whole = [answer(model), space.gather(model, first.indices), ledger_of(space, model)]
    with grafted(model, space, first, values):
        whole.append(answer(model))
    theta_pre, how = space.flatten(model), MaskOptions(learning_rate=1e4)
    theta_ft = theta_pre + 0.1 * torch.randn(len(space), generator=draw)
    theta_ft[::7] = theta_pre[::7]
    base, own_of = most_moved(theta_pre, theta_ft, 10), partial(RegionParameters, model, space)
    loss = CrossEntropy(first_five(model), torch.device("cpu"), "fp32")
    search, tensors = MaskSearch(model, space, theta_pre, theta_ft, base, how, loss), space.parameters(model)
    mean, _ = mean_gradient(model, space, drawn(), loss)
    expected = skill(model, search, tensors, lambda: space.load_(model, theta_pre), own_of)
    assert answer(model).equal(whole[0]) and len(expected[2] - base) > 0 and not expected[3].equal(theta_pre[:40])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        own = ShardedSpace.of(model)
        assert own.layout_hash == space.layout_hash
        assert max(each.to_local().numel() for each in own.parameters(model)) < max(t.size for t in own.tensors)  # type: ignore[attr-defined]
        before = answer(model)
        assert torch.equal(before, whole[0])
        assert torch.equal(own.gather(model, first.indices), whole[1])
        replaced = graft.apply_(model, own)
        assert torch.equal(own.gather(model, first.indices).view(torch.int32), values.view(torch.int32))  # −0 stays −0
        assert torch.equal(answer(model), whole[3]) and not torch.equal(whole[3], whole[0])
        replaced.apply_(model, own)
        assert torch.equal(answer(model), whole[0])
        assert ledger_of(own, model) == whole[2]
        for refused in (own.flatten, lambda its: own.load_(its, values)):
            try:
                refused(model)
            except RegionError:
                continue
            raise AssertionError("a vector of the model's size was made")
        shards = Shards(model, own)
        at = shards.whole(Region(torch.arange(len(shards.space)))).indices
        assert len(at) < 0.6 * len(space) and torch.equal(shards.values(), theta_pre[at])
        pre, ft = theta_pre[at], theta_ft[at]
        assert shards.most_moved(pre, ft, 10) == base
        assert torch.allclose(slope := shards.mean_gradient(drawn(), loss), mean[at], rtol=1e-4, atol=1e-7)
        assert shards.most_salient(slope.abs(), 50) == most_salient(mean.abs(), 50)
        searched = ShardedMaskSearch(shards, pre, ft, base, how, loss)
        made = skill(
            model,
            searched,
            shards.tensors,
            lambda: shards.space.load_(shards.module, pre),
            partial(ShardedRegion, model, own),
        )
        assert made[:3] == expected[:3] and torch.equal(made[3], expected[3])
        assert torch.allclose(searched.shift, search.shift[at], rtol=1e-5, atol=1e-9)
    finally:
        dist.destroy_process_group()


def shard_too(directory: str, port: int, out: str) -> None:
    """Be the second of two processes that hold a model."""
    torch.set_num_threads(1)
    store = meeting_point(2, port)
    store.set("here", "")
    sharded(directory, 1, 2, store, out)


def tell_surroundings(unit: Unit, monitor: Monitor) -> None:
    """A unit's work: write down where it is done."""
    told = f"{os.environ.get('FORGETFREE_TOLD')} {os.getcwd()}"
    unit.directory.with_suffix(".txt").write_text(told)
