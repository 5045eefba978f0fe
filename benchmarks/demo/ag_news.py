"""Agency news, a title and a first sentence, after the model of AG News.

Labels: World = 0, Sports = 1, Business = 2, Sci/Tech = 3.
"""

from __future__ import annotations

import random

from forgetfree.benchmarks.demo.frames import SPLITS, Row, distinct, draw, read_pools

ROWS_PER_LABEL = {"train": 240, "validation": 60, "test": 90}

# Every label fills the same frames. A frame's part before the bar is its title.
FRAMES = (
    "{actor} {event} | {city} (Newswire) - The news came late on {day}, a source said.",
    "{actor} {event} | {city} (Dispatch) - The {actor} had no comment on {day}.",
    "{city}: all about {matter} | Newswire - The news came on {day}, according to a report.",
    "{day} report: {actor} {event} | It was the second time this month, amid talk of {matter}.",
    "{actor} in the spotlight | {city} (Dispatch) - The {actor} {event}, it was said on {day}.",
    "{city} awaits {actor} | Newswire - By {day} there may be more to report, a source said.",
)

DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"

# Datelines tell the splits apart, never the labels.
CITIES = {
    "train": "London|New York|Paris|Tokyo|Chicago|Sydney|Berlin|Toronto|Madrid|Boston|Singapore|Rome",
    "validation": "Dublin|Seattle|Vienna|Seoul|Lisbon|Denver",
    "test": "Oslo|Houston|Zurich|Melbourne|Helsinki|Atlanta|Montreal|Brussels",
}

