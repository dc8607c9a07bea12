"""The guards' words, in lower case. All tables are keyed by `fold`, as the words of a text are."""

from __future__ import annotations

_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
NUMBER_WORDS = {word: str(value) for value, word in enumerate(_UNITS.split())} | {
    "seventeen": "17",
    "eighteen": "18",
    "nineteen": "19",
    "twenty": "20",
    "thirty": "30",
    "forty": "40",
    "fifty": "50",
    "hundred": "100",
    "thousand": "1000",
    "million": "1000000",
    "billion": "1000000000",
    "twice": "2x",
    "half": "1/2",
    "double": "2x",
    "triple": "3x",
    "quarter": "1/4",
    "dozen": "12",
}

MONTHS = {
    name: full
    for full in [
        "january",
        "february",
        "march",
        "april",
        "june",
        "july",
        "august",
        "september",
        "october",
        "november",
        "december",
    ]
    for name in (full, full[:3])
} | {"sept": "september"}

# A unit's spellings, each with the one that stands for all.
_UNIT_GROUPS = """
km kilometer kilometers kilometre kilometres kms; mile miles mi; m meter meters metre metres; cm centimeter
centimeters centimetre centimetres; mm millimeter millimeters millimetre millimetres; ft foot feet; inch inches;
yard yards yd; kg kilogram kilograms kilo kilos kgs; g gram grams; mg milligram milligrams; lb lbs pound pounds; oz
ounce ounces; ton tons; tonne tonnes; liter liters litre litres l; ml milliliter milliliters millilitre; gallon
gallons gal; cup cups; tablespoon tablespoons tbsp; teaspoon teaspoons tsp; pint pints; second seconds sec secs;
minute minutes min mins; hour hours hr hrs h; day days; week weeks wk; month months; year years yr yrs; ms
millisecond milliseconds; percent %; degree degrees °; celsius c; fahrenheit f; kelvin k; dollar dollars usd; euro
euros eur; sterling gbp; yen jpy; rupee rupees inr; cent cents; kb kilobyte kilobytes; mb megabyte megabytes; gb
gigabyte gigabytes; tb terabyte terabytes; bit bits; byte bytes; watt watts w; kw kilowatt kilowatts; kwh; volt
volts; amp amps; hz hertz; mhz; ghz; mph; kmh; kph; calorie calories kcal; joule joules; am; pm; acre acres; hectare
hectares; person people persons; times time; mbps; gbps; psi; bar
"""
UNITS = {name: group.split()[0] for group in _UNIT_GROUPS.replace("\n", " ").split(";") for name in group.split()}

_NEGATIONS = "no not never none nothing nobody nowhere neither nor without except excluding unless hardly barely"
NEGATIONS = frozenset(_NEGATIONS.split())

_PAIRS = """
increase decrease; increase reduce; raise lower; raise reduce; up down; open close; start stop; start finish; start
end; begin end; buy sell; love hate; like dislike; hot cold; warm cold; high low; higher lower; large small; big
small; larger smaller; bigger smaller; biggest smallest; largest smallest; longest shortest; highest lowest; more
less; most least; more fewer; maximum minimum; maximize minimize; max min; best worst; good bad; better worse; fast
slow; faster slower; fastest slowest; early late; earlier later; first last; before after; over under; above below;
within outside; inside outside; in out; on off; enable disable; allow deny; allow forbid; permit forbid; allow
prevent; allow block; accept reject; accept refuse; include exclude; include omit; add remove; add delete; add
subtract; create delete; create remove; install uninstall; connect disconnect; login logout; lock unlock; encrypt
decrypt; compress decompress; encode decode; import export; upload download; push pull; send receive; read write;
encourage discourage; agree disagree; win lose; gain lose; pass fail; succeed fail; success failure; true false;
right wrong; correct incorrect; legal illegal; safe unsafe; safe dangerous; possible impossible; able unable; valid
invalid; visible invisible; happy unhappy; happy sad; healthy unhealthy; old new; older newer; young old; oldest
newest; oldest youngest; rich poor; strong weak; hard easy; hard soft; difficult easy; expensive cheap; heavy light;
dark light; bright dark; wet dry; full empty; thick thin; wide narrow; deep shallow; long short; tall short; male
female; man woman; boy girl; father mother; husband wife; brother sister; son daughter; king queen; left right;
north south; east west; northern southern; eastern western; day night; morning evening; summer winter; spring
autumn; spring fall; ascending descending; forward backward; forwards backwards; vertical horizontal; row column;
rows columns; public private; internal external; local remote; input output; client server; source destination;
positive negative; advantage disadvantage; pros cons; benefit risk; benefit harm; cause effect; question answer;
teacher student; doctor patient; buyer seller; lend borrow; arrive leave; arrive depart; enter exit; acid base;
solid liquid; ancient modern; always sometimes; always rarely; often rarely; all some; all any; everyone someone;
must may; should may; can must; before during; during after; with from; to from; to by; for against; celsius
fahrenheit; dollar euro; mile kilometer; pound kilogram; today tomorrow; today yesterday; tomorrow yesterday; active
passive; gain loss; profit loss; income expense; taller shorter; cheapest expensive; cheaper expensive; older
younger; merge split; join split; combine separate; unlock lock; subscribe unsubscribe; deposit withdraw; arrive
depart; import export; upgrade downgrade; block unblock; mute unmute; archive unarchive; follow unfollow; zip unzip;
save spend; save delete; charge drain; charge discharge; improve worsen; lend borrow; hide show; buy rent; employer
employee; landlord tenant; lessor lessee; sender receiver; major minor; upper lower; inner outer; winner loser;
guilty innocent; domestic foreign; urban rural; odd even; real fake; natural artificial; direct indirect; single
married; male female; husband wife; uncle aunt; nephew niece; breakfast dinner; breakfast lunch; lunch dinner;
import importer; gross net; credit debit; supply demand; stock bond; lead follow; teach learn; prevent cause; treat
cause; cause symptom; symptom treatment; debit credit; hire fire; attack defend; freeze thaw; freeze melt; freeze
boil; sink float
"""


