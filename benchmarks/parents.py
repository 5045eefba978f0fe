"""Rules that choose the parent of a new task, compared on the same rows and models.

    python -m benchmarks.parents related --data DIR --seed 10 --out runs/parents

A task stands on θ_pre, on the model of an earlier task, or on all earlier tasks: θ_ft starts there, γ consists of the most
moved entries that no task below it owns, and γ is trained there. A rule chooses by the task's training rows and as many of its
validation rows; the other validation rows give the score, and no test row is used. The result of a task depends only on the
tasks below it, so rules with equal choices share one training. Learned tasks do not change later: a rule's average is the mean
of the scores of its tasks, each right after learning.

OUT/STREAM-SHOTS-SEED.json holds every rule's choices and scores, and the numbers that the rules used.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from forgetfree.continual.region_strategy import SkillOptions
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.precision import faster_precision
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget, most_moved
from forgetfree.core.trained import RegionParameters
from forgetfree.data.examples import Examples
from forgetfree.data.rows import representative
from forgetfree.data.sources import load_tasks
from forgetfree.display import NULL, counted
from forgetfree.files import write_json
from forgetfree.jobs.environment import quiet_libraries, set_threads
from forgetfree.models.loading import load_model
from forgetfree.models.state import ModelState
from forgetfree.options import build
from forgetfree.recipes import recipe_of
from forgetfree.results.evidence import interval
from forgetfree.results.report.page import Table
from forgetfree.training.encoded_task import EncodedTask, answers_of, features_of, quality_of
from forgetfree.training.single_task import SingleTask, in_pieces, mask_loss

STREAMS = {
    "related": ("sst2", "mr", "cr", "yelp", "amazon"),
    "mixed": ("sst2", "ag_news", "mr", "mpqa", "cr", "qnli"),
    "unrelated": ("ag_news", "qnli", "wic", "dbpedia", "mpqa"),
}
#: The choices besides the names of earlier tasks: θ_pre, and all earlier tasks.
ALONE, UNION = "alone", "union"
#: The least cosine of the gradients of related tasks at θ_pre; the number of entries of a gradient's sketch.
KIN, SKETCH = 0.1, 4096
#: The share by which the probe's loss on a parent must be below its loss on θ_pre, in rules with a margin.
MARGIN = 0.13
#: Updates of the region in the trial of a candidate.
TRIAL_STEPS = 20
#: The times at which naive training is scored on a task.
NAIVE = ("right after", "at the end")
#: The most validation rows that give the score.
SCORED_ROWS = 500
#: The inheritance from the tasks below: entries and values; values alone, as the start of θ_ft, with γ written into θ_pre; also
#: the head, if labels are equal; or θ_ft from a copy that is trained on all tasks in turn.
Inherits = Literal["graft", "values", "head", "naive"]
INHERITS: dict[str, tuple[str, Inherits]] = {
    "probe, margin; values alone": ("probe, margin", "values"),
    "probe, margin; head": ("probe, margin", "head"),
    "union; θ_ft from a naive copy": (UNION, "naive"),
}


@dataclass(frozen=True)
class Skill:
    """A task that is learned on top of others.

    Attributes:
        task: its name.
        below: the tasks that it stands on, in the order of the stream.
        own: the entries that it owns, and their values.
        readout: its readout.
        score: the score on validation rows that no rule uses.
        loss: the loss on validation rows that rules use, in nats.
        inherits: its inheritance from the tasks below.
    """

    task: str
    below: tuple[Skill, ...]
    own: tuple[Region, Tensor]
    readout: dict[str, Tensor]
    score: float
    loss: float
    inherits: Inherits = "graft"

    @property
    def key(self) -> str:
        """The task, with the tasks that it stands on."""
        below = " ".join(each.key for each in self.below)
        return f"{self.task}({below})" + ("" if self.inherits == "graft" else f" by {self.inherits}")


@dataclass
class Skills:
    """The tasks of a stream, encoded for one model with one seed, and their trained skills."""

    loaded: Any
    tasks: list[EncodedTask]
    scored: list[Examples]
    options: SkillOptions
    seed: int
    device: torch.device
    pre: ModelState
    sketches: dict[str, Tensor] = field(default_factory=dict)
    trained: dict[str, Skill] = field(default_factory=dict)
    probed: dict[str, tuple[float, float]] = field(default_factory=dict)
    tried: dict[str, float] = field(default_factory=dict)
    naive: list[tuple[ModelState, float]] = field(default_factory=list)

    @cached_property
    def space(self) -> ParameterSpace:
        """The parameter space of the model."""
        space: ParameterSpace = self.loaded.model.space()
        return space

    def single(self, number: int, below: Sequence[Skill], theta: Tensor | None = None) -> SingleTask:
        """Return the bench of a task on top of the tasks below, or of ``theta``."""
        task, readout = self.tasks[number], self.pre.readouts[self.tasks[number].name]
        pre = replace(self.pre, theta=self.theta(below) if theta is None else theta, readouts={task.name: readout})
        pre.load_(self.loaded.model, [task.name])
        return SingleTask(self.loaded, task, pre=pre, seed=self.seed, device=self.device)

    def theta(self, below: Sequence[Skill]) -> Tensor:
        """Return θ_pre with the entries of some tasks; the first owner of an entry counts."""
        theta = self.pre.theta.clone()
        for skill in reversed(below):
            region, values = skill.own
            theta[region.indices] = values.to(theta)
        return theta

    def learn(self, number: int, below: tuple[Skill, ...], inherits: Inherits = "graft") -> Skill:
        """Return the skill of a task that stands on others."""
        task, nothing = self.tasks[number], (Region.empty(), torch.empty(0))
        key = Skill(task.name, below, nothing, {}, math.nan, math.nan, inherits).key
        if key in self.trained:
            return self.trained[key]
        bench = self.single(number, below)
        if inherits == "head" and below and task.definition.labels == self._definition(below[-1]).labels:
            bench.pre = replace(bench.pre, readouts={task.name: below[-1].readout})
        tuned = self._naive(number) if inherits == "naive" else bench.fine_tuned(self.options)
        if inherits == "values":
            bench = self.single(number, ())
        moved, taken = tuned.theta.clone(), merged([] if inherits == "values" else [each.own for each in below])
        moved[taken.indices] = bench.pre.theta[taken.indices]
        region = most_moved(bench.pre.theta, moved, budget(len(self.space), self.options.sparsity))
        start = replace(tuned, theta=bench.pre.theta.clone())
        if inherits == "values":
            start.theta[region.indices] = tuned.theta[region.indices]
        values, readout, loss, score = self._region_trained(bench, start, region, self.scored[number])
        skill = Skill(task.name, below, (region, values), readout, score, loss, inherits)
        self.trained[key] = skill
        print(f"{key}: {100 * score:.1f}, loss {loss:.3f}", file=sys.stderr, flush=True)
        return skill

    def _definition(self, skill: Skill) -> Any:
        return next(task.definition for task in self.tasks if task.name == skill.task)

    def _naive(self, number: int) -> ModelState:
        """Return the state of naive training after a task."""
        while len(self.naive) <= number:
            at = len(self.naive)
            bench = self.single(at, (), self.naive[-1][0].theta if self.naive else None)
            state = bench.fine_tuned(self.options)
            rows = self.scored[at]
            self.naive.append((state, bench.answers(state, rows, self.options).score(bench.task.definition.metric)))
        return self.naive[number][0]

    def naive_scores(self) -> dict[str, list[float]]:
        """Return the scores of naive training on each task, right after it and at the end of the stream."""
        last = self._naive(len(self.tasks) - 1)
        after = []
        for number, task in enumerate(self.tasks):
            state = replace(last, readouts=self.naive[number][0].readouts)
            answers = self.single(number, ()).answers(state, self.scored[number], self.options)
            after.append(answers.score(task.definition.metric))
        return dict(zip(NAIVE, ([score for _, score in self.naive], after), strict=True))

    def _region_trained(
        self, bench: SingleTask, start: ModelState, region: Region, scored: Examples | None, steps: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor], float, float]:
        """Return the region's values, the readout, the loss on the rows that rules use, and the score on ``scored``."""
        model, task = self.loaded.model, bench.task
        options = self.options.for_region(len(self.space), budget(len(self.space), self.options.sparsity))
        with bench.holding(start, region):
            self.space.scatter_(model.backbone, region.indices, start.theta[region.indices])
            bench.train_(options, "train", RegionParameters(model.backbone, self.space, region), steps)
            values = self.space.gather(model.backbone, region.indices)
            readout = {n: t.detach().clone() for n, t in model.readout_module(task.label).state_dict().items()}
            loss = -quality_of(model, task, task.validation, options)[1]
            score = (
                math.nan if scored is None else answers_of(model, task, scored, options).score(task.definition.metric)
            )
            return values, readout, loss, score

    # -- Numbers for rules -----------------------------------------------------------------------------------

    def probe(self, number: int, below: tuple[Skill, ...]) -> tuple[float, float]:
        """Return log loss and accuracy of a task's linear probe on top of others, by cross-validation in at most 4 folds."""
        key = f"{self.tasks[number].name}({' '.join(each.key for each in below)})"
        if key not in self.probed:
            self.probed[key] = self._probe(number, below)
        return self.probed[key]

    def _probe(self, number: int, below: tuple[Skill, ...]) -> tuple[float, float]:
        bench = self.single(number, below)
        parts = bench.task.train, bench.task.validation
        x = torch.cat([features_of(bench.model, part, bench.model.features).flatten(1) for part in parts]).numpy()
        y = np.concatenate([np.asarray(part.targets) for part in parts])
        folds = StratifiedKFold(min(4, int(np.unique(y, return_counts=True)[1].min())))
        regression = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
        with warnings.catch_warnings():  # a probe that has not converged still tells candidates apart
            warnings.simplefilter("ignore", ConvergenceWarning)
            shares = cross_val_predict(regression, x, y, cv=folds, method="predict_proba")
        return float(log_loss(y, shares)), float(np.mean(np.unique(y)[shares.argmax(1)] == y))

    def kinship(self, number: int, earlier: Sequence[Skill]) -> dict[str, float]:
        """Return the cosine between the gradients at θ_pre of a task and of each earlier task."""
        mine = self._sketch(number)
        return {
            skill.task: float(torch.cosine_similarity(mine, self._sketch(at), dim=0))
            for at, skill in enumerate(earlier)
        }

    def _sketch(self, number: int) -> Tensor:
        """Return the gradient of up to 64 training rows at θ_pre, under a readout that was trained alone, as a count sketch."""
        task = self.tasks[number]
        if task.name not in self.sketches:
            bench = self.single(number, ())
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

    def trial(self, number: int, below: tuple[Skill, ...]) -> float:
        """Return the loss on validation rows after a few steps of a region that SNIP chose."""
        key = f"{self.tasks[number].name}({' '.join(each.key for each in below)})"
        if key not in self.tried:
            bench = self.single(number, below)
            start = bench.with_readout(self.options)
            options = self.options.model_copy(update={"region_from": "snip", "among": "free"})
            region = bench.region(start, options, merged([skill.own for skill in below]))
            self.tried[key] = self._region_trained(bench, start, region, None, TRIAL_STEPS)[2]
        return self.tried[key]


