"""Rules that choose what a new task stands on, compared on the same rows and models.

    python -m benchmarks.parents related --data DIR --seed 10 --out runs/parents

A task stands on θ_pre, on what an earlier task is answered with, or on the union of all: θ_ft starts there, γ is what moved
most among the entries that nobody owns, and γ is trained there. A rule looks at the task's training and validation rows and
chooses. What a choice leads to depends on the choices before it alone, so each is trained once, whichever rules make it.
Nothing that is learned changes later: a rule's average is the mean of the scores of its tasks, each right after learning.

OUT/STREAM-SEED.json holds every rule's choices and scores, and what the rules looked at.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from forgetfree.continual.region_strategy import SkillOptions
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget, most_moved
from forgetfree.core.trained import RegionParameters
from forgetfree.data.rows import representative
from forgetfree.data.sources import load_tasks
from forgetfree.files import write_json
from forgetfree.jobs.environment import quiet_libraries, set_threads
from forgetfree.models.loading import load_model
from forgetfree.models.state import ModelState
from forgetfree.options import build
from forgetfree.recipes import recipe_of
from forgetfree.training.encoded_task import EncodedTask, answers_of, features_of, loss_of
from forgetfree.training.single_task import SingleTask, in_pieces, mask_loss

STREAMS = {
    "related": ("sst2", "mr", "cr", "yelp", "amazon"),
    "mixed": ("sst2", "ag_news", "mr", "mpqa", "cr", "qnli"),
    "unrelated": ("ag_news", "qnli", "wic", "dbpedia", "mpqa"),
}
#: What a task stands on, beside earlier tasks by name: θ_pre, and the union of all regions.
ALONE, UNION = "alone", "union"
#: The share by which a parent's log loss must be below that of θ_pre.
MARGIN = 0.13
#: The cosine of two tasks' gradients at θ_pre from which on they are kin; entries of a sketch of a gradient.
KIN, SKETCH = 0.1, 4096
#: Updates of the region by which two candidates are compared.
TRIAL_STEPS = 20


@dataclass(frozen=True)
class Skill:
    """A task that is learned on top of something.

    Attributes:
        task: its name.
        on: what it stands on.
        graft: the entries of θ_pre that it is answered with, its own and inherited, and their values.
        own: the entries that it owns, and their values.
        readout: its readout.
        score: on test rows.
        loss: on validation rows, in nats.
    """

    task: str
    on: str
    graft: tuple[Region, Tensor]
    own: tuple[Region, Tensor]
    readout: dict[str, Tensor]
    score: float
    loss: float


@dataclass
class ChoiceTree:
    """The tasks of a stream, encoded for one model with one seed."""

    loaded: Any
    tasks: list[EncodedTask]
    options: SkillOptions
    seed: int
    device: torch.device
    pre: ModelState
    sketches: dict[str, Tensor] = field(default_factory=dict)
    trained: dict[tuple[str, ...], Skill] = field(default_factory=dict)
    looked: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def space(self) -> ParameterSpace:
        """The parameter space of the model."""
        space: ParameterSpace = self.loaded.model.space()
        return space

    def start(self, on: str, learned: Sequence[Skill]) -> tuple[Region, Tensor]:
        """Return the entries and values that a task which stands on ``on`` inherits."""
        if on == ALONE:
            return Region.empty(), torch.empty(0)
        if on != UNION:
            return next(skill.graft for skill in learned if skill.task == on)
        return merged([skill.own for skill in learned])

    def single(self, task: EncodedTask, inherited: tuple[Region, Tensor]) -> SingleTask:
        """Return the bench of a task on top of what it inherits."""
        theta = self.pre.theta.clone()
        theta[inherited[0].indices] = inherited[1].to(theta)
        pre = replace(self.pre, theta=theta, readouts={task.name: self.pre.readouts[task.name]})
        pre.load_(self.loaded.model, [task.name])
        return SingleTask(self.loaded, task, pre=pre, seed=self.seed, device=self.device)

    def learn(self, choices: tuple[str, ...]) -> Skill:
        """Return the skill of the last task of a path of choices."""
        if choices in self.trained:
            return self.trained[choices]
        learned = self.path(choices[:-1])
        task, on = self.tasks[len(choices) - 1], choices[-1]
        inherited = self.start(on, learned)
        bench = self.single(task, inherited)
        taken = merged([skill.own for skill in learned])[0]
        tuned = bench.fine_tuned(self.options)
        moved = tuned.theta.clone()
        moved[taken.indices] = bench.pre.theta[taken.indices]
        region = most_moved(bench.pre.theta, moved, budget(len(self.space), self.options.sparsity))
        values, readout, score, loss = self._region_trained(bench, tuned, region)
        own = (region, values)
        skill = Skill(task.name, on, merged([inherited, own]), own, readout, score, loss)
        self.trained[choices] = skill
        print(f"{' > '.join(choices)}: {task.name} {100 * score:.1f}, loss {loss:.3f}", file=sys.stderr, flush=True)
        return skill

    def _region_trained(
        self, bench: SingleTask, start: ModelState, region: Region, steps: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor], float, float]:
        """Return the region's values, the readout, the score on test rows and the loss on validation rows."""
        model, task = self.loaded.model, bench.task
        options = self.options.for_region(len(self.space), budget(len(self.space), self.options.sparsity))
        with bench.holding(replace(start, theta=bench.pre.theta), region):
            bench.train_(options, "train", RegionParameters(model.backbone, self.space, region), steps)
            values = self.space.gather(model.backbone, region.indices)
            readout = {n: t.detach().clone() for n, t in model.readout_module(task.label).state_dict().items()}
            score = math.nan if steps else answers_of(model, task, task.test, options).score(task.definition.metric)
            return values, readout, score, loss_of(model, task, task.validation, options)

    def path(self, choices: tuple[str, ...]) -> list[Skill]:
        """Return the skills that a path of choices leads to."""
        return [self.learn(choices[: n + 1]) for n in range(len(choices))]

    # -- What rules look at ----------------------------------------------------------------------------------

    def candidates(self, before: tuple[str, ...]) -> list[str]:
        """Return what the next task may stand on."""
        return [ALONE, *(task.name for task in self.tasks[: len(before)]), *([UNION] if len(before) > 1 else [])]

    def _known(self, before: tuple[str, ...], name: str, make: Callable[[], Any]) -> Any:
        looked = self.looked.setdefault(before, {})
        if name not in looked:
            looked[name] = make()
        return looked[name]

    def probes(self, before: tuple[str, ...]) -> dict[str, tuple[float, float]]:
        """Return the log loss and the accuracy, by four-fold cross-validation, of a linear probe on each candidate."""
        found: dict[str, tuple[float, float]] = self._known(
            before, "probes", lambda: {on: self._probe(before, on) for on in self.candidates(before)}
        )
        return found

    def _probe(self, before: tuple[str, ...], on: str) -> tuple[float, float]:
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import log_loss
        from sklearn.model_selection import cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        task = self.tasks[len(before)]
        bench = self.single(task, self.start(on, self.path(before)))
        rows = [
            features_of(bench.model, part, bench.model.features).flatten(1) for part in (task.train, task.validation)
        ]
        x = torch.cat(rows).numpy()
        y = np.concatenate([np.asarray(part.targets) for part in (task.train, task.validation)])
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
        shares = cross_val_predict(probe, x, y, cv=4, method="predict_proba")
        right = shares.argmax(1) == np.searchsorted(np.unique(y), y)
        return float(log_loss(y, shares)), float(right.mean())

    def kinship(self, before: tuple[str, ...]) -> dict[str, float]:
        """Return the cosine of the task's gradient at θ_pre with that of each earlier task."""
        mine = self._sketch(self.tasks[len(before)])
        return {
            task.name: float(torch.cosine_similarity(mine, self._sketch(task), dim=0))
            for task in self.tasks[: len(before)]
        }

    def _sketch(self, task: EncodedTask) -> Tensor:
        """Return the gradient of up to 64 training rows at θ_pre, under a readout that was trained alone, as a count sketch."""
        if task.name not in self.sketches:
            bench = self.single(task, (Region.empty(), torch.empty(0)))
            state = bench.with_readout(self.options)
            model = self.loaded.model
            with bench.holding(state):
                model.zero_grad(set_to_none=True)
                rows = representative(task.train.targets, 64)
                mask_loss(model, self.options)(in_pieces(task.train, rows, self.device))
                gradient = torch.cat(
                    [cast(Tensor, each.grad).flatten() for each in self.space.parameters(model.backbone)]
                )
                model.zero_grad(set_to_none=True)
            generator = torch.Generator().manual_seed(0)
            places = torch.randint(SKETCH, (len(gradient),), generator=generator)
            signs = torch.randint(2, (len(gradient),), generator=generator) * 2 - 1
            self.sketches[task.name] = torch.zeros(SKETCH).index_add_(0, places, gradient * signs)
        return self.sketches[task.name]

    def trials(self, before: tuple[str, ...]) -> dict[str, float]:
        """Return the loss on validation rows after a few steps of a region chosen by SNIP, for the two best candidates."""

        def make() -> dict[str, float]:
            probes = self.probes(before)
            best = sorted(probes, key=lambda on: probes[on][0])[:2]
            return {on: self._trial(before, on) for on in best}

        found: dict[str, float] = self._known(before, "trials", make)
        return found

    def _trial(self, before: tuple[str, ...], on: str) -> float:
        learned, task = self.path(before), self.tasks[len(before)]
        bench = self.single(task, self.start(on, learned))
        start = bench.with_readout(self.options)
        taken = merged([skill.own for skill in learned])[0]
        region = bench.region(start, self.options.model_copy(update={"region_from": "snip", "among": "free"}), taken)
        return self._region_trained(bench, start, region, TRIAL_STEPS)[-1]


