"""What two processes of a test train as one; a module of its own, so that the second process can import it."""

from __future__ import annotations

from typing import Any

import torch

from forgetfree.core import exchange
from forgetfree.core.exchange import connected, joined, meeting_point
from forgetfree.core.mask import MaskOptions, MaskSearch
from forgetfree.core.readout_model import TaskHead
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters
from forgetfree.data.encoding import EncodedRows
from forgetfree.errors import RunError
from forgetfree.learning.training import TrainingOptions, fine_tune, predict
from forgetfree.models.loading import load_model
from forgetfree.models.task_model import TaskModel

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
        model.backbone, space, theta_pre, theta_ft, Region(torch.arange(5)), MaskOptions(parts=4, learning_rate=1e4)
    )
    batch = [rows.batch([row]) for row in range(7)]  # fewer in the first part than in the others
    made["mask losses"] = [search.step_(batch, model, step) for step in (1, 2)]
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