def merged(parts: Sequence[tuple[Region, Tensor]]) -> Region:
    """Return the union of regions."""
    return Region(torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *(each.indices for each, _ in parts)])))


def stands_on(on: str, learned: Sequence[Skill]) -> tuple[Skill, ...]:
    """Return the tasks that a task stands on after the choice ``on``."""
    if on == ALONE:
        return ()
    if on == UNION:
        return tuple(learned)
    parent = next(skill for skill in learned if skill.task == on)
    return (*parent.below, parent)


# -- Rules -----------------------------------------------------------------------------------------------

Rule = Callable[[Skills, Sequence[Skill]], str]


def probes(skills: Skills, learned: Sequence[Skill], union: bool = False) -> dict[str, tuple[float, float]]:
    """Return the loss and accuracy of the next task's probe on each candidate."""
    candidates = [ALONE, *(skill.task for skill in learned), *([UNION] if union and len(learned) > 1 else [])]
    return {on: skills.probe(len(learned), stands_on(on, learned)) for on in candidates}


def by_probe(margin: float = 0.0, *, accuracy: bool = False, union: bool = False) -> Rule:
    """Return the rule: the lowest log loss (``accuracy``: among more accurate candidates), if below θ_pre's by ``margin``."""

    def choose(skills: Skills, learned: Sequence[Skill]) -> str:
        found = probes(skills, learned, union)
        fine = [on for on in found if not accuracy or found[on][1] > found[ALONE][1]]
        best = min(fine, key=lambda on: found[on][0], default=ALONE)
        return best if found[best][0] <= (1 - margin) * found[ALONE][0] else ALONE

    return choose


