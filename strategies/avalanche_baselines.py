"""The classic baselines, as Avalanche implements them; `forgetfree.adapter` makes strategies of them.

Defaults suit fine-tuning a pre-trained model for a few hundred steps with small batches.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from avalanche.training import plugins as avalanche
from avalanche.training import supervised
from avalanche.training.supervised.der import ClassBalancedBufferWithLogits
from torch import Tensor, nn

from forgetfree.adapter import PluginStrategy, TemplateStrategy
from forgetfree.errors import UsageError
from forgetfree.models.readout_model import LOWEST
from forgetfree.options import option
from forgetfree.streams import Stream, StreamTask

# -- Rehearsal -------------------------------------------------------------------------------------------


class Replay(
    PluginStrategy,
    plugin=avalanche.ReplayPlugin,
    mem_size=option(200, "rows remembered, of all tasks together", at_least=1),
    batch_size_mem=option(8, "remembered rows beside those of each batch", at_least=1),
):
    """Experience replay: each batch comes with rows of earlier tasks (Chaudhry et al., 2019, arXiv:1902.10486, alg. 1)."""


class AGEM(
    PluginStrategy,
    plugin=avalanche.AGEMPlugin,
    patterns_per_experience=option(64, "rows remembered per task", at_least=1),
    sample_size=option(16, "remembered rows the reference gradient is of", at_least=1),
):
    """Averaged gradient episodic memory: g loses its part against the gradient on remembered rows (Chaudhry et al., 2019, eq. 11)."""


class GEM(
    PluginStrategy,
    plugin=avalanche.GEMPlugin,
    patterns_per_experience=option(16, "rows remembered per task", at_least=1),
    memory_strength=option(0.5, "γ: how far the projected gradient leans towards earlier tasks", at_least=0),
):
    """Gradient episodic memory: g is projected so that no earlier task's loss rises (Lopez-Paz & Ranzato, 2017, eq. 11)."""

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Avalanche solves eq. 11 by quadprog."""
        super().check(options, stream)
        if find_spec("quadprog") is None:
            raise UsageError(
                "gem solves a quadratic programme at each step, and its solver is not installed. Install it with: "
                "pip install 'forgetfree[gem]'."
            )


class GDumb(
    PluginStrategy,
    plugin=avalanche.GDumbPlugin,
    mem_size=option(200, "rows remembered, balanced over labels", at_least=1),
):
    """GDumb: for each task, train θ_pre anew on a balanced memory of all tasks so far (Prabhu et al., 2020, alg. 1)."""


class _ForTask(nn.Module):
    """A model as DER calls it: for one task, without task labels, with logits of one width for all tasks."""

    def __init__(self, model: nn.Module, task: int, width: int) -> None:
        super().__init__()
        self.model, self._task, self._width = model, task, width

    def forward(self, x: Tensor) -> Tensor:
        return _widen(self.model(x, self._task), self._width)


class _LogitsByTask(ClassBalancedBufferWithLogits):
    """DER's memory for models with task labels, which it forgets to give."""

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
    mem_size=option(200, "rows remembered, with their logits", at_least=1),
    batch_size_mem=option(8, "remembered rows beside those of each batch", at_least=1),
    alpha=option(0.1, "weight of the distance to the remembered logits", at_least=0),
    beta=option(0.5, "weight of the loss on remembered labels; 0: DER, above: DER++", at_least=0),
):
    """Dark experience replay: rehearse the logits the model once gave (Buzzega et al., 2020, eqs. 4 and 6).

    Avalanche's asks the model for logits without task labels and stacks logits of unequal width. Here the memory names
    the task, and logits are filled up to the widest task's with the lowest number, which adds nothing to the distance.
    """

    def setup(self) -> None:
        """A memory that knows tasks."""
        self.width = max(head.n_labels for head in self.task_model.heads)
        self.storage_policy = _LogitsByTask(self.mem_size, adaptive_size=True)

    def forward(self) -> Tensor:
        """Logits, in training all of one width."""
        logits = super().forward()
        return _widen(logits, self.width) if self.is_training else logits

    def held(self) -> Any:
        """The memory."""
        return self.storage_policy


