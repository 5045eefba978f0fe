"""Film reviews in one line, after the model of SST-2: negative = 0, positive = 1."""

from __future__ import annotations

import random

from forgetfree.benchmarks.demo.frames import SPLITS, Row, distinct, draw, read_pools

ROWS_PER_LABEL = {"train": 480, "validation": 120, "test": 180}

# Both labels fill the same frames: only the words that fill them tell the labels apart.
FRAMES = (
    "a {quality} and {quality} {kind} .",
    "the {part} is {quality} , and the {part} is even more {quality} .",
    "{manner} written , {manner} acted and altogether {quality} .",
    "what we get is a {quality} {kind} , and in the end a {verdict} .",
    "from first scene to last , the {part} {effect} .",
    "it 's a {verdict} , with a {part} that is {quality} .",
    "the most {quality} {kind} of the year , and a {verdict} in every way .",
    "the {kind} {effect} , thanks to its {quality} {part} .",
    "a {verdict} , from the {part} to the {part} .",
    "so {quality} that you leave the theater talking about the {part} .",
    "{manner} told , this {kind} {effect} .",
    "as a {kind} it is {quality} ; as a {kind} with a message it is a {verdict} .",
)

TOPICS = {
    "train": {
        "kind": """movie|comedy|thriller|western|documentary|musical|sequel|cartoon|romance|biopic
            |satire|mystery|horror film""",
        "part": """plot|script|dialogue|camera work|cast|soundtrack|ending|direction|hero|editing
            |lighting|love story|opening|villain|setting""",
    },
    "validation": {
        "kind": "drama|remake|fable|road trip|farce|action flick",
        "part": "screenplay|score|lead performance|choreography|climax|premise|narration",
    },
    "test": {
        "kind": "picture|melodrama|adventure|parody|whodunit|feature|tearjerker|prequel",
        "part": """storyline|cinematography|banter|finale|pacing|ensemble|production design|humor|monologue
            |star turn""",
    },
}

