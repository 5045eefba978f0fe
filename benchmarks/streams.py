"""Streams by name: ordered lists of task names."""

from __future__ import annotations

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