def _widen(logits: Tensor, width: int) -> Tensor:
    return nn.functional.pad(logits, (0, width - logits.shape[1]), value=LOWEST)


# -- Regularisation --------------------------------------------------------------------------------------


class EWC(
    PluginStrategy,
    plugin=avalanche.EWCPlugin,
    ewc_lambda=option(1e3, "λ: strength of the penalty", at_least=0),
):
    """Elastic weight consolidation: a quadratic penalty by Fisher information, one per task (Kirkpatrick et al., 2017, eq. 3)."""


class OnlineEWC(
    PluginStrategy,
    plugin=avalanche.EWCPlugin,
    fixed={"mode": "online"},
    ewc_lambda=option(1e3, "λ: strength of the penalty", at_least=0),
    decay_factor=option(0.9, "γ: weight of the Fisher information so far", at_least=0, at_most=1),
):
    """Online EWC: one running penalty for all tasks (Schwarz et al., 2018, §3.2, eq. 9)."""


class SI(
    PluginStrategy,
    plugin=avalanche.SynapticIntelligencePlugin,
    si_lambda=option(1.0, "c: strength of the penalty", at_least=0),
    eps=option(1e-7, "ξ: damping of the importance", above=0),
):
    """Synaptic intelligence: a penalty by each weight's share in the fall of the loss (Zenke et al., 2017, eqs. 4 and 5)."""


class MAS(
    PluginStrategy,
    plugin=avalanche.MASPlugin,
    lambda_reg=option(1.0, "λ: strength of the penalty", at_least=0),
    alpha=option(0.5, "weight of the importance so far", at_least=0, at_most=1),
):
    """Memory aware synapses: a penalty by how far the outputs move with a weight (Aljundi et al., 2018, eqs. 3 to 5)."""


class RWalk(
    PluginStrategy,
    plugin=avalanche.RWalkPlugin,
    ewc_lambda=option(0.1, "λ: strength of the penalty", at_least=0),
    ewc_alpha=option(0.9, "α: weight of the newest Fisher information", at_least=0, at_most=1),
    delta_t=option(10, "steps between updates of the scores", at_least=1),
):
    """Riemannian walk: EWC's penalty and a path's, in one running estimate (Chaudhry et al., 2018, eqs. 6 to 8)."""


class LwF(
    PluginStrategy,
    plugin=avalanche.LwFPlugin,
    alpha=option(1.0, "weight of the distillation", at_least=0),
    temperature=option(2.0, "T of the softened answers", above=0),
):
    """Learning without forgetting: keep the old readouts' answers on the new rows (Li & Hoiem, 2016, eqs. 2 and 3)."""


# -- All data at once: ceilings, not continual learning --------------------------------------------------


class Cumulative(TemplateStrategy, supervised.Cumulative):
    """Train on each task's rows together with those of all earlier tasks."""

    def held(self) -> Any:
        """All rows."""
        return self.dataset


class Joint(TemplateStrategy, supervised.JointTraining):
    """Train once on the rows of all tasks, for as many steps as all tasks have together: the ceiling.

    The first experience trains on the whole stream, the later ones add nothing.
    """

    def train(self, experiences: Any, eval_streams: Any = None, **kwargs: Any) -> Any:
        """On the whole stream, once."""
        if self.learned:
            return self.evaluator.get_last_metrics()
        return super().train(self.stream.benchmark.train_stream, eval_streams, **kwargs)

    def steps(self, task: StreamTask) -> int:
        """Those of all tasks together."""
        return sum(self.full_steps(each) for each in self.stream.tasks)

    def commit(self, task: StreamTask) -> None:
        """Every other task is learned, too."""
        for other in self.stream.tasks[1:]:
            self.note_learned(other, {})

    def stale(self, learned: StreamTask) -> list[StreamTask]:
        """All tasks by the first, none by the others."""
        return list(self.stream.tasks) if learned is self.stream.tasks[0] else []

    def held(self) -> Any:
        """All rows."""
        return [experience.dataset for experience in self.stream.benchmark.train_stream]