def merged(parts: Sequence[tuple[Region, Tensor]]) -> tuple[Region, Tensor]:
    """Return the union of regions that share no entry, with their values."""
    indices = torch.cat([torch.empty(0, dtype=torch.int64), *(region.indices for region, _ in parts)])
    values = torch.cat([torch.empty(0), *(values.float() for _, values in parts)])
    order = indices.argsort()
    return Region(indices[order]), values[order]


# -- Rules -----------------------------------------------------------------------------------------------


def by_probe(margin: float = 0.0, accuracy: bool = False) -> Callable[[ChoiceTree, tuple[str, ...]], str]:
    """Return the rule: the candidate of the lowest log loss, if it is below that of θ_pre by a share, and as accurate."""

    def choose(tree: ChoiceTree, before: tuple[str, ...]) -> str:
        probes = tree.probes(before)
        best = min(probes, key=lambda on: probes[on][0])
        fine = probes[best][0] <= (1 - margin) * probes[ALONE][0]
        return best if fine and (not accuracy or probes[best][1] > probes[ALONE][1]) else ALONE

    return choose


def with_way_back(tree: ChoiceTree, before: tuple[str, ...]) -> str:
    """The probe with a margin; a task whose loss after training is above that of the probe on θ_pre is trained alone."""
    on = by_probe(MARGIN)(tree, before)
    return on if tree.learn((*before, on)).loss <= tree.probes(before)[ALONE][0] else ALONE


