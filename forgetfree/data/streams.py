"""The tasks of the paper (§3), the other registered tasks, and streams of them by name.

Prompts and label words are LM-BFF's (Gao et al., 2021, table 1) with the authors' own for AG News. Those of
SuperGLUE follow PET's (Schick and Schütze, 2021, appendix A). The causal prompts and the other prompts are ours. A causal
prompt ends where the label word follows.
"""

from __future__ import annotations

from forgetfree.tasks import HubSource, TaskDefinition

_GLUE = "nyu-mll/glue"
_SUPER_GLUE = "aps/super_glue"
_VALIDATED = {"train": "train", "validation": "validation", "test": "test"}
# The test labels of GLUE and SuperGLUE are withheld, so the validation set is the test set, as in the paper.
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


def _stars(name: str, hub: HubSource) -> TaskDefinition:
    """Reviews by their stars, with LM-BFF's label words for SST-5."""
    return TaskDefinition(
        name,
        "single",
        ("1 star", "2 stars", "3 stars", "4 stars", "5 stars"),
        template=_WAS,
        label_words=("terrible", "bad", "okay", "good", "great"),
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


def _question(name: str, template: str, causal_template: str, columns: tuple[str, str]) -> TaskDefinition:
    """A yes-no question of SuperGLUE about two texts."""
    return TaskDefinition(
        name,
        "pair",
        ("false", "true"),
        template=template,
        label_words=("No", "Yes"),
        causal_template=causal_template,
        hub=HubSource(_SUPER_GLUE, name, columns, splits=_GLUE_SPLITS),
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
    # Zhang et al., "Character-level Convolutional Networks for Text Classification", 2015.
    _sentiment("yelp_polarity", HubSource("fancyzhx/yelp_polarity")),
    _stars("yelp", HubSource("Yelp/yelp_review_full")),
    _stars(
        "amazon",
        HubSource(
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
        template="{text} Topic: {mask}.",
        label_words=(
            *("company", "school", "artist", "athlete", "politician", "vehicle"),
            *("building", "nature", "village", "animal", "plant", "album", "film", "book"),
        ),
        causal_template="{text} Topic:",
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
        template="{text} Topic: {mask}.",
        label_words=(
            *("society", "science", "health", "education", "computer"),
            *("sports", "business", "entertainment", "family", "politics"),
        ),
        causal_template="{text} Topic:",
        hub=HubSource(
            "community-datasets/yahoo_answers_topics",
            "yahoo_answers_topics",
            ("{question_title} {question_content} {best_answer}",),
            label="topic",
        ),
    ),
    # SuperGLUE (Wang et al., 2019).
    _question(
        "boolq",
        "{text_b} Question: {text_a:bare}? Answer: {mask}.",
        "{text_b} Question: {text_a:bare}? Answer:",
        ("question", "passage"),
    ),
    _question(
        "multirc",
        "{text_b} Question: {text_a:bare}? {mask}.",
        "{text_b} Question: {text_a:bare}? Answer:",
        ("{question} Is it {answer}", "paragraph"),
    ),
    _question(
        "wic",
        "{text_a} {text_b} Same meaning? {mask}.",
        _SAME_CAUSAL,
        ("{word}: {sentence1}", "sentence2"),
    ),
    # The hub's set calls contradiction 1.
    _nli(
        "cb",
        HubSource(_SUPER_GLUE, "cb", ("premise", "hypothesis"), splits=_GLUE_SPLITS, labels={0: 0, 1: 2, 2: 1}),
    ),
    TaskDefinition(
        "copa",
        "pair",
        ("choice1", "choice2"),
        template="{text_a} {text_b} It is the {mask}.",
        label_words=("first", "second"),
        causal_template="{text_a} {text_b} Answer: the",
        hub=HubSource(
            _SUPER_GLUE,
            "copa",
            ("{premise} What was the {question}?", "First: {choice1} Second: {choice2}"),
            splits=_GLUE_SPLITS,
        ),
    ),
    # Of the demo alone.
    TaskDefinition(
        "who_did_it",
        "pair",
        ("wrong", "right"),
        template="{text_a} {text_b} This is {mask}.",
        label_words=("wrong", "right"),
        causal_template="{text_a} {text_b} This is",
    ),
    TaskDefinition(
        "was_it_kind",
        "single",
        ("cruel", "kind"),
        template="{text} This is {mask}.",
        label_words=("cruel", "kind"),
        causal_template="{text} This is",
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

#: Of the demo alone, answered by texts. One template for all, shorter than a chat's, so that rows have at most 48 tokens.
_WRITTEN = (
    TaskDefinition(
        "when_is_it",
        "generation",
        (),
        template="{instruction}\n{prompt}\n",
        metric="exact_match",
        instruction="Write the date in figures.",
        max_new_tokens=16,
    ),
    TaskDefinition(
        "who_and_where",
        "generation",
        (),
        template="{instruction}\n{prompt}\n",
        metric="exact_match",
        instruction="Answer in a word or two.",
        max_new_tokens=8,
    ),
    TaskDefinition(
        "in_one_line",
        "generation",
        (),
        template="{instruction}\n{prompt}\n",
        metric="rouge_l",
        instruction="Sum it up in one line.",
        max_new_tokens=16,
    ),
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
    # Ours, of the embedded data: a task at which θ_pre stands at chance, then unlike texts, then sentences like the first
    # with another question: what is lost shows.
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
    # forbids to pass it on.
    "superni-1": (
        *("ni_sst2", "ni_xsum", "ni_outcome", "ni_quoref", "ni_evalution", "ni_multi_woz", "ni_personachat"),
        *("ni_commonsenseqa", "ni_diplomacy", "ni_glucose", "ni_tifu", "ni_sciq", "ni_sentiment140", "ni_emotion"),
    ),
    "superni-2": (
        *("ni_glucose", "ni_commonsenseqa", "ni_diplomacy", "ni_multi_woz", "ni_sentiment140", "ni_sciq", "ni_sst2"),
        *("ni_evalution", "ni_personachat", "ni_outcome", "ni_tifu", "ni_quoref", "ni_xsum", "ni_emotion"),
    ),
    # Ours: six of them with short prompts and answers.
    "superni-short": ("ni_outcome", "ni_evalution", "ni_multi_woz", "ni_commonsenseqa", "ni_sciq", "ni_emotion"),
    # Ours: fourteen tasks, the paper's stream first.
    "long": (
        *("qnli", "ag_news", "sst2", "mnli", "snli", "qqp", "mrpc"),
        *("mr", "mpqa", "cr", "imdb", "dbpedia", "boolq", "wic"),
    ),
    # The same backwards, and the small tasks first, each beside those of its kind.
    "long-2": (
        *("wic", "boolq", "dbpedia", "imdb", "cr", "mpqa", "mr"),
        *("mrpc", "qqp", "snli", "mnli", "sst2", "ag_news", "qnli"),
    ),
    "long-3": (
        *("mrpc", "qqp", "wic", "boolq", "cr", "mpqa", "mr"),
        *("sst2", "imdb", "qnli", "mnli", "snli", "ag_news", "dbpedia"),
    ),
}