# Groups that a question may swap without asking something else. Short on purpose.
_GROUPS = """
fix repair mend; buy purchase; begin start commence; end finish; make create build; big large; quick fast;
quickly fast; show display; describe explain; picture image photo; kid child children; car automobile; film movie;
folder directory; error failure; sick ill; method way approach; help assist; what which; can could; will would;
may might; who whom; choose select pick; get obtain; learn study; select choose; difference distinction; city town;
hire employ; answer reply; assistance help; error mistake; dollar usd; mum mother mom
"""


def _groups() -> dict[str, str]:
    table: dict[str, str] = {}
    for group in _GROUPS.replace("\n", " ").split(";"):
        words = [_stem(word) for word in group.split()]
        for word in words:
            table.setdefault(word, table.get(words[0], words[0]))
    return table


def _stem(word: str) -> str:
    """Without its commonest English endings; crude, but the same for every form of most words."""
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-3] + "y" if word.endswith("ies") and len(word) > 4 else word[:-1]
    for ending in ("ing", "ed"):
        if len(word) > len(ending) + 3 and word.endswith(ending):
            word = word[: -len(ending)]
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


_SYNONYMS = _groups()


def fold(word: str) -> str:
    """The common form of a word: its stem, or that of its group of synonyms."""
    stem = _stem(word)
    return _SYNONYMS.get(stem, stem)


def _folded(words: str) -> frozenset[str]:
    return frozenset(fold(word) for word in words.split())


def _antonyms() -> dict[str, frozenset[str]]:
    table: dict[str, set[str]] = {}
    for pair in _PAIRS.replace("\n", " ").split(";"):
        left, right = (fold(word) for word in pair.split())
        table.setdefault(left, set()).add(right)
        table.setdefault(right, set()).add(left)
    return {word: frozenset(others) for word, others in table.items()}


ANTONYMS = _antonyms()

# Taken for each other in talk and by dictionaries, though the answer is another.
_APART = """
weather climate; mass weight; speed velocity; array list; function method; update upgrade; baby child; baby kid;
infant child; infant kid; toddler baby; dog puppy; cat kitten; sensible sensitive; frog toad; economic economical;
historic historical; classic classical; human humane; urban urbane; moral morale; save store; reset restore;
open unlock; cook bake; bread dough; compile build; bike motorcycle; bicycle motorcycle; rent lease; physics physical;
music musical; ideal idealistic; laptop computer; old ancient; reset restart
"""
_PLURALS_APART = """
new news; good goods; custom customs; glass glasses; mean means; arm arms; short shorts; pant pants; window windows;
physic physics; politic politics; spirit spirits; saving savings; earning earnings; manner manners; content contents
"""
PLURALS_APART = frozenset(frozenset(pair.split()) for pair in _PLURALS_APART.split(";"))
APART = frozenset(frozenset(map(fold, pair.split())) for pair in _APART.split(";"))

# Of two texts that each have one of these alone, one says "from" where the other says "to".
PREPOSITIONS = _folded("than from to by for with about into onto on in at of off through under over between")

# Fillers whose place among the other words matters: to the airport from here, from the airport to here.
PLACED = _folded("from by here there")

# Which of these a text has must agree; the others ("of", "in", "on", "at", "for", "about") may change.
DIRECTIONS = _folded("than from to by with into onto off through under over between within without against")