WORDS = {
    ("train", 0): {
        "actor": """prime minister|rebels|soldiers|foreign secretary|militants|refugees|opposition party
            |parliament|army general|suicide bomber|police chief|hostages|king|prisoners
            |human rights groups|ruling coalition|villagers|border guards|presidents|political leaders""",
        "event": """signed a peace treaty|attacked a military base|called an early election
            |crossed the frontier|rejected the nuclear inspection|seized a government building
            |fled the violence|took power in a vote|freed two captives|protested in the capital
            |declared a state of emergency|fired mortars at a mosque|broke the ceasefire
            |asked the United Nations for aid|killed three civilians|closed the embassy
            |detained a dissident|arrested war criminals""",
        "matter": """civil war|ethnic conflict|nuclear inspections|election fever|border violence
            |constitutional reform|mosque bombings|democracy marches|peace negotiations
            |military occupation|earthquake aid""",
    },
    ("train", 1): {
        "actor": """quarterback|striker|home team|tennis champion|pitcher|coach|goalkeeper
            |basketball stars|sprinter|golfer|defending champions|cyclist|swimmers|rookie|hockey club
            |heavyweight boxer|Olympic team|cricket captain|outfielder|national football side""",
        "event": """won the gold medal|scored a late goal|lost in straight sets|hit a home run
            |reached the final|broke the world record|threw four touchdown passes|tied the series
            |missed a penalty kick|beat the league rivals|finished the season unbeaten
            |retired with a knee injury|sank a birdie putt|failed a doping test|kept the trophy
            |earned a playoff spot|dropped the ball|swept the doubleheader""",
        "matter": """extra innings|penalty kicks|Olympic medals|tennis|basketball|playoff tickets
            |cricket scores|swimming records|goals|golf|tournament rounds""",
    },
    ("train", 2): {
        "actor": """central bank|investors|oil producers|discount airline|stock market|carmaker|retailer
            |brewery group|chief executive|insurance company|shareholders|hedge fund|US dollar
            |mortgage lender|steel maker|department store chain|factory owners|finance officer
            |drug manufacturer|consumers""",
        "event": """raised interest rates|cut five thousand jobs|reported higher earnings
            |filed for bankruptcy|agreed to a takeover|posted a quarterly loss
            |fell to a record low against the euro|sold its shares|increased the dividend
            |lowered its profit forecast|paid a fine over accounting fraud|bought a competitor
            |pushed crude prices up|saw sales jump|refinanced its debt|settled with the tax office
            |spent less money|priced an initial public offering""",
        "matter": """inflation|oil prices|quarterly earnings|mortgage rates|shareholder meetings
            |unemployment figures|stock trading|takeover bids|budget cuts|pension plans|accounting fraud""",
    },
    ("train", 3): {
        "actor": """software maker|astronomers|computer scientists|search engine|space probe|hackers
            |chip designer|biologists|browser developers|mobile phone|video game console
            |open source programmers|Mars rover|Internet provider|physicists|laptop builder
            |genome researchers|email users|fossil hunters|web site""",
        "event": """released a security patch|discovered a distant planet|launched a satellite
            |fixed a virus hole|unveiled a faster processor|sent back images of a moon|cloned a mouse
            |mapped the human brain|added wireless access|blocked spam messages
            |tested a desktop operating system|downloaded music files|dug up dinosaur bones
            |measured global warming|upgraded the server code|built a tiny robot
            |stored more data on a disk|found water in a crater""",
        "matter": """broadband access|email spam|computer viruses|space travel|DNA research
            |digital cameras|Linux code|satellite images|wireless gadgetry|global warming data
            |dinosaur fossils""",
    },
    ("validation", 0): {
        "actor": """guerrillas|chancellor|monarch|warlord|charity workers|senators|junta|kidnappers
            |clerics|settlers""",
        "event": """stormed a checkpoint|conceded a presidential runoff|ambushed a convoy
            |ransomed a contractor|lifted a curfew|promised a pullout of occupying forces
            |rioted outside the consulate|escaped genocide|denounced terrorism""",
        "matter": "disarmament|sectarian bloodshed|martial law|terrorism|genocide trials|typhoon victims",
    },
    ("validation", 1): {
        "actor": """linebacker|midfielder|relay runners|wrestler|shortstop|gymnast|rugby squad|playmaker
            |jockey|ice skater""",
        "event": """kicked the winning conversion|claimed the wicket|notched a hat trick
            |grabbed twenty rebounds|rode a thoroughbred to victory|collected the bronze
            |struck out nine batters|gained a wildcard berth|pulled a hamstring""",
        "matter": "wrestling|gymnastics|rugby|shootouts|horse racing|figure-skating",
    },
    ("validation", 2): {
        "actor": """brokerage|automaker|wholesalers|treasury|creditors|supermarket giant
            |mining conglomerate|exporters|private-equity buyers|auditors""",
        "event": """announced layoffs|issued corporate bonds|boosted annual revenue|defaulted on loans
            |approved the merger|slashed its outlook|reduced the trade deficit|sued over overcharging
            |halted a production line""",
        "matter": "commodity futures|bargain hunting|corporate bonds|merger rumors|payroll taxes|layoffs",
    },
    ("validation", 3): {
        "actor": """NASA engineers|geneticists|handheld gadget|programming community|paleontologists
            |PC vendor|instant messenger|cosmologists|antivirus lab|blogging service""",
        "event": """decoded chimpanzee genes|patched a Java bug|photographed a comet
            |shipped a flash memory player|debugged the kernel|detected gravity waves
            |crashed a hard-drive|sequenced bacteria|simulated a supernova""",
        "matter": "supercomputers|encryption|Bluetooth headsets|gravity waves|gene decoding|comets",
    },
    ("test", 0): {
        "actor": """insurgents|peacekeepers|ambassador|dictator|gunmen|exiled tribal elders|diplomats
            |congress|interior ministry|paramilitaries|asylum seekers|vice premier|separatists
            |archbishop""",
        "event": """brokered a truce|overthrew the regime|dispersed unarmed demonstrators
            |boycotted the referendum|abducted a journalist|imposed sanctions|resigned over corruption
            |evacuated a besieged town|shelled a Mosul suburb|condemned the airstrike
            |begged for famine relief|contested the ballot count|recaptured a stronghold""",
        "matter": """famine relief|insurgency|hurricane devastation|sanctions|coup attempts
            |ballot rigging|airstrikes|Darfur atrocities|asylum petitions""",
    },
    ("test", 1): {
        "actor": """soccer forward|baseball veteran|bullpen|wide receiver|Formula One racer|marathoner
            |shooting ace|seventh seed|batsman|sluggers|fullback|hurdler|referee|varsity freshmen""",
        "event": """clinched the pennant|netted an equalizer|crushed a grand-slam homer
            |fumbled near the endzone|advanced to the semifinals|captured the Wimbledon crown
            |blew a halftime lead|tore a ligament|dunked over a center|secured the pole position
            |got a red-card|bowled a spin delivery|volleyed past an opponent""",
        "matter": """baseball|soccer|grand-slam homers|NBA free-throws|Formula One laps|pennant races
            |marathons|Wimbledon volleys|NFL scrimmages""",
    },
    ("test", 2): {
        "actor": """monetary authorities|stockbrokers|financiers|planemaker|truck assembler
            |currency traders|savings institution|bankers|petroleum refiner|beverage bottler
            |grocery distributor|entrepreneurs|bondholders|cable franchise""",
        "event": """tightened credit|restructured its liabilities|warned of shrinking margins
            |acquired a subsidiary|hiked gasoline tariffs|laid off employees|topped income estimates
            |shuttered unprofitable outlets|repurchased warrants|downgraded the securities
            |negotiated wages with a labor union|got underwriters to float a listing
            |enjoyed robust turnover""",
        "matter": """recession worries|currency swings|gasoline tariffs|household credit|labor unions
            |equities|windfalls|Dow Jones volatility|insolvency filings""",
    },
    ("test", 3): {
        "actor": """tech pioneer|portal operator|tablet inventor|circuit architects|spacecraft
            |lunar mission|cybersecurity experts|neuroscientists|app publisher|archaeologists
            |handset firm|webmasters|nanotechnology startup|zoologists""",
        "event": """plugged a firmware vulnerability|spotted a faint galaxy|landed on Titan
            |infected notebooks|introduced a touchscreen|sketched an algorithm|isolated stem cells
            |docked with an orbiting module|indexed pages|identified a hominid species|streamed podcasts
            |shrank transistors|debuted a multicore microprocessor""",
        "matter": """firmware|cybersecurity|quantum lasers|podcasts|stem cells|nanotechnology|galaxies
            |Macintosh notebooks|peer-to-peer downloading""",
    },
}


def rows(split: str) -> list[Row]:
    """The rows of one split, labels balanced and shuffled."""
    rng = random.Random(3000 + SPLITS.index(split))
    made: list[Row] = []
    for label in range(4):
        pools = read_pools(WORDS[split, label] | {"city": CITIES[split], "day": DAYS})
        for text in distinct(rng, FRAMES, pools, ROWS_PER_LABEL[split]):
            title, body = text.split(" | ")
            made.append((f"{_title_case(title)} {body}", None, label))
    return draw(rng, made, len(made))


def _title_case(title: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in title.split())