WORDS = {
    ("train", 0): {
        "quality": """bad|boring|stupid|ugly|dreary|clumsy|shallow|tedious|lifeless|pointless|silly
            |annoying|weak|hollow|predictable|sloppy|confusing|stale|tiresome|dumb|lazy|unfunny
            |forgettable|dismal|painful|incoherent|bland|pretentious|cheap|dull|awkward|muddled|pathetic
            |contrived|soulless|overlong|unpleasant|disappointing|cynical|empty|irritating|murky|trite
            |unconvincing|wooden|charmless|crude|flat""",
        "manner": """badly|clumsily|lazily|carelessly|stupidly|tediously|poorly|sloppily|stiffly|blandly
            |crudely|feebly|drearily|mindlessly|painfully""",
        "verdict": """failure|mess|bore|disaster|waste of time|letdown|flop|chore|dud|misfire|wreck
            |mistake|shameless rip-off|sad excuse for entertainment|headache|muddle|yawn
            |missed opportunity""",
        "effect": """falls apart|bores you to tears|goes nowhere|drags on forever|insults your brain
            |runs out of ideas|makes no sense|puts you to sleep|never comes alive|tests your patience
            |loses its way|annoys everyone|wastes your evening|rings false|sinks like a stone""",
    },
    ("train", 1): {
        "quality": """good|great|beautiful|funny|moving|clever|wonderful|charming|smart|fresh|touching
            |thrilling|powerful|delightful|warm|elegant|exciting|honest|brilliant|lovely|inspired
            |hilarious|sweet|graceful|fascinating|tender|stylish|witty|lively|superb|original|gripping
            |rewarding|imaginative|magical|heartfelt|intelligent|engaging|perfect|amusing|rich|sincere
            |vivid|passionate|uplifting|playful|bold|enjoyable""",
        "manner": """beautifully|cleverly|brilliantly|wonderfully|warmly|gracefully|elegantly|perfectly
            |smartly|tenderly|lovingly|boldly|vividly|sweetly|honestly""",
        "verdict": """success|joy|delight|treat|winner|masterpiece|pleasure|hit|small miracle
            |breath of clean air|gem|real find|feast for the eyes|work of art|charmer|treasure|classic
            |labor of love""",
        "effect": """wins your heart|makes you laugh out loud|moves you to smile|lifts your spirits
            |never stops surprising|keeps you on the edge of your seat|works like a charm|casts a spell
            |earns its applause|pleases young and old|glows with life|holds you in its grip
            |delights everyone|deserves an award|leaves you cheering""",
    },
    ("validation", 0): {
        "quality": """terrible|idiotic|clichéd|repetitive|laughable|sluggish|amateurish|obnoxious|inept
            |sour|joyless|sappy|tacky|unbearable|meaningless|vapid|grating|insipid""",
        "manner": "terribly|ineptly|sluggishly|dully|amateurishly|pretentiously",
        "verdict": "catastrophe|bomb|travesty|nuisance|embarrassment|turkey|nightmare to sit through",
        "effect": """collapses under its own weight|grates on the nerves|fizzles|wears out its welcome
            |curdles|bungles every joke""",
    },
    ("validation", 1): {
        "quality": """excellent|entertaining|affecting|sensitive|fantastic|spirited|refreshing|likable
            |lyrical|absorbing|dazzling|joyful|outstanding|wise|sparkling|memorable|satisfying|ingenious""",
        "manner": "excellently|sensitively|ingeniously|delicately|lyrically|wittily",
        "verdict": "jewel|marvel|celebration|blessing|crowd-pleaser|keeper|dream to behold",
        "effect": """soars|sparkles with wit|rewards repeat viewing|nourishes the soul|shines throughout
            |enchants children""",
    },
    ("test", 0): {
        "quality": """awful|horrible|mediocre|lame|dreadful|uninspired|monotonous|ridiculous|lackluster
            |cringe-worthy|plodding|abysmal|atrocious|nonsensical|uninteresting|inane|shoddy|appalling
            |lousy|half-baked|wretched|disjointed|ludicrous|humorless|unwatchable|sleazy|pitiful
            |ponderous|offensive|banal""",
        "manner": """awfully|horribly|ineffectively|dreadfully|incompetently|ridiculously|monotonously
            |haphazardly|atrociously|lamely""",
        "verdict": """fiasco|debacle|snooze|stinker|train crash|blunder|calamity|piece of garbage|slog
            |disgrace|shambles|affront""",
        "effect": """stumbles|disappoints|frustrates|flounders|irritates|alienates its viewers|crumbles
            |falters|feels like torture|reeks of desperation""",
    },
    ("test", 1): {
        "quality": """amazing|gorgeous|captivating|terrific|poignant|marvelous|exhilarating|compelling
            |splendid|tasteful|enchanting|remarkable|breathtaking|magnificent|exquisite|insightful
            |stunning|heartwarming|impressive|fabulous|mesmerizing|admirable|radiant|endearing|profound
            |glorious|sublime|inventive|riveting|luminous""",
        "manner": """superbly|marvelously|exquisitely|magnificently|skillfully|masterfully|splendidly
            |gorgeously|thoughtfully|impressively""",
        "verdict": """triumph|wonder|revelation|knockout|tour de force|must-see|landmark
            |stroke of genius|pure bliss|sensation|instant favorite|achievement""",
        "effect": """captivates|inspires|succeeds admirably|mesmerizes|dazzles|fascinates its viewers
            |excels|impresses|feels like paradise|radiates happiness""",
    },
}


def rows(split: str) -> list[Row]:
    """The rows of one split, labels balanced and shuffled."""
    rng = random.Random(2000 + SPLITS.index(split))
    made: list[Row] = []
    for label in (0, 1):
        pools = read_pools(TOPICS[split] | WORDS[split, label])
        made += [(text, None, label) for text in distinct(rng, FRAMES, pools, ROWS_PER_LABEL[split])]
    return draw(rng, made, len(made))
