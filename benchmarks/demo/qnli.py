"""Does the sentence answer the question? After the model of QNLI: entailment = 0, not_entailment = 1.

Every question is asked equally often under both labels, so the question alone tells nothing. Of the sentences
that do not answer, half tell another fact about the same entity and half make a remark. A model that looks
only for a fact in the sentence is right three times in four; in QNLI, too, the sentence alone tells something.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from forgetfree.benchmarks.demo.frames import SPLITS, Row, draw

# The entities are invented; what may be said about them is drawn from these.
NAMES = {
    "train": """Harwick Aldermoor Brannoch Castelmar Dunleath Elmsworth Farrowby Glenmarrow Hollinbrook
        Istervale Kestrelton Larkmere Marchwood Northolm Ostrava Pellingham Quenby Ravensmoor Silverdene
        Thornbury Ulverstone Velmora Westerkirk Yarrowfield Ambleford Birchington Corvane Deepwell
        Eastmarch Fairhaven Greystoke Heathcote Ironbridge Juniper Kingsholm Lindenau Mallory Netherby
        Orchardleigh Pinecrest Queensferry Rosewood Saltash Tidewater Underhill Vinehall Whitcombe
        Zellwood""",
    "validation": """Ashgrove Belcourt Cromarty Drayton Esterhill Foxglove Garrowmoor Highmead Inverlyn
        Jedburgh Kelmscott Longreach""",
    "test": """Arden Beaufort Caldera Dovedale Eversley Fenwick Gallant Hawthorne Inchmarlo Jessamine
        Kirkwall Lorraine Meridian Norwood Oakley Pemberton Quarley Redfern Stanhope Tamarind""",
}
FIRST_NAMES = {
    "train": """John Mary William Anna Henry Clara Edward Ruth Frederick Alice Samuel Helen Walter Emma
        Joseph Catherine""",
    "validation": "Robert Susan Philip Laura Martin Julia",
    "test": "George Elizabeth Thomas Margaret David Sarah Charles Rachel Peter Charlotte",
}
LAST_NAMES = {
    "train": """Carter Hughes Bennett Morrison Wallace Fletcher Graham Lindqvist Romano Schneider Novak
        Dubois Fitzgerald Turner Okafor Sinclair""",
    "validation": "Murray Jensen Fischer Rossi Coleman Patterson",
    "test": "Anderson Harrison Moreau Keller Petrov Watson Mitchell Sullivan Larsen Mendoza",
}
PLACES = {
    "train": """Norway Scotland Portugal Canada Bavaria Tuscany Cornwall Oregon Denmark Hungary Chile
        Vermont Ireland Virginia""",
    "validation": "Poland Wales Ontario Greece Sicily Maine",
    "test": "Sweden Austria California Brittany Finland Queensland Switzerland Texas Argentina Yorkshire",
}


@dataclass(frozen=True)
class Fact:
    """One thing to ask about a kind of entity: ``{e}`` is the entity, ``{v}`` the answer."""

    answer: str
    question: str
    first: str
    second: str


KINDS: dict[str, dict[str, tuple[Fact, ...]]] = {
    "train": {
        "Lighthouse": (
            Fact(
                "person",
                "Who designed the {e}?",
                "The plans for the {e} were drawn by {v}.",
                "The {e} is the work of the architect {v}.",
            ),
            Fact(
                "year",
                "When was the {e} first lit?",
                "The lamp of the {e} has burned since {v}.",
                "In {v} the {e} began to guide ships.",
            ),
            Fact(
                "place",
                "Where does the {e} stand?",
                "The {e} rises on a cliff in {v}.",
                "Sailors know the {e} from the coast of {v}.",
            ),
            Fact(
                "number",
                "How many steps does the {e} have?",
                "Visitors climb {v} stairs to the top of the {e}.",
                "Inside the {e} is a spiral of {v} stairs.",
            ),
        ),
        "Novel": (
            Fact(
                "person",
                "Who wrote the {e}?",
                "The {e} is by the author {v}.",
                "The {e} made its author, {v}, famous.",
            ),
            Fact(
                "year",
                "In what year did the {e} appear?",
                "The {e} was published in {v}.",
                "Readers could first buy the {e} in {v}.",
            ),
            Fact(
                "place",
                "In which country is the {e} set?",
                "The story of the {e} unfolds in {v}.",
                "The heroine of the {e} lives in {v}.",
            ),
            Fact(
                "number",
                "How many pages long is the {e}?",
                "The {e} runs to {v} pages.",
                "At {v} pages the {e} is a thick book.",
            ),
        ),
        "Railway": (
            Fact(
                "person",
                "Who paid for the {e}?",
                "The money for the {e} came from the merchant {v}.",
                "The {e} was financed by {v}.",
            ),
            Fact(
                "year",
                "When did the {e} open?",
                "The first train ran on the {e} in {v}.",
                "The {e} carried passengers from {v} onward.",
            ),
            Fact(
                "place",
                "Where is the {e} found?",
                "The {e} winds through the hills of {v}.",
                "The {e} links towns in {v}.",
            ),
            Fact(
                "number",
                "How many stations are on the {e}?",
                "There are {v} platforms along the {e}.",
                "The {e} serves {v} stations.",
            ),
        ),
        "Cathedral": (
            Fact(
                "person",
                "Which bishop is buried in the {e}?",
                "The tomb in the {e} holds Bishop {v}.",
                "Bishop {v} lies beneath the floor of the {e}.",
            ),
            Fact(
                "year",
                "When was the {e} completed?",
                "Masons laid the last stone of the {e} in {v}.",
                "The {e} was ready for worship in {v}.",
            ),
            Fact(
                "place",
                "What region is the {e} located in?",
                "The {e} is the largest church in {v}.",
                "Pilgrims travel to {v} to see the {e}.",
            ),
            Fact(
                "number",
                "How many bells hang in the {e}?",
                "The tower of the {e} rings with {v} bells.",
                "A set of {v} bells was cast for the {e}.",
            ),
        ),
        "Orchestra": (
            Fact(
                "person",
                "Who conducts the {e}?",
                "The baton of the {e} is held by {v}.",
                "The {e} plays under {v}.",
            ),
            Fact(
                "year",
                "What year was the {e} founded?",
                "The {e} was formed in {v}.",
                "The {e} gave its first concert in {v}.",
            ),
            Fact(
                "place",
                "Where is the {e} based?",
                "The {e} has its home in {v}.",
                "The {e} is the pride of music fans in {v}.",
            ),
            Fact(
                "number",
                "How many musicians belong to the {e}?",
                "The {e} has {v} players.",
                "There are {v} members in the {e}.",
            ),
        ),
        "Mine": (
            Fact(
                "person",
                "Who discovered the {e}?",
                "The silver of the {e} was found by {v}.",
                "The first to notice the {e} was {v}.",
            ),
            Fact(
                "year",
                "When did digging start at the {e}?",
                "The first shaft of the {e} was sunk in {v}.",
                "Miners went down the {e} from {v}.",
            ),
            Fact(
                "place",
                "In what part of the world is the {e}?",
                "The {e} lies deep under {v}.",
                "Ore from the {e} made {v} rich.",
            ),
            Fact(
                "number",
                "How deep is the {e}?",
                "The {e} goes down {v} meters.",
                "The floor of the {e} is {v} meters below the surface.",
            ),
        ),
        "Garden": (
            Fact(
                "person",
                "Who planted the {e}?",
                "The roses of the {e} were laid out by {v}.",
                "The {e} was the life's work of {v}.",
            ),
            Fact(
                "year",
                "When did the public first enter the {e}?",
                "The gates of the {e} were opened to all in {v}.",
                "The {e} sold its first tickets in {v}.",
            ),
            Fact(
                "place",
                "Where can the {e} be visited?",
                "The {e} is among the finest parks in {v}.",
                "The {e} lies beside a lake in {v}.",
            ),
            Fact(
                "number",
                "How many kinds of trees grow in the {e}?",
                "The {e} is home to {v} species of trees.",
                "Botanists counted {v} different trees in the {e}.",
            ),
        ),
        "Ship": (
            Fact(
                "person",
                "Who was the captain of the {e}?",
                "The {e} sailed under {v}.",
                "The crew of the {e} obeyed Captain {v}.",
            ),
            Fact(
                "year",
                "When was the {e} launched?",
                "The {e} first touched water in {v}.",
                "The {e} left the yard in {v}.",
            ),
            Fact(
                "place",
                "Where was the {e} built?",
                "The {e} came from a shipyard in {v}.",
                "Carpenters in {v} made the {e}.",
            ),
            Fact(
                "number",
                "How many passengers could the {e} carry?",
                "The {e} had cabins for {v} people.",
                "There was room for {v} on the {e}.",
            ),
        ),
    },
    "validation": {
        "Bridge": (
            Fact(
                "person",
                "Which engineer drew up the {e}?",
                "The arches of the {e} were calculated by {v}.",
                "{v} is the engineer behind the {e}.",
            ),
            Fact(
                "year",
                "When did traffic begin to cross the {e}?",
                "The {e} has been in use since {v}.",
                "Cars rolled over the {e} from {v}.",
            ),
            Fact(
                "place",
                "Where is the {e} situated?",
                "The {e} spans a gorge in {v}.",
                "The {e} is a symbol of {v}.",
            ),
            Fact(
                "number",
                "How many pillars support the {e}?",
                "The {e} rests on {v} columns.",
                "A row of {v} columns bears the {e}.",
            ),
        ),
        "University": (
            Fact(
                "person",
                "Who is the president of the {e}?",
                "The {e} is led by {v}.",
                "The professors of the {e} elected {v}.",
            ),
            Fact(
                "year",
                "When was the {e} established?",
                "The charter of the {e} dates from {v}.",
                "Teaching at the {e} commenced in {v}.",
            ),
            Fact(
                "place",
                "In which state is the {e}?",
                "The {e} has its campus in {v}.",
                "The {e} draws young scholars to {v}.",
            ),
            Fact(
                "number",
                "How many students attend the {e}?",
                "The {e} teaches {v} undergraduates.",
                "Enrollment at the {e} is {v}.",
            ),
        ),
        "Ballet": (
            Fact(
                "person",
                "Who danced the leading role in the {e}?",
                "The prima donna of the {e} was {v}.",
                "The {e} brought {v} great applause.",
            ),
            Fact("year", "When was the {e} created?", "The {e} was new in {v}.", "The {e} dates from {v}."),
            Fact(
                "place",
                "Where was the {e} rehearsed?",
                "The dancers prepared the {e} in {v}.",
                "The {e} took shape at a studio in {v}.",
            ),
            Fact(
                "number",
                "How many dancers perform in the {e}?",
                "The {e} needs {v} dancers.",
                "A troupe of {v} is on stage in the {e}.",
            ),
        ),
    },
    "test": {
        "Museum": (
            Fact(
                "person",
                "Who donated the collection of the {e}?",
                "The treasures of the {e} are a gift from {v}.",
                "The {e} inherited its paintings from {v}.",
            ),
            Fact(
                "year",
                "When was the {e} inaugurated?",
                "The {e} welcomed its first guests in {v}.",
                "The {e} has existed since {v}.",
            ),
            Fact(
                "place",
                "Where is the {e}?",
                "The {e} attracts tourists to {v}.",
                "The {e} occupies a palace in {v}.",
            ),
            Fact(
                "number",
                "How many exhibits does the {e} display?",
                "The {e} shows {v} objects.",
                "The halls of the {e} contain {v} artifacts.",
            ),
        ),
        "Opera": (
            Fact(
                "person",
                "Who composed the {e}?",
                "The score of the {e} was written by {v}.",
                "The {e} is a youthful piece by {v}.",
            ),
            Fact(
                "year",
                "When did the {e} premiere?",
                "The {e} was first performed in {v}.",
                "Audiences heard the {e} for the first time in {v}.",
            ),
            Fact(
                "place",
                "Where does the action of the {e} take place?",
                "The {e} tells of two lovers in {v}.",
                "The scenery of the {e} depicts {v}.",
            ),
            Fact(
                "number",
                "How many singers does the {e} require?",
                "The {e} calls for a chorus of {v}.",
                "The {e} employs {v} voices.",
            ),
        ),
        "Dam": (
            Fact(
                "person",
                "Who supervised the construction of the {e}?",
                "The {e} was erected under the direction of {v}.",
                "The manager of the {e} project was {v}.",
            ),
            Fact(
                "year",
                "When was the {e} constructed?",
                "Concrete for the {e} was poured in {v}.",
                "The {e} was erected in {v}.",
            ),
            Fact(
                "place",
                "Where would one find the {e}?",
                "The {e} blocks a river in {v}.",
                "The {e} supplies electricity to {v}.",
            ),
            Fact(
                "number",
                "How tall is the {e}?",
                "The {e} reaches a height of {v} feet.",
                "The wall of the {e} measures {v} feet.",
            ),
        ),
        "Newspaper": (
            Fact(
                "person",
                "Who edits the {e}?",
                "The editor of the {e} is {v}.",
                "The {e} hired {v} as its editor.",
            ),
            Fact(
                "year",
                "When was the {e} first printed?",
                "The earliest issue of the {e} is dated {v}.",
                "The {e} started in {v}.",
            ),
            Fact(
                "place",
                "Where is the {e} read?",
                "The {e} reports local events in {v}.",
                "Kiosks all over {v} sell the {e}.",
            ),
            Fact(
                "number",
                "How many journalists produce the {e}?",
                "The {e} pays {v} reporters.",
                "The newsroom of the {e} has {v} desks.",
            ),
        ),
        "Telescope": (
            Fact(
                "person",
                "Who invented the {e}?",
                "The {e} was the idea of the astronomer {v}.",
                "The inventor of the {e} was {v}.",
            ),
            Fact(
                "year",
                "When was the {e} installed?",
                "The {e} has watched the sky since {v}.",
                "The {e} recorded its first star in {v}.",
            ),
            Fact(
                "place",
                "Where is the {e} operated?",
                "The {e} sits on a mountain in {v}.",
                "Clear nights over {v} suit the {e}.",
            ),
            Fact(
                "number",
                "How heavy is the {e}?",
                "The {e} weighs {v} tons.",
                "The mirror of the {e} has a mass of {v} tons.",
            ),
        ),
    },
}

# Remarks that answer no question.
REMARKS = {
    "Lighthouse": (
        "The {e} is loved by painters.",
        "In fog the {e} looks like a ghost.",
        "The {e} has thick white stonework.",
        "Gulls nest under the roof of the {e}.",
    ),
    "Novel": (
        "The {e} was praised by critics.",
        "In the {e} nobody is happy for long.",
        "The {e} is full of gossip and rain.",
        "There was little humor in the {e}.",
    ),
    "Railway": (
        "The {e} is known for its red carriages.",
        "In winter the {e} was blocked by snow.",
        "Children waved to the drivers of the {e}.",
        "The {e} has seats of green leather.",
    ),
    "Cathedral": (
        "The {e} is admired for its windows.",
        "In the {e} the air smells of wax.",
        "The {e} was blessed by monks.",
        "Candles burn in the dark corners of the {e}.",
    ),
    "Orchestra": (
        "The {e} is respected for its brass.",
        "In rehearsal the {e} was rather noisy.",
        "The {e} was cheered by the crowd.",
        "Violins from the {e} sound soft and sad.",
    ),
    "Mine": (
        "The {e} was feared by many.",
        "In the {e} the heat is hard to endure.",
        "The {e} has a bad reputation.",
        "Ghost stories are told of the {e}.",
    ),
    "Garden": (
        "The {e} is famous for its scent.",
        "In spring the {e} hums with bees.",
        "The {e} was admired by poets.",
        "Paths of gravel end at the fountain of the {e}.",
    ),
    "Ship": (
        "The {e} was painted by hand in blue and gold.",
        "In rough seas the {e} swayed heavily.",
        "The {e} has a reputation for luck.",
        "Dolphins followed the {e} for hours.",
    ),
    "Bridge": (
        "The {e} is popular with cyclists.",
        "In moonlight the {e} seems to float.",
        "The {e} was hated by ferrymen.",
        "Pigeons sleep on the cables of the {e}.",
    ),
    "University": (
        "The {e} is renowned for chemistry.",
        "In June the {e} turns quiet.",
        "The {e} was mocked by rivals.",
        "Ivy covers the library of the {e}.",
    ),
    "Ballet": (
        "The {e} is celebrated for its costumes.",
        "In the {e} swans become humans.",
        "The {e} was adored by royalty.",
        "Flutes accompany the {e}.",
    ),
    "Museum": (
        "The {e} is cherished by schoolchildren.",
        "In August the {e} gets crowded.",
        "The {e} was mentioned in guidebooks.",
        "Marble decorates the entrance of the {e}.",
    ),
    "Opera": (
        "The {e} is notorious for its difficulty.",
        "In the {e} jealousy provokes murder.",
        "The {e} was ridiculed by connoisseurs.",
        "Trumpets dominate the overture of the {e}.",
    ),
    "Dam": (
        "The {e} is criticized by environmentalists.",
        "In drought the {e} proves useless.",
        "The {e} was protected by sentries.",
        "Salmon swim around the {e} with difficulty.",
    ),
    "Newspaper": (
        "The {e} is trusted by farmers.",
        "In elections the {e} remains neutral.",
        "The {e} was sued for libel.",
        "Crossword puzzles fill the final column of the {e}.",
    ),
    "Telescope": (
        "The {e} is envied by scientists.",
        "In bright moonshine the {e} detects almost nothing.",
        "The {e} was polished by robots.",
        "Dust harms the delicate lenses of the {e}.",
    ),
}


def rows(split: str) -> list[Row]:
    """The rows of one split, labels balanced and shuffled."""
    rng = random.Random(1000 + SPLITS.index(split))
    names = draw(rng, NAMES[split].split(), len(NAMES[split].split()))
    per_kind = len(names) // len(KINDS[split])
    made: list[Row] = []
    for kind, facts in KINDS[split].items():
        for _ in range(per_kind):
            told = [(fact, _answer(rng, split, fact.answer)) for fact in facts]
            made += _ask(rng, f"{names.pop()} {kind}", told, REMARKS[kind])
    return draw(rng, made, len(made))


def _ask(rng: random.Random, entity: str, told: Sequence[tuple[Fact, str]], remarks: Sequence[str]) -> list[Row]:
    """Each question with both sentences that answer it, one that tells another fact, and one remark."""
    made: list[Row] = []
    for fact, answer in told:
        other, other_answer = draw(rng, [pair for pair in told if pair[0] is not fact], 1)[0]
        question = fact.question.format(e=entity)
        for sentence, value, label in (
            (fact.first, answer, 0),
            (fact.second, answer, 0),
            (draw(rng, (other.first, other.second), 1)[0], other_answer, 1),
            (draw(rng, remarks, 1)[0], "", 1),
        ):
            text = sentence.format(e=entity, v=value)
            made.append((question, text[0].upper() + text[1:], label))
    return made


def _answer(rng: random.Random, split: str, kind: str) -> str:
    """An answer of one kind; each split has its own class of years and numbers modulo 3."""
    offset = SPLITS.index(split)
    if kind == "person":
        return " ".join(draw(rng, pool[split].split(), 1)[0] for pool in (FIRST_NAMES, LAST_NAMES))
    if kind == "place":
        return draw(rng, PLACES[split].split(), 1)[0]
    if kind == "year":
        return str(1800 + offset + 3 * int(rng.random() * 60))
    return str(21 + offset + 3 * int(rng.random() * 250))
