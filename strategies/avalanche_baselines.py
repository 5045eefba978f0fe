"""The classic baselines, as Avalanche implements them; `forgetfree.continual.adapter` turns them into strategies.

Defaults suit fine-tuning a pre-trained model for a few hundred steps with small batches. docs/baselines.md lists them all in
one table, with the data that each stores and the fixes to Avalanche's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from avalanche.training import plugins as avalanche
from avalanche.training import supervised
from avalanche.training.storage_policy import ClassBalancedBuffer
from avalanche.training.supervised.der import ClassBalancedBufferWithLogits
from torch import Tensor, nn

from forgetfree.continual.adapter import ImportanceStrategy, PluginStrategy, TemplateStrategy, one_label_a_row, showing
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.stream import Stream
from forgetfree.core.readout_model import LOWEST
from forgetfree.errors import OptionError
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import TrainingOptions

# -- Rehearsal -------------------------------------------------------------------------------------------


def _a_row_a_task(options: Any, stream: Stream) -> None:
    if options.mem_size < len(stream.tasks):  # Avalanche cannot join memories of no row
        raise OptionError(
            f"replay divides its memory among the tasks, got mem_size={options.mem_size} for {len(stream.tasks)} "
            f"tasks. Set mem_size={len(stream.tasks)} or more."
        )


class Replay(
    PluginStrategy,
    plugin=avalanche.ReplayPlugin,
    requires=_a_row_a_task,
    mem_size=option(200, "number of stored examples, over all tasks together", at_least=1),
    batch_size_mem=option(8, "number of stored examples added to each batch", at_least=1),
):
    """Experience replay: add examples of earlier tasks to each batch (Chaudhry et al., 2019, arXiv:1902.10486, alg. 1)."""


def _a_row_a_label(name: str, options: Any, stream: Stream) -> None:
    apart = stream.scenario == "task"
    labels = len({(task.label if apart else 0, group) for task in stream.tasks for group in {*task.train.targets}})
    if options.mem_size < labels:
        raise OptionError(
            f"{name} divides its memory among the labels of all tasks, got mem_size={options.mem_size} for {labels} "
            f"labels. Set mem_size={labels} or more."
        )


def _der_fits(options: Any, stream: Stream) -> None:
    one_label_a_row("der", "stores one vector of logits per example", options, stream)
    _a_row_a_label("der", options, stream)


class _LabelsApart:
    """Mixin of memories balanced over labels: each task numbers its labels from 0, and Avalanche confuses equal numbers."""

    def update(self, strategy: Any, **kwargs: Any) -> None:
        data = strategy.experience.dataset
        if strategy.stream.scenario == "task":
            first = sum(1 + max(task.train.targets) for task in strategy.stream.tasks[: strategy.task.label])
            data = data.update_data_attribute("targets", [first + int(y) for y in data.targets])
        with showing(strategy, data):  # rows keep their labels; only their groups change
            super().update(strategy, **kwargs)  # type: ignore[misc]  # of the buffer mixed into


class _BalancedBuffer(_LabelsApart, ClassBalancedBuffer):
    pass


class _GDumbPlugin(avalanche.GDumbPlugin):
    """Avalanche's plugin, with a memory that distinguishes tasks."""

    def __init__(self, mem_size: int) -> None:
        super().__init__(mem_size)
        self.storage_policy = _BalancedBuffer(mem_size, adaptive_size=True)


class GDumbOptions(TrainingOptions):
    """Options of GDumb's training."""

    passes: int = option(
        0,
        "epochs over the memory per task, instead of steps; the authors: 256; 0: the same number of steps as "
        "other strategies",
        at_least=0,
    )


