# ruff: noqa: E501 (tables of patterns and words)
"""Pairs of questions that look alike and do not ask the same, made by rule from questions.txt and the lines here."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache

from paraphrases import SLOTS, Group, Pair, fill, near_repeat, templates

Rule = Callable[[random.Random, str], str | None]

# Categories whose pairs the verifier never sees in training; they are for its test, with held-out topics.
HELD_OUT = ("units", "dates", "direction", "comparative", "quoted", "action", "person")

_UNITS = (("km", "miles"), ("kilometers", "meters"), ("ounces", "pounds"), ("oz", "lb"), ("hours", "minutes"), ("hours", "days"), ("seconds", "milliseconds"), ("dollars", "euros"), ("USD", "GBP"), ("grams", "kilograms"), ("Celsius", "Fahrenheit"), ("Celsius", "Kelvin"), ("minutes", "hours"), ("days", "weeks"), ("percent", "per mille"), ("bullet points", "paragraphs"), ("miles", "yards"), ("weeks", "months"))  # fmt: skip
_ANTONYMS = (("open", "close"), ("increase", "reduce"), ("raise", "lower"), ("start", "stop"), ("buy", "sell"), ("delete", "create"), ("upgrade", "downgrade"), ("enable", "disable"), ("turn on", "turn off"), ("install", "uninstall"), ("block", "unblock"), ("connect", "disconnect"), ("faster", "slower"), ("fast", "slow"), ("quickly", "slowly"), ("largest", "smallest"), ("biggest", "smallest"), ("best", "worst"), ("remove", "add"), ("safe", "dangerous"), ("legal", "illegal"), ("minimum", "maximum"), ("download", "upload"), ("lock", "unlock"), ("send", "receive"), ("save", "spend"), ("first", "last"), ("improve", "worsen"), ("lower", "raise"), ("short", "long"), ("cheap", "expensive"), ("hot", "cold"), ("like", "dislike"), ("win", "lose"), ("freeze", "thaw"), ("before", "after"), ("cheapest", "most expensive"), ("activate", "deactivate"), ("allow", "forbid"), ("old", "new"), ("joining", "splitting"), ("merge", "split"), ("combine", "separate"), ("freezing", "thawing"), ("import", "export"), ("encrypt", "decrypt"), ("lend", "borrow"), ("born", "buried"), ("invented", "banned"), ("sharpen", "blunt"), ("accept", "reject"), ("resign", "apply"), ("running", "stopped"))  # fmt: skip
_SCOPES = (" for beginners", " for children", " on mobile", " for free", " in bulk", " at home", " permanently", " for a business account", " as a student", " in {year}", " for two people", " without internet", " by phone", " during winter", " offline", " in one day", " for large files", " with a credit card", " before noon", " at night", " for seniors", " in the EU", " in an emergency", " on weekends", " for pregnant women", " at high altitude", " from scratch", " using the command line", " in under an hour", " for vegans", " if I am abroad", " after an update", " with kids", " in a small apartment", " for my company")  # fmt: skip
_SCOPE_WORDS = (("my ", "my old "), ("my ", "my wife's "), ("my ", "all my "), ("a ", "a second "), ("the ", "the first "), ("a ", "a used "), ("the ", "the default "), ("my ", "my work "), ("a ", "a commercial "), ("the ", "the previous "), ("my ", "only my "), ("a ", "an electric "), ("a ", "a corrupted "), ("the ", "the average "), ("a ", "a very large "))  # fmt: skip
_ACTIONS = ["delete", "rename", "print", "share", "sell", "paint", "move", "copy", "repair", "insure", "wash", "hide", "test", "explain", "translate", "photograph", "resize", "freeze", "lock", "advertise", "archive", "measure", "decorate", "schedule", "rotate", "encrypt", "inspect", "donate"]  # fmt: skip
_KINDS = (("How do I ", "What do I "), ("How can I ", "What can I "), ("How can I ", "Where can I "), ("How do I ", "Where do I "), ("What is the ", "Why is the "), ("What is the ", "When is the "), ("What is the ", "How is the "), ("What is ", "Why is "), ("What's the ", "Where's the "), ("How many ", "What "), ("What ", "How many "), ("What causes ", "What prevents "), ("Is ", "Can "), ("Can ", "Is "), ("Does ", "Is "), ("Do ", "Can "), ("Which ", "Why does "), ("How is ", "Why is "), ("How is ", "What is "), ("Why do ", "How do "), ("Why does ", "How does "), ("Why is ", "What is "), ("What are ", "Where are "), ("What are ", "Why are "), ("How does ", "Why does "), ("How does ", "When does "), ("How much ", "What "), ("How do I ", "Why do I "), ("How do I ", "Should I "), ("How do I ", "When should I "), ("How do I ", "Can I "), ("How can I ", "When can I "), ("How can I ", "Why can I "), ("Who ", "Why "), ("When was ", "Where was "), ("When did ", "Why did "), ("Why ", "When "), ("Where ", "When "), ("How long ", "How often "), ("How many ", "Which "), ("How much ", "How often "), ("Who wrote", "When did someone write"), ("What is the ", "Where is the "), ("How often ", "How long "), ("When ", "Where "), ("How old ", "How tall "), ("How tall ", "How wide "), ("How far ", "How big "), ("What is ", "Who is "), ("Can I ", "Must I "), ("Do I need ", "Can I get "), ("Is ", "Was "), ("Can ", "Should "))  # fmt: skip
_NEGATED = (("How do I ", "How do I avoid having to "), ("How can I ", "How can I not "), ("How do I ", "How do I not "), ("Can I ", "Can't I "), ("Why is ", "Why isn't "), ("Why does ", "Why doesn't "), ("Why did ", "Why didn't "), ("Why do ", "Why don't "), ("What is ", "What is not "), ("Which ", "Which of these is not a "), ("Do ", "Don't "), ("Is ", "Isn't "), ("What can ", "What can't "), ("What should ", "What shouldn't "), ("When should ", "When should you never "), ("Can ", "Can't "), ("Who ", "Who never "), ("What are ", "What are not "), ("What does ", "What does not "), ("should ", "should not "), ("can ", "cannot "), (" with ", " without "), (" is ", " is not "), (" does ", " does not "), (" I ", " I never "), (" do ", " do not "))  # fmt: skip
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_DIRECTION_LINES = """
How do I convert {x} to {y}? | {x}:PDF,Word,JPEG,PNG,CSV,Excel,MP4,MP3 | {y}
How do I migrate from {x} to {y}? | {x}:MySQL,PostgreSQL,AWS,Azure,Slack,Teams,Jenkins,GitLab | {y}
Can you translate from {x} into {y}? | {x}:Spanish,German,French,Italian,Greek,Polish | {y}
What's the cheapest train from {x} to {y}? | {x}:Paris,Berlin,Madrid,Rome,Vienna,Prague | {y}
How do I send money from {x} to {y}? | {x}:Canada,India,Mexico,Kenya,Poland,Japan | {y}
Is {x} better than {y}? | {x}:Rust,Java,Python,Kotlin,Swift,Ruby | {y}
Does {x} cause {y}? | {x}:stress,insomnia,smoking,obesity,anxiety,pollution | {y}
What happens when {x} beats {y}? | {x}:Brazil,Spain,Italy,France,Germany,England | {y}
Did {x} invade {y}? | {x}:Rome,Persia,Greece,Egypt,Carthage,Macedonia | {y}
How do I move files from {x} to {y}? | {x}:Dropbox,OneDrive,iCloud,a USB stick,an SD card,Google Drive | {y}
How many {x} are in a {y}? | {x}:ounce,cup,pint,gallon,liter,pound | {y}
Why did {x} sue {y}? | {x}:Apple,Samsung,Google,Oracle,Nokia,Intel | {y}
Should I learn {x} before {y}? | {x}:calculus,algebra,geometry,statistics,physics,chemistry | {y}
How do I replace {x} with {y} in a recipe? | {x}:butter,oil,honey,sugar,flour,yogurt | {y}
Can a {x} eat a {y}? | {x}:spider,snake,bird,frog,lizard,cat | {y}
How do I import data from {x} into {y}? | {x}:Excel,Salesforce,HubSpot,Notion,Airtable,Jira | {y}
Is {x} east of {y}? | {x}:Lyon,Munich,Warsaw,Turin,Zurich,Ghent | {y}
Who sold {x} to {y}? | {x}:Alaska,Louisiana,Instagram,Pixar,Skype,YouTube | {y}
Does my {x} owe money to my {y}? | {x}:landlord,employer,bank,neighbor,brother,tenant | {y}
How do I forward calls from {x} to {y}? | {x}:my office,my mobile,my home,reception,my laptop,my tablet | {y}
Write a function that maps {x} to {y} | {x}:ids,names,keys,values,rows,columns | {y}
How do I downcast {x} to {y}? | {x}:int,float,double,long,short,char | {y}
What is the exchange rate from {x} to {y}? | {x}:dollars,euros,pounds,yen,francs,pesos | {y}
Which came first, {x} or {y}: why did {x} follow {y}? | {x}:jazz,blues,rock,disco,punk,soul | {y}
"""
_COMPARE_LINES = """
Which {k} phone should I buy? | cheapest,most expensive,smallest,largest,newest,lightest
What is the {k} country in Europe? | largest,smallest,richest,poorest,coldest,oldest
Is a laptop {k} than a desktop? | faster,slower,cheaper,quieter,safer,lighter
Who is the {k} player in the league? | tallest,youngest,oldest,richest,strongest,shortest
Which route is {k}? | shorter,longer,safer,cheaper,faster,steeper
What is the {k} way to reach the airport? | cheapest,slowest,safest,least expensive,most scenic,earliest
Do {k} people like jazz? | older,younger,richer,poorer,happier,taller
Which phone has the {k} battery? | biggest,smallest,lightest,worst,strongest,heaviest
Does tea have {k} caffeine than coffee? | more,less
Is it {k} to rent or buy? | cheaper,riskier,easier,harder,wiser,smarter
Which {k} countries have signed the treaty? | larger,smaller,richer,poorer,northern,southern
Which month is the {k} in Delhi? | hottest,coldest,wettest,driest,busiest,quietest
Show me files {k} than 100 MB | larger,smaller,newer,older
Which bank has {k} fees? | lower,higher,fewer,hidden,monthly,no
What is the {k} version I can still install? | oldest,newest,lowest,highest,latest,first
List the {k} rivers of Asia | longest,shortest,deepest,widest,cleanest,dirtiest
What is the {k} temperature for wine storage? | maximum,minimum,average,ideal,lowest,highest
Are electric cars {k} in winter? | slower,faster,cheaper,weaker,louder,safer
"""
_PERSON_LINES = """
What is {k} favorite color? | my,your,his,her,their
Can {k} drive a truck? | he,she,they,my son,your brother
When is {k} appointment? | my,your,his,her,our
Write a birthday message for {k} | my wife,my boss,my son,your sister,my teacher,my neighbor
Who is responsible for {k} mistake? | my,your,his,her,their
Does {k} insurance cover dental care? | my,your,his,her,their
Where did {k} grow up? | he,she,they,your parents,my teacher
How do I remove {k} from the group? | myself,him,her,them,my admin
Is {k} allowed to vote? | a citizen,a prisoner,a foreigner,he,she,a minor
What should I buy for {k}? | my mother,my father,my girlfriend,my nephew,my boss,my grandmother
"""


def _swap(pairs: tuple[tuple[str, str], ...], both: bool = False) -> Rule:
    def rule(rng: random.Random, text: str) -> str | None:
        options = [(a, b) for a, b in pairs if re.search(rf"(?<!\w){re.escape(a)}(?!\w)", text)]
        if both:
            options += [(b, a) for a, b in pairs if re.search(rf"(?<!\w){re.escape(b)}(?!\w)", text)]
        if not options:
            return None
        a, b = rng.choice(options)
        return re.sub(rf"(?<!\w){re.escape(a)}(?!\w)", b.replace("\\", ""), text, count=1)

    return rule


def _starts(pairs: tuple[tuple[str, str], ...]) -> Rule:
    def rule(rng: random.Random, text: str) -> str | None:
        options = [(a, b) for a, b in pairs if text.startswith(a) or (a[0] == " " and a in text)]
        if not options:
            return None
        a, b = rng.choice(options)
        return text.replace(a, b, 1)

    return rule


def _number(rng: random.Random, text: str) -> str | None:
    found = re.findall(r"(?<![\w.])\d+(?![\w.])", text)
    if not found:
        return None
    old = rng.choice(found)
    new = rng.choice(
        (
            str(int(old) + 1),
            str(int(old) * 10),
            str(int(old) + 5),
            old[::-1] if old[::-1] != old and old[-1] != "0" else old + "5",
        )
    )
    return re.sub(rf"(?<![\w.]){old}(?![\w.])", new, text, count=1)


def _scope(rng: random.Random, text: str) -> str | None:
    if rng.random() < 0.3:
        options = [(a, b) for a, b in _SCOPE_WORDS if f" {a}" in text]
        if options:
            a, b = rng.choice(options)
            return text.replace(f" {a}", f" {b}", 1)
    scope = rng.choice(_SCOPES).format(year=rng.randrange(1990, 2026))
    body = text.rstrip("?.")
    return body + scope + text[len(body) :]


def _action(rng: random.Random, text: str) -> str | None:
    found = re.match(
        r"((?:How (?:do|can|should) (?:I|you)|How to|What's the (?:best )?way to|I want to|Can I) )(\w+)(.*)", text
    )
    if not found or found[2] in ("be", "have", "get"):
        return None
    return f"{found[1]}{rng.choice([a for a in _ACTIONS if a != found[2]])}{found[3]}"


_FUNCTION = frozenset(
    [
        "what",
        "which",
        "when",
        "where",
        "there",
        "their",
        "about",
        "would",
        "could",
        "should",
        "does",
        "your",
        "from",
        "with",
        "have",
        "this",
        "that",
        "these",
        "please",
        "tell",
        "into",
        "how",
        "the",
        "and",
        "for",
        "are",
        "can",
        "you",
        "was",
        "were",
        "much",
        "many",
        "long",
    ]
)


def _word(rng: random.Random, text: str) -> str | None:
    """Another word of some question in the place of one."""
    words = [w for w in re.findall(r"(?<![\w{])[a-z]{4,}(?![\w}])", text) if w not in _FUNCTION]
    if not words:
        return None
    old, new = rng.choice(words), rng.choice(_vocabulary())
    if new[:4] == old[:4]:
        return None
    return re.sub(rf"(?<!\w){old}(?!\w)", new, text, count=1)


@lru_cache(maxsize=1)
def _vocabulary() -> list[str]:
    text = " ".join(form for topic, forms in templates() for form in forms)
    return sorted({w for w in re.findall(r"(?<![\w{])[a-z]{4,}(?![\w}])", text) if w not in _FUNCTION})


def _quoted(rng: random.Random, text: str) -> str | None:
    found = re.search(r'"([^"]+)"', text)
    if not found:
        return None
    return text.replace(
        found[1], rng.choice([p for p in (*SLOTS["phrase"], "good evening", "I am last") if p != found[1]])
    )


def _code(rng: random.Random, text: str) -> str | None:
    for name in SLOTS["ident"]:
        if name in text:
            other = rng.choice(
                (
                    name + "s",
                    name + "2",
                    name.replace("get", "set").replace("load", "save").replace("send", "recv")
                    if re.search("get|load|send", name)
                    else "re" + name,
                    name + "_all",
                    rng.choice([n for n in SLOTS["ident"] if n != name]),
                )
            )
            return text.replace(name, other)
    return None


RULES: dict[str, Rule] = {
    "numbers": _number,
    "units": _swap(_UNITS, both=True),
    "antonym": _swap(_ANTONYMS, both=True),
    "negation": _starts(_NEGATED),
    "scope": _scope,
    "kind": _starts(_KINDS),
    "action": _action,
    "quoted": _quoted,
    "code": _code,
    "word": _word,
}


def traps(rng: random.Random, group: Group, everyone: list[Group], per_form: int) -> list[Pair]:
    """Traps of one group: each rule on each form, against that form, another form, or a near repeat of it."""
    found = []

    def add(trap: str, category: str, form: str) -> None:
        other = rng.choice((form, form, rng.choice(group.forms), near_repeat(rng, form)))
        if trap.lower() != form.lower():
            found.append(Pair(trap, other, False, category, group.topic, group.template))

    forms = templates()[group.template][1]
    for form, pattern in zip(group.forms, forms, strict=True):
        for category, rule in RULES.items():
            for _ in range(per_form):
                changed = rule(rng, form)
                if changed is not None and changed != form:
                    add(changed, category, form)
        for slot, value in group.filled:
            kind = (
                "numbers"
                if slot in ("n", "p", "w")
                else "quoted"
                if slot == "phrase"
                else "code"
                if slot == "ident"
                else "entity"
            )
            if slot == "w":
                continue
            for _ in range(per_form):
                other = rng.choice([v for v in SLOTS[slot] if v != value])
                add(fill(pattern, dict(group.filled) | {slot: other}), kind, form)
        if rng.random() < 0.5:
            month, other = rng.sample(_MONTHS, 2)
            day, other_day = rng.sample(_DAYS, 2)
            body, end = form.rstrip("?."), form[len(form.rstrip("?.")) :]
            one, two = rng.choice(
                (
                    (f" in {month}", f" in {other}"),
                    (f" on {day}", f" on {other_day}"),
                    (f" on {month} {rng.randrange(1, 15)}", f" on {month} {rng.randrange(15, 29)}"),
                    (f" in {rng.randrange(1990, 2005)}", f" in {rng.randrange(2005, 2026)}"),
                    (f" before {month} 1", f" after {month} 1"),
                )
            )
            found.append(Pair(body + one + end, body + two + end, False, "dates", group.topic, group.template))
    mates = [g for g in everyone if g.topic == group.topic and g.template != group.template]
    shared = [g for g in mates if set(g.filled) & set(group.filled)] or mates
    for _ in range(2 * per_form):
        mate = rng.choice(shared)
        found.append(
            Pair(rng.choice(mate.forms), rng.choice(group.forms), False, "attribute", group.topic, group.template)
        )
    return found


def lines(rng: random.Random, repeat: int) -> list[Pair]:
    """Traps of direction, comparison and person: from the lines above."""
    found = []
    for number, line in enumerate(_DIRECTION_LINES.strip().splitlines()):
        pattern, values = line.split(" | ")[0], line.split(" | ")[1].split(":")[1].split(",")
        for _ in range(repeat):
            x, y = rng.sample(values, 2)
            one, two = pattern.replace("{x}", x).replace("{y}", y), pattern.replace("{x}", y).replace("{y}", x)
            found.append(
                Pair(
                    near_repeat(rng, one) if rng.random() < 0.4 else one,
                    two,
                    False,
                    "direction",
                    "lines",
                    1000 + number,
                )
            )
    for category, block in (("comparative", _COMPARE_LINES), ("person", _PERSON_LINES)):
        for number, line in enumerate(block.strip().splitlines()):
            pattern, rest = line.split(" | ")
            values = rest.split(",")
            for _ in range(repeat if len(values) > 2 else 1):
                x, y = rng.sample(values, 2)
                one, two = pattern.replace("{k}", x), pattern.replace("{k}", y)
                found.append(
                    Pair(
                        near_repeat(rng, one) if rng.random() < 0.4 else one,
                        two,
                        False,
                        category,
                        "lines",
                        2000 + number,
                    )
                )
    return found