def with_way_back(skills: Skills, learned: Sequence[Skill]) -> str:
    """Choose by the probe with a margin; train alone if the loss after training is above the probe's loss on θ_pre."""
    on = by_probe(MARGIN)(skills, learned)
    loss = skills.learn(len(learned), stands_on(on, learned)).loss
    return on if loss <= probes(skills, learned)[ALONE][0] else ALONE


def better_of_two(skills: Skills, learned: Sequence[Skill]) -> str:
    """Choose the probe's best or alone, by the lower loss after training: the task is trained twice."""
    on = by_probe()(skills, learned)
    return min((ALONE, on), key=lambda each: skills.learn(len(learned), stands_on(each, learned)).loss)


def by_gradients(skills: Skills, learned: Sequence[Skill]) -> str:
    """Choose the earlier task with the most similar gradient at θ_pre, if the cosine is at least `KIN`, else alone."""
    kinship = skills.kinship(len(learned), learned)
    best = max(kinship, key=lambda name: kinship[name])
    return best if kinship[best] >= KIN else ALONE


def by_trial(skills: Skills, learned: Sequence[Skill]) -> str:
    """Choose the better of the probe's two best candidates after a few steps of a region."""
    found = probes(skills, learned)
    best = sorted(found, key=lambda on: found[on][0])[:2]
    return min(best, key=lambda on: skills.trial(len(learned), stands_on(on, learned)))