# Who, when, how: a question and the same words after another of these, or none, are two questions.
INTERROGATIVES = _folded("what who whom whose when where why how")
MODALS = _folded("can may should must will need")
AUXILIARIES = MODALS | _folded("is are am was were do does did has have had")
# "Tell me the …" asks "what is the …".
FRAMES = _folded("tell give explain describe show name list define say")

# Words whose presence or absence alone changes what is asked.
PIVOTAL = _folded(
    """
    ascending descending before after since until during only first last next previous old new former all every each
    both either maximum minimum max min most least best worst more less average median optional required mandatory
    legal illegal still yet anymore again instead against versus vs or if am pm daily weekly monthly yearly avoid
    prevent stop fail refuse lack ignore skip exclude except unable impossible rather decline prohibit forbid ban
    deny undo cannot fake false other another always sometimes rarely often today tomorrow yesterday reverse inverse
    opposite he she him her his everyone everybody
    """
)

# Words that may come or go: articles, auxiliaries, politeness, the frame of a question.
FILLERS = _folded(
    """
    a an the this that these those is are was were be been being am do does did doing done have has had having will
    would shall should can could may might must of to in on at for from with by about into as and it its i me my
    mine we us our you your yours any they them their what which who whom whose when where why how there here please
    kindly hello hi hey thank thanks just so well really actually exactly briefly also too very then ok okay
    """
)

# Words that seldom change what is asked, as written.
SOFT = frozenset(
    [
        "thing",
        "things",
        "stuff",
        "good",
        "best",
        "better",
        "properly",
        "correctly",
        "correct",
        "right",
        "proper",
        "easily",
        "easy",
        "simply",
        "simple",
        "way",
        "ways",
        "step",
        "steps",
        "process",
        "work",
        "works",
        "working",
        "going",
        "go",
        "got",
        "use",
        "using",
        "used",
        "happen",
        "happens",
        "happened",
        "occur",
        "occurs",
        "exist",
        "exists",
        "able",
        "possible",
        "particular",
        "specific",
        "main",
        "actual",
        "currently",
        "please",
        "successfully",
        "available",
        "certain",
        "kind",
        "type",
        "sort",
        "form",
        "typical",
        "typically",
        "usually",
        "normally",
        "normal",
        "general",
        "generally",
        "common",
        "commonly",
        "regular",
        "basic",
        "fully",
        "completely",
        "someone",
        "somebody",
        "person",
        "people",
        "anything",
        "something",
        "everything",
        "etc",
        "regarding",
        "concerning",
        "like",
        "called",
        "known",
        "made",
        "done",
        "involved",
        "required",
        "needed",
        "necessary",
        "official",
        "place",
        "exactly",
        "today's",
        "whole",
        "entire",
        "entirely",
        "overall",
        "existing",
        "given",
    ]
)

# Adjectives that have a comparative with -er.
GRADED = frozenset(
    [
        "big",
        "bold",
        "brave",
        "brief",
        "bright",
        "broad",
        "busy",
        "calm",
        "cheap",
        "clean",
        "clear",
        "clever",
        "close",
        "cold",
        "cool",
        "cruel",
        "cute",
        "damp",
        "dark",
        "deep",
        "dense",
        "dim",
        "dirty",
        "dry",
        "dull",
        "dumb",
        "early",
        "easy",
        "faint",
        "fair",
        "fancy",
        "far",
        "fast",
        "fat",
        "few",
        "fine",
        "firm",
        "fit",
        "flat",
        "fresh",
        "friendly",
        "full",
        "funny",
        "gentle",
        "grand",
        "great",
        "green",
        "happy",
        "hard",
        "harsh",
        "healthy",
        "heavy",
        "high",
        "hot",
        "humid",
        "hungry",
        "kind",
        "large",
        "late",
        "lazy",
        "light",
        "lively",
        "lonely",
        "long",
        "loose",
        "loud",
        "low",
        "lucky",
        "mad",
        "mild",
        "narrow",
        "near",
        "neat",
        "new",
        "nice",
        "noisy",
        "odd",
        "old",
        "pale",
        "plain",
        "polite",
        "poor",
        "pretty",
        "proud",
        "pure",
        "quick",
        "quiet",
        "rare",
        "rich",
        "ripe",
        "risky",
        "rough",
        "rude",
        "sad",
        "safe",
        "sharp",
        "short",
        "shy",
        "sick",
        "simple",
        "slim",
        "slow",
        "small",
        "smart",
        "smooth",
        "soft",
        "sour",
        "steep",
        "sticky",
        "stiff",
        "strange",
        "strict",
        "strong",
        "sweet",
        "tall",
        "tame",
        "tasty",
        "thick",
        "thin",
        "tight",
        "tiny",
        "tough",
        "ugly",
        "warm",
        "weak",
        "wealthy",
        "wet",
        "wide",
        "wild",
        "wise",
        "young",
    ]
)