class GDumb(
    PluginStrategy,
    plugin=_GDumbPlugin,
    keeps="storage_policy",  # the plugin's copy of the first model is θ_pre
    requires=partial(_a_row_a_label, "gdumb"),
    mem_size=option(200, "number of stored examples, balanced over the labels of all tasks", at_least=1),
):
    """GDumb: for each task, train θ_pre on a balanced memory of all tasks so far (Prabhu et al., 2020, alg. 1).

    The memory is sampled after all examples of the task were seen (a reservoir per label); the paper fills it greedily.
    """

    Options = GDumbOptions

    def updates_for(self, task: EncodedTask) -> int | None:
        """Return the updates of the passes over the memory, which the plugin fills before the first one."""
        seen = {each.name: each for each in (*self.learned, task)}
        apart = self.stream.scenario == "task"  # else equal labels of several tasks share one group
        rows = Counter((name if apart else "", y) for name, each in seen.items() for y in each.train.targets)
        share, left = divmod(self.options.mem_size, len(rows))  # free places of one label are not given to others
        held = sum(min(count, share + (place < left)) for place, count in enumerate(rows.values()))
        return self.options.passes * -(-held // self.options.batch_size) or None


class _ForTask(nn.Module):
    """A model in DER's form: for one task, without task labels, with the same width of logits for all tasks."""

    def __init__(self, model: nn.Module, task: int, width: int) -> None:
        super().__init__()
        self.model, self._task, self._width = model, task, width

    def forward(self, x: Tensor) -> Tensor:
        return _widen(self.model(x, self._task), self._width)


class _LogitsByTask(_LabelsApart, ClassBalancedBufferWithLogits):
    """DER's memory for models with task labels, which Avalanche's does not pass to the model."""

    def update(self, strategy: Any, **kwargs: Any) -> None:
        model = strategy.model
        strategy.model = _ForTask(model, strategy.task.label, strategy.width)
        try:
            super().update(strategy, **kwargs)
        finally:
            strategy.model = model


class DER(
    TemplateStrategy,
    supervised.DER,
    requires=_der_fits,
    mem_size=option(200, "number of examples stored with their logits", at_least=1),
    batch_size_mem=option(8, "number of stored examples added to each batch", at_least=1),
    alpha=option(0.1, "weight of the distance to the stored logits", at_least=0),
    beta=option(0.5, "weight of the loss on stored labels; 0: DER; above 0: DER++", at_least=0),
):
    """Dark experience replay: replay stored examples with their earlier logits (Buzzega et al., 2020, §3).

    Avalanche's DER asks the model for logits without task labels and stacks logits of unequal width. Here the memory passes the
    task, and logits are padded to the widest task's with the lowest number, which adds nothing to the distance. As in
    Avalanche, the distance is the mean over the width, where the paper has the sum, and one batch of stored rows serves both
    terms, where the paper draws two.
    """

    def setup(self) -> None:
        """Create a memory that distinguishes tasks."""
        self.width = max(self.stream.model.readout_of(task.label).n_labels for task in self.stream.tasks)
        self.storage_policy = _LogitsByTask(self.mem_size, adaptive_size=True)
        self.keep_beside(lambda: self.storage_policy)

    def begin(self, task: EncodedTask) -> Training:
        """Train everything, with logits of one width."""
        # Avalanche silently replays nothing while it has fewer stored rows than one batch of them needs.
        rows, wanted = len(self.storage_policy.buffer), self.options.batch_size_mem
        self.batch_size_mem = min(rows, wanted) or wanted
        return self.everything_by_avalanche(task, answer=lambda x, t: _widen(self.model(x, t), self.width))


def _widen(logits: Tensor, width: int) -> Tensor:
    return nn.functional.pad(logits, (0, width - logits.shape[1]), value=LOWEST)


# -- Regularisation --------------------------------------------------------------------------------------


class EWC(
    ImportanceStrategy,
    plugin=avalanche.EWCPlugin,
    ewc_lambda=option(1e3, "λ: weight of the penalty", at_least=0),
):
    """Elastic weight consolidation: a quadratic penalty by Fisher information, one per task (Kirkpatrick et al., 2017, eq. 3).

    As in Avalanche, λ lacks the paper's factor ½, and the Fisher information uses the true labels and squares the gradients of
    whole batches of ``batch_size`` rows: it is smaller than row by row, so λ is larger than in the paper.
    """


class OnlineEWC(
    ImportanceStrategy,
    plugin=avalanche.EWCPlugin,
    fixed={"mode": "online"},
    ewc_lambda=option(1e3, "λ: weight of the penalty", at_least=0),
    decay_factor=option(0.9, "γ: weight of the Fisher information of earlier tasks", at_least=0, at_most=1),
):
    """Online EWC: one running penalty for all tasks (Schwarz et al., 2018, §3.2, eq. 9). The Fisher information as in `EWC`."""


def _detach(tensors: Mapping[str, Any]) -> None:
    for tensor in tensors.values():
        tensor.data = tensor.data.clone()


class _SIPlugin(avalanche.SynapticIntelligencePlugin):
    """Avalanche's plugin with two fixes: the weights before a step are copied, and importances are clipped at 0.

    Avalanche stores ``parameter.cpu()``: on a CPU the weights themselves, which move along with the step, so that all paths and
    penalties are 0. And importances may be negative, where a weight moved against its gradient: the penalty then drives it
    away. The authors' own code clips them at 0.
    """

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        super().before_training_exp(strategy, **kwargs)
        _detach(self.ewc_data[0])

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        super().before_training_iteration(strategy, **kwargs)
        _detach(self.syn_data["old_theta"])

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        super().after_training_exp(strategy, **kwargs)
        for importance in self.ewc_data[1].values():
            importance.data = importance.data.clamp(min=0)
        for name in ("old_theta", "new_theta", "grad"):  # the model's own tensors, until the next step
            _detach(self.syn_data[name])


class SI(
    PluginStrategy,
    plugin=_SIPlugin,
    si_lambda=option(1.0, "λ: weight of the penalty, twice the paper's c; importances are at most 0.001", at_least=0),
    eps=option(1e-7, "ξ: damping of the importance", above=0),
):
    """Synaptic intelligence: a penalty by each weight's share in the decrease of the loss (Zenke et al., 2017, eqs. 4 and 5).

    As in Avalanche, the penalty is λ/2 where the paper has c, importances above 0.001 are clipped to it (Maltoni & Lomonaco,
    2019), and the path uses the gradients of the whole loss, penalty included, clipped if `max_gradient_norm` is set.
    """


class _MASPlugin(avalanche.MASPlugin):
    """Avalanche's plugin, made to accept a loss of exactly 0, which it takes for a missing loss."""

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        if not strategy.loss:
            strategy.loss = strategy.loss + torch.finfo(torch.float32).tiny
        super().before_backward(strategy, **kwargs)


class MAS(
    ImportanceStrategy,
    plugin=_MASPlugin,
    lambda_reg=option(1.0, "λ: weight of the penalty", at_least=0),
    alpha=option(0.5, "weight of the importance from earlier tasks", at_least=0, at_most=1),
):
    """Memory aware synapses: a penalty weighted by the sensitivity of the outputs to each weight (Aljundi et al., 2018, §4).

    As in Avalanche, gradients are computed per batch, not per example, and importances are averaged over tasks with α; the
    paper adds them up.
    """


class _RWalkPlugin(avalanche.RWalkPlugin):
    """Avalanche's plugin, made to compute scores at least once per task."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self.delta_t = min(strategy.options.delta_t, strategy.training.steps)
        super().before_training_exp(strategy, **kwargs)


class RWalk(
    PluginStrategy,
    plugin=_RWalkPlugin,
    ewc_lambda=option(0.1, "λ: weight of the penalty", at_least=0),
    ewc_alpha=option(0.9, "α: weight of the newest Fisher information", at_least=0, at_most=1),
    delta_t=option(10, "number of steps between updates of the scores; at most the steps of a task", at_least=1),
):
    """Riemannian walk: the penalties of EWC and of a path in one running estimate (Chaudhry et al., 2018, eqs. 6 to 8).

    As in Avalanche, the Fisher information is computed per batch, not per example.

    Avalanche divides scores by the largest one: 0 by 0 if none was computed yet, and then all weights become NaN. So
    ``delta_t`` is limited to the steps of the task.
    """


class _LwFPlugin(avalanche.LwFPlugin):
    """Avalanche's plugin, with the teacher in evaluation mode: it is a copy of a model in training mode, with dropout."""

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        super().after_training_exp(strategy, **kwargs)
        self.lwf.prev_model.eval()


class LwF(
    PluginStrategy,
    plugin=_LwFPlugin,
    requires=partial(one_label_a_row, "lwf", "distils one prediction of the old readouts per example"),
    alpha=option(1.0, "weight of the distillation", at_least=0),
    temperature=option(2.0, "temperature T of the softmax in the distillation", above=0),
):
    """Learning without forgetting: distil the old readouts' predictions on the new examples (Li & Hoiem, 2016, eqs. 2 and 3).

    As in Avalanche, there are no initial steps that train the new readout alone, unlike the paper's warm-up.
    """