def better_of_two(tree: ChoiceTree, before: tuple[str, ...]) -> str:
    """The probe's best, or alone: what has the lower loss after training, for which the task is trained twice."""
    on = by_probe()(tree, before)
    return min((ALONE, on), key=lambda each: tree.learn((*before, each)).loss)


def by_gradients(tree: ChoiceTree, before: tuple[str, ...]) -> str:
    """The earlier task whose gradient at θ_pre is most like the new one's, if it is like it at all."""
    kinship = tree.kinship(before)
    best = max(kinship, key=lambda name: kinship[name])
    return best if kinship[best] >= KIN else ALONE


def by_trial(tree: ChoiceTree, before: tuple[str, ...]) -> str:
    """The better of the probe's two best after a few steps of a region."""
    trials = tree.trials(before)
    return min(trials, key=lambda on: trials[on])


RULES: dict[str, Callable[[ChoiceTree, tuple[str, ...]], str]] = {
    "alone": lambda tree, before: ALONE,
    "union": lambda tree, before: UNION if len(before) > 1 else tree.tasks[0].name,
    "probe": by_probe(),
    "probe, margin": by_probe(MARGIN),
    "probe, margin and way back": with_way_back,
    "probe, loss and accuracy": by_probe(accuracy=True),
    "better of two": better_of_two,
    "gradients": by_gradients,
    "trial": by_trial,
}


def measured(tree: ChoiceTree) -> dict[str, Any]:
    """Return each rule's choices and scores, and what the rules looked at."""
    rules = {}
    for name, rule in RULES.items():
        choices: tuple[str, ...] = (ALONE,)
        while len(choices) < len(tree.tasks):
            choices = (*choices, rule(tree, choices))
        skills = tree.path(choices)
        rules[name] = {"choices": choices, "scores": [skill.score for skill in skills]}
        average = 100 * sum(skill.score for skill in skills) / len(skills)
        print(f"{name}: {average:.1f}  {' '.join(choices)}", flush=True)
    return {
        "tasks": [task.name for task in tree.tasks],
        "rules": rules,
        "paths": {" > ".join(path): [skill.score, skill.loss] for path, skill in tree.trained.items()},
        "looked": {" > ".join(path): looked for path, looked in tree.looked.items()},
        "kinship": {" > ".join(path): tree.kinship(path) for path in tree.trained if len(path) < len(tree.tasks)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one seed of one stream, unless its file is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parents", description=__doc__.partition("\n")[0])
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/parents"))
    parser.add_argument("--shots", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--test-limit", type=int, default=500)
    asked = parser.parse_args(arguments)
    file = asked.out / f"{asked.stream}-{asked.shots}-{asked.seed}.json"
    if file.exists():
        return 0
    quiet_libraries()
    set_threads(1)
    began = time.perf_counter()
    rows = load_tasks(list(STREAMS[asked.stream]), asked.data)
    loaded = load_model("minilm", "linear", tasks=[each.task for each in rows])
    settings = {"steps": asked.steps, "precision": "fp32"}
    recipe = recipe_of("minilm", settings, ["grafting-continual"], "grafting-continual")
    options = build(SkillOptions, {**recipe, **settings}, "the benchmark")
    device = torch.device("cpu")
    singles = [
        SingleTask.of(loaded, each, shots=asked.shots, seed=asked.seed, test_limit=asked.test_limit, device=device)
        for each in rows
    ]
    # As many validation rows as training rows, at most: who has few rows has few of both.
    tasks = [
        replace(task, validation=task.validation.subset(representative(task.validation.targets, len(task.train))))
        for task in (single.task for single in singles)
    ]
    pre = ModelState.of(loaded.model, [task.name for task in tasks])
    tree = ChoiceTree(loaded, tasks, options, asked.seed, device, pre)
    result = measured(tree)
    asked.out.mkdir(parents=True, exist_ok=True)
    write_json(file, {**vars(asked), "out": None, "seconds": round(time.perf_counter() - began), **result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