RULES: dict[str, Rule] = {
    "alone": lambda skills, learned: ALONE,
    "union": lambda skills, learned: UNION,
    "probe": by_probe(),
    "probe, margin": by_probe(MARGIN),
    "probe, margin, union among the candidates": by_probe(MARGIN, union=True),
    "probe, margin and way back": with_way_back,
    "probe, loss and accuracy": by_probe(accuracy=True),
    "better of two": better_of_two,
    "gradients": by_gradients,
    "trial": by_trial,
}


def measured(skills: Skills, names: Sequence[str]) -> dict[str, Any]:
    """Return the choices and the scores of rules, and the numbers that they used."""
    rules = {}
    for name in names:
        rule, inherits = INHERITS.get(name, (name, "graft"))
        learned: list[Skill] = []
        choices = []
        for number in range(len(skills.tasks)):
            choices.append(RULES[rule](skills, learned) if learned else ALONE)
            below = stands_on(choices[-1], learned)
            learned.append(skills.learn(number, below, inherits if below or inherits == "naive" else "graft"))
        rules[name] = {"choices": choices, "scores": [skill.score for skill in learned]}
        average = 100 * sum(skill.score for skill in learned) / len(learned)
        print(f"{name}: {average:.1f}  {' '.join(choices)}", flush=True)
    return {
        "tasks": [task.name for task in skills.tasks],
        "rows": [len(rows) for rows in skills.scored],
        "constant": [constant_score(rows) for rows in skills.scored],
        "rules": rules,
        "naive": skills.naive_scores(),
        "skills": {key: [skill.score, skill.loss] for key, skill in skills.trained.items()},
        "probes": skills.probed,
        "trials": skills.tried,
        "kinship": {
            task.name: skills.kinship(number, learned[:number])
            for number, task in enumerate(skills.tasks)
            if number and "gradients" in names
        },
    }


