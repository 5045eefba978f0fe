"""The tasks of the paper (§3), the other registered tasks, and streams of them by name.

Prompts and label words are LM-BFF's (Gao et al., 2021, table 1) with the authors' own for AG News. For SuperGLUE, they
follow PET's (Schick and Schütze, 2021, appendix A). The causal prompts and the other prompts are ours. A causal
prompt ends where the label word follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from forgetfree.tasks import HubSource, TaskDefinition

_GLUE, _SUPER_GLUE = "nyu-mll/glue", "aps/super_glue"
_VALIDATED = {"train": "train", "validation": "validation", "test": "test"}
# The test labels of GLUE and SuperGLUE are withheld, so the validation set is the test set, as in the paper.
_WITHHELD = {"train": "train", "test": "validation"}
_SENTENCES, _ENTAILMENT = ("sentence1", "sentence2"), ("premise", "hypothesis")

# Shared by several tasks: kind, labels, prompt, label words and causal prompt.
_SENTIMENT = (
    *("single", ("negative", "positive")),
    *("{text} It was {mask}.", ("terrible", "great"), "{text} It was"),
)
# LM-BFF's label words for SST-5.
_STARS = (
    *("single", ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")),
    *("{text} It was {mask}.", ("terrible", "bad", "okay", "good", "great"), "{text} It was"),
)
_ENTAILS = "{text_a:bare}? {mask}, {text_b:lower}"
_ENTAILS_CAUSAL = "{text_a} {text_b} Answer:"
_NLI = ("pair", ("entailment", "neutral", "contradiction"), _ENTAILS, ("Yes", "Maybe", "No"), _ENTAILS_CAUSAL)
_TWO_WAY = ("pair", ("entailment", "not_entailment"), _ENTAILS, ("Yes", "No"), _ENTAILS_CAUSAL)
_SAME_CAUSAL = "{text_a} {text_b} Same meaning:"
_SAME = ("{text_a} {mask}, {text_b:lower}", ("No", "Yes"), _SAME_CAUSAL, "f1")
_YES_NO, _NO_YES = ("pair", ("false", "true")), ("No", "Yes")
_ASKED = "{text_b} Question: {text_a:bare}?"
_ASKED_CAUSAL = f"{_ASKED} Answer:"


def _glue(name: str, *columns: str, splits: Mapping[str, str] | None = None) -> HubSource:
    return HubSource(_GLUE, name, columns, splits=splits or _WITHHELD)


def _super_glue(name: str, *columns: str, labels: Mapping[int, int] | None = None) -> HubSource:
    return HubSource(_SUPER_GLUE, name, columns, splits=_WITHHELD, labels=labels)


_ALL = (
    # The paper's thirteen.
    TaskDefinition("sst2", *_SENTIMENT, hub=_glue("sst2", "sentence")),
    TaskDefinition("cr", *_SENTIMENT, hub=HubSource("SetFit/SentEval-CR")),
    TaskDefinition("mr", *_SENTIMENT, hub=HubSource("cornell-movie-review-data/rotten_tomatoes", splits=_VALIDATED)),
    TaskDefinition("mpqa", *_SENTIMENT, hub=HubSource("jxm/mpqa", columns=("sentence",))),
    TaskDefinition(
        *("subj", "single", ("subjective", "objective")),
        *("{text} This is {mask}.", ("subjective", "objective"), "{text} This is"),
        hub=HubSource("SetFit/subj", labels={0: 1, 1: 0}),  # the hub's data set numbers objective 0
    ),
    TaskDefinition(
        *("trec", "single", ("abbreviation", "entity", "description", "human", "location", "number")),
        *("{mask}: {text}", ("Expression", "Entity", "Description", "Human", "Location", "Number"), "{text} Type:"),
        hub=HubSource("CogComp/trec", label="coarse_label"),
    ),
    TaskDefinition(
        *("ag_news", "single", ("World", "Sports", "Business", "Sci/Tech")),
        *("{mask}: {text}", ("World", "Sports", "Business", "Tech"), "{text} Topic:"),
        hub=HubSource("fancyzhx/ag_news"),
    ),
    TaskDefinition("qnli", *_TWO_WAY, hub=_glue("qnli", "question", "sentence")),
    TaskDefinition("rte", *_TWO_WAY, hub=_glue("rte", *_SENTENCES)),
    TaskDefinition(
        "mnli", *_NLI, hub=_glue("mnli", *_ENTAILMENT, splits={"train": "train", "test": "validation_matched"})
    ),
    TaskDefinition("snli", *_NLI, hub=HubSource("stanfordnlp/snli", columns=_ENTAILMENT, splits=_VALIDATED)),
    TaskDefinition(
        "mrpc", "pair", ("not_equivalent", "equivalent"), *_SAME, hub=_glue("mrpc", *_SENTENCES, splits=_VALIDATED)
    ),
    TaskDefinition("qqp", "pair", ("not_duplicate", "duplicate"), *_SAME, hub=_glue("qqp", "question1", "question2")),
    # Other tasks.
    TaskDefinition("sst2_sentence", *_SENTIMENT, hub=HubSource("SetFit/sst2", splits=_VALIDATED)),
    TaskDefinition("imdb", *_SENTIMENT, hub=HubSource("stanfordnlp/imdb")),
    # Zhang et al., "Character-level Convolutional Networks for Text Classification", 2015.
    TaskDefinition("yelp_polarity", *_SENTIMENT, hub=HubSource("fancyzhx/yelp_polarity")),
    TaskDefinition("yelp", *_STARS, hub=HubSource("Yelp/yelp_review_full")),
    TaskDefinition(
        *("amazon", *_STARS),
        hub=HubSource(
            "yassiracharki/Amazon_Reviews_for_Sentiment_Analysis_fine_grained_5_classes",
            columns=("{review_title} {review_text}",),
            label="class_index",
            labels={star: star - 1 for star in range(1, 6)},
        ),
    ),
    TaskDefinition(
        "dbpedia",
        "single",
        (
            *("Company", "Educational Institution", "Artist", "Athlete", "Office Holder", "Mean of Transportation"),
            *("Building", "Natural Place", "Village", "Animal", "Plant", "Album", "Film", "Written Work"),
        ),
        "{text} Topic: {mask}.",
        (
            *("company", "school", "artist", "athlete", "politician", "vehicle"),
            *("building", "nature", "village", "animal", "plant", "album", "film", "book"),
        ),
        "{text} Topic:",
        hub=HubSource("fancyzhx/dbpedia_14", columns=("{title}. {content}",)),
    ),
    TaskDefinition(
        "yahoo",
        "single",
        (
            *("Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet"),
            *("Sports", "Business & Finance", "Entertainment & Music"),
            *("Family & Relationships", "Politics & Government"),
        ),
        "{text} Topic: {mask}.",
        (
            *("society", "science", "health", "education", "computer"),
            *("sports", "business", "entertainment", "family", "politics"),
        ),
        "{text} Topic:",
        hub=HubSource(
            *("community-datasets/yahoo_answers_topics", "yahoo_answers_topics"),
            *(("{question_title} {question_content} {best_answer}",), "topic"),
        ),
    ),
    # SuperGLUE (Wang et al., 2019).
    TaskDefinition(
        *("boolq", *_YES_NO, f"{_ASKED} Answer: {{mask}}.", _NO_YES, _ASKED_CAUSAL),
        hub=_super_glue("boolq", "question", "passage"),
    ),
    TaskDefinition(
        *("multirc", *_YES_NO, f"{_ASKED} {{mask}}.", _NO_YES, _ASKED_CAUSAL),
        hub=_super_glue("multirc", "{question} Is it {answer}", "paragraph"),
    ),
    TaskDefinition(
        *("wic", *_YES_NO, "{text_a} {text_b} Same meaning? {mask}.", _NO_YES, _SAME_CAUSAL),
        hub=_super_glue("wic", "{word}: {sentence1}", "sentence2"),
    ),
    # The hub's data set numbers contradiction 1.
    TaskDefinition("cb", *_NLI, hub=_super_glue("cb", *_ENTAILMENT, labels={0: 0, 1: 2, 2: 1})),
    TaskDefinition(
        *("copa", "pair", ("choice1", "choice2")),
        *("{text_a} {text_b} It is the {mask}.", ("first", "second"), "{text_a} {text_b} Answer: the"),
        hub=_super_glue("copa", "{premise} What was the {question}?", "First: {choice1} Second: {choice2}"),
    ),
    # Only in the demo.
    TaskDefinition(
        *("who_did_it", "pair", ("wrong", "right")),
        *("{text_a} {text_b} This is {mask}.", ("wrong", "right"), "{text_a} {text_b} This is"),
    ),
    TaskDefinition(
        *("was_it_kind", "single", ("cruel", "kind")),
        *("{text} This is {mask}.", ("cruel", "kind"), "{text} This is"),
    ),
)

#: Named entities.
_NAMED = (
    TaskDefinition.of_entities("ner_people_places", ("PERSON", "PLACE")),
    TaskDefinition.of_entities("ner_products", ("COMPANY", "PRODUCT")),
    # Salinas Alvarado et al., 2015; Derczynski et al., 2016 and 2017; Zeldes, 2017.
    TaskDefinition.of_entities("ner_sec", ("LOC", "MISC", "ORG", "PER")),
    TaskDefinition.of_entities("ner_btc", ("LOC", "ORG", "PER")),
    TaskDefinition.of_entities(
        "ner_wnut17", ("corporation", "creative-work", "group", "location", "person", "product")
    ),
    TaskDefinition.of_entities(
        "ner_gum",
        (
            *("abstract", "animal", "event", "object", "organization", "person"),
            *("place", "plant", "quantity", "substance", "time"),
        ),
    ),
)

#: Tasks of the demo that are answered by texts. Their template is shorter than a chat's, so that rows have at most 48 tokens.
_IN_A_LINE = ("generation", (), "{instruction}\n{prompt}\n", (), "")
_WRITTEN = (
    TaskDefinition(
        *("when_is_it", *_IN_A_LINE, "exact_match"), instruction="Write the date in figures.", max_new_tokens=16
    ),
    TaskDefinition(
        *("who_and_where", *_IN_A_LINE, "exact_match"), instruction="Answer in a word or two.", max_new_tokens=8
    ),
    TaskDefinition(*("in_one_line", *_IN_A_LINE, "rouge_l"), instruction="Sum it up in one line.", max_new_tokens=16),
)

#: Tasks of Super-NaturalInstructions (Wang et al., 2022) that are answered by texts; ``source.json`` has their instructions.
_INSTRUCTED = (
    *(
        TaskDefinition(f"ni_{name}", "generation", (), metric="exact_match", max_new_tokens=8)
        for name in ("commonsenseqa", "emotion", "sentiment140", "sst2")
    ),
    *(
        TaskDefinition(f"ni_{name}", "generation", (), metric="rouge_l")
        for name in (
            *("diplomacy", "evalution", "glucose", "multi_woz", "outcome"),
            *("personachat", "quoref", "sciq", "tifu", "xsum"),
        )
    ),
)

TASKS: dict[str, TaskDefinition] = {task.name: task for task in (*_ALL, *_NAMED, *_WRITTEN, *_INSTRUCTED)}

#: Streams by name: ordered lists of task names.
STREAMS: dict[str, tuple[str, ...]] = {
    # Table 4 of Panigrahi et al., 2023.
    "qnli-agnews-sst2": ("qnli", "ag_news", "sst2"),
    # Ours, with the embedded data: a task on which θ_pre scores at chance, then texts of another kind, then sentences like the
    # first task's with another question, so that forgetting shows.
    "demo": ("who_did_it", "ag_news", "was_it_kind"),
    # De Masson d'Autume et al., "Episodic Memory in Lifelong Language Learning", 2019: text classification,
    # orders (i) to (iv). Its authors use 115,000 training rows per task.
    "standard-1": ("yelp", "ag_news", "dbpedia", "amazon", "yahoo"),
    "standard-2": ("dbpedia", "yahoo", "ag_news", "amazon", "yelp"),
    "standard-3": ("yelp", "yahoo", "amazon", "dbpedia", "ag_news"),
    "standard-4": ("ag_news", "yelp", "amazon", "yahoo", "dbpedia"),
    # Razdaibiedina et al., "Progressive Prompts: Continual Learning for Language Models", 2023: the long streams of
    # 15 tasks, orders 8 to 10.
    "progressive-8": (
        *("mnli", "cb", "wic", "copa", "qqp", "boolq", "rte", "imdb"),
        *("yelp", "amazon", "sst2", "dbpedia", "ag_news", "multirc", "yahoo"),
    ),
    "progressive-9": (
        *("multirc", "boolq", "wic", "mnli", "cb", "copa", "qqp", "rte"),
        *("imdb", "sst2", "dbpedia", "ag_news", "yelp", "amazon", "yahoo"),
    ),
    "progressive-10": (
        *("yelp", "amazon", "mnli", "cb", "copa", "qqp", "rte", "imdb"),
        *("sst2", "dbpedia", "ag_news", "yahoo", "multirc", "boolq", "wic"),
    ),
    # Named entities: two embedded tasks (--data demo), and four domains whose kinds of entities differ.
    "ner-demo": ("ner_people_places", "ner_products"),
    "ner-domains": ("ner_sec", "ner_btc", "ner_wnut17", "ner_gum"),
    # Texts as answers: three embedded tasks (--data demo) for a small chat model, such as smollm2.
    "generation-demo": ("when_is_it", "who_and_where", "in_one_line"),
    # Zhao et al., "SAPT", 2024: fifteen tasks of Super-NaturalInstructions in two orders, here without samsum, whose licence
    # forbids redistribution.
    "superni-1": (
        *("ni_sst2", "ni_xsum", "ni_outcome", "ni_quoref", "ni_evalution", "ni_multi_woz", "ni_personachat"),
        *("ni_commonsenseqa", "ni_diplomacy", "ni_glucose", "ni_tifu", "ni_sciq", "ni_sentiment140", "ni_emotion"),
    ),
    "superni-2": (
        *("ni_glucose", "ni_commonsenseqa", "ni_diplomacy", "ni_multi_woz", "ni_sentiment140", "ni_sciq", "ni_sst2"),
        *("ni_evalution", "ni_personachat", "ni_outcome", "ni_tifu", "ni_quoref", "ni_xsum", "ni_emotion"),
    ),
    # Ours: six of these tasks, with short prompts and answers.
    "superni-short": ("ni_outcome", "ni_evalution", "ni_multi_woz", "ni_commonsenseqa", "ni_sciq", "ni_emotion"),
    # Ours: fourteen tasks, the paper's stream first.
    "long": (
        *("qnli", "ag_news", "sst2", "mnli", "snli", "qqp", "mrpc"),
        *("mr", "mpqa", "cr", "imdb", "dbpedia", "boolq", "wic"),
    ),
    # The same tasks in reverse order; and with the small tasks first and similar tasks together.
    "long-2": (
        *("wic", "boolq", "dbpedia", "imdb", "cr", "mpqa", "mr"),
        *("mrpc", "qqp", "snli", "mnli", "sst2", "ag_news", "qnli"),
    ),
    "long-3": (
        *("mrpc", "qqp", "wic", "boolq", "cr", "mpqa", "mr"),
        *("sst2", "imdb", "qnli", "mnli", "snli", "ag_news", "dbpedia"),
    ),
}
