"""The tasks of the paper (§3) and those that ship beside them.

Prompts and label words are LM-BFF's (Gao et al., 2021, table 1) with the authors' own for AG News. The
causal prompts are ours: they end where the label word follows.
"""

from __future__ import annotations

from forgetfree.tasks import HubSource, TaskDefinition

_GLUE = "nyu-mll/glue"
_VALIDATED = {"train": "train", "validation": "validation", "test": "test"}
# GLUE's test labels are withheld, so its validation set is the test set, as in the paper.
_GLUE_SPLITS = {"train": "train", "test": "validation"}

_WAS = "{text} It was {mask}."
_WAS_CAUSAL = "{text} It was"
_ENTAILS = "{text_a:bare}? {mask}, {text_b:lower}"
_ENTAILS_CAUSAL = "{text_a} {text_b} Answer:"
_SAME = "{text_a} {mask}, {text_b:lower}"
_SAME_CAUSAL = "{text_a} {text_b} Same meaning:"
_SENTENCES = ("sentence1", "sentence2")


def _sentiment(name: str, hub: HubSource | None) -> TaskDefinition:
    return TaskDefinition(
        name,
        "single",
        ("negative", "positive"),
        template=_WAS,
        label_words=("terrible", "great"),
        causal_template=_WAS_CAUSAL,
        hub=hub,
    )


def _nli(name: str, hub: HubSource) -> TaskDefinition:
    return TaskDefinition(
        name,
        "pair",
        ("entailment", "neutral", "contradiction"),
        template=_ENTAILS,
        label_words=("Yes", "Maybe", "No"),
        causal_template=_ENTAILS_CAUSAL,
        hub=hub,
    )


def _two_way(name: str, hub: HubSource) -> TaskDefinition:
    return TaskDefinition(
        name,
        "pair",
        ("entailment", "not_entailment"),
        template=_ENTAILS,
        label_words=("Yes", "No"),
        causal_template=_ENTAILS_CAUSAL,
        hub=hub,
    )


def _paraphrase(name: str, labels: tuple[str, str], hub: HubSource) -> TaskDefinition:
    return TaskDefinition(
        name,
        "pair",
        labels,
        template=_SAME,
        label_words=("No", "Yes"),
        causal_template=_SAME_CAUSAL,
        metric="f1",
        hub=hub,
    )


_ALL = (
    # The paper's thirteen.
    _sentiment("sst2", HubSource(_GLUE, "sst2", ("sentence",), splits=_GLUE_SPLITS)),
    _sentiment("cr", HubSource("SetFit/SentEval-CR")),
    _sentiment("mr", HubSource("cornell-movie-review-data/rotten_tomatoes", splits=_VALIDATED)),
    _sentiment("mpqa", HubSource("jxm/mpqa", columns=("sentence",))),
    TaskDefinition(
        "subj",
        "single",
        ("subjective", "objective"),
        template="{text} This is {mask}.",
        label_words=("subjective", "objective"),
        causal_template="{text} This is",
        # The hub's set calls objective 0.
        hub=HubSource("SetFit/subj", labels={0: 1, 1: 0}),
    ),
    TaskDefinition(
        "trec",
        "single",
        ("abbreviation", "entity", "description", "human", "location", "number"),
        template="{mask}: {text}",
        label_words=("Expression", "Entity", "Description", "Human", "Location", "Number"),
        causal_template="{text} Type:",
        hub=HubSource("CogComp/trec", label="coarse_label"),
    ),
    TaskDefinition(
        "ag_news",
        "single",
        ("World", "Sports", "Business", "Sci/Tech"),
        template="{mask}: {text}",
        label_words=("World", "Sports", "Business", "Tech"),
        causal_template="{text} Topic:",
        hub=HubSource("fancyzhx/ag_news"),
    ),
    _two_way("qnli", HubSource(_GLUE, "qnli", ("question", "sentence"), splits=_GLUE_SPLITS)),
    _two_way("rte", HubSource(_GLUE, "rte", _SENTENCES, splits=_GLUE_SPLITS)),
    _nli(
        "mnli",
        HubSource(_GLUE, "mnli", ("premise", "hypothesis"), splits={"train": "train", "test": "validation_matched"}),
    ),
    _nli("snli", HubSource("stanfordnlp/snli", columns=("premise", "hypothesis"), splits=_VALIDATED)),
    _paraphrase(
        "mrpc",
        ("not_equivalent", "equivalent"),
        HubSource(_GLUE, "mrpc", _SENTENCES, splits=_VALIDATED),
    ),
    _paraphrase(
        "qqp",
        ("not_duplicate", "duplicate"),
        HubSource(_GLUE, "qqp", ("question1", "question2"), splits=_GLUE_SPLITS),
    ),
    # Beside them.
    _sentiment("sst2_sentence", HubSource("SetFit/sst2", splits=_VALIDATED)),
    _sentiment("imdb", HubSource("stanfordnlp/imdb")),
)

TASKS: dict[str, TaskDefinition] = {task.name: task for task in _ALL}