def constant_score(rows: Examples) -> float:
    """Return the share of the most frequent label: the score of the best constant answer."""
    return float(np.bincount(np.asarray(rows.targets)).max() / len(rows))


def tables(directory: Path) -> list[Table]:
    """Return for each stream the average of each rule, and its difference from training alone, paired by seed."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    made = []
    for stream in sorted({each["stream"] for each in found}):
        units = [each for each in found if each["stream"] == stream]
        rows = []
        for rule in (*RULES, *INHERITS):
            pairs = [(each["rules"][rule], each["rules"]["alone"]) for each in units if rule in each["rules"]]
            if pairs:
                means = np.array([[np.mean(one["scores"]) for one in pair] for pair in pairs])
                above = NULL if rule == "alone" else interval(means[:, 0] - means[:, 1]).text
                choices = "; ".join(" ".join(chosen["choices"][1:]) for chosen, _ in pairs)
                rows.append((rule, str(len(pairs)), f"{100 * means[:, 0].mean():.1f}", above, choices))
        for when in NAIVE:
            average = np.mean([each["naive"][when] for each in units])
            rows.append((f"naive training, {when}", str(len(units)), f"{100 * average:.1f}", NULL, NULL))
        floor = 100 * np.mean([each["constant"] for each in units])
        rows.append(("a constant answer", str(len(units)), f"{floor:.1f}", NULL, NULL))
        title = f"{stream}: {', '.join(units[0]['tasks'])} (in %, {counted(len(units), 'seed')})"
        header = ("rule", "seeds", "average", "above alone (points)", "parents of the tasks after the first")
        made.append(Table(title, header, tuple(rows)))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one seed of one stream, unless its file is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parents", description=__doc__.partition("\n")[0])
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rule", action="append", choices=(*RULES, *INHERITS), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/parents"))
    parser.add_argument("--shots", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-length", type=int, default=64)
    asked = parser.parse_args(arguments)
    file = asked.out / f"{asked.stream}-{asked.shots}-{asked.seed}.json"
    if file.exists():
        return 0
    quiet_libraries()
    set_threads(1)
    began = time.perf_counter()
    rows = load_tasks(list(STREAMS[asked.stream]), asked.data)
    loaded = load_model("minilm", "linear", tasks=[each.task for each in rows], max_length=asked.max_length)
    device = torch.device("cpu")
    tasks, scored = [], []
    for each in rows:
        task = SingleTask.of(loaded, each, shots=asked.shots, seed=asked.seed, test_limit=1, device=device).task
        # As many validation rows as training rows, at most: a user with few rows has few of both.
        seen = representative(task.validation.targets, len(task.train))
        rest = task.validation.subset([row for row in range(len(task.validation)) if row not in {*seen}])
        scored.append(rest.subset(representative(rest.targets, SCORED_ROWS)))
        tasks.append(replace(task, validation=task.validation.subset(seen)))
    settings = {"steps": asked.steps, "precision": faster_precision(loaded.model, tasks[0].train)}
    recipe = recipe_of("minilm", settings, ["grafting-continual"], "grafting-continual")
    options = build(SkillOptions, {**recipe, **settings}, "the benchmark")
    pre = ModelState.of(loaded.model, [task.name for task in tasks])
    skills = Skills(loaded, tasks, scored, options, asked.seed, device, pre)
    result = measured(skills, asked.rule or (*RULES, *INHERITS))
    asked.out.mkdir(parents=True, exist_ok=True)
    of_the_unit = ("stream", "shots", "seed", "steps", "max_length")
    about = {name: getattr(asked, name) for name in of_the_unit}
    write_json(file, {**about, "seconds": round(time.perf_counter() - began), **result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
