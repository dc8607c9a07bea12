# ruff: noqa: E501 (tables of patterns and words)
"""Pairs of questions that ask the same: hand-written rewordings (questions.txt) and near repeats made by rule."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from services.router.match.synonyms import _NEAR

QUESTIONS = Path(__file__).with_name("questions.txt")
SLOTS: dict[str, list[str]] = {
    "country": ["Japan", "Brazil", "Canada", "Norway", "Kenya", "Spain", "Thailand", "Mexico", "Poland", "Egypt", "Austria", "Australia", "India", "Chile"],
    "city_a": ["Paris", "Berlin", "Madrid", "Tokyo", "Oslo", "Rome", "Boston", "Cairo"],
    "city_b": ["London", "Vienna", "Lisbon", "Seoul", "Prague", "Milan", "Chicago", "Lima"],
    "language": ["Python", "JavaScript", "Rust", "Java", "Go", "Ruby", "TypeScript", "Kotlin", "C++", "Swift"],
    "device": ["iPhone", "Mac", "Chromebook", "Windows laptop", "Samsung phone", "iPad"],
    "tech_a": ["TCP", "REST", "MySQL", "HTTP", "RAM", "a process", "4G", "JSON"],
    "tech_b": ["UDP", "GraphQL", "PostgreSQL", "HTTPS", "ROM", "a thread", "5G", "XML"],
    "ident": ["get_user", "parse_args", "os.walk", "sortItems", "fetchData", "torch.cat", "np.mean", "loadConfig", "to_json", "send_all"],
    "dish": ["pancakes", "risotto", "lasagna", "chicken soup", "apple pie", "hummus", "guacamole", "chili"],
    "ingredient": ["butter", "buttermilk", "eggs", "baking powder", "yeast", "heavy cream", "brown sugar", "cornstarch"],
    "food": ["rice", "chicken", "salmon", "spinach", "potatoes", "strawberries", "broccoli", "bananas", "mushrooms", "cheese"],
    "illness": ["influenza", "diabetes", "asthma", "measles", "migraine", "anemia", "bronchitis", "gout"],
    "book": ["Hamlet", "Moby Dick", "Dracula", "The Trial", "Emma", "Don Quixote", "Ulysses", "The Odyssey"],
    "person": ["Albert Einstein", "Marie Curie", "Isaac Newton", "Nelson Mandela", "Frida Kahlo", "Ada Lovelace"],
    "landmark": ["the Eiffel Tower", "Mount Fuji", "the Statue of Liberty", "Big Ben", "the Burj Khalifa", "the Colosseum"],
    "thing": ["planet", "ocean", "desert", "island", "lake", "continent", "mammal", "country"],
    "element": ["oxygen", "gold", "iron", "helium", "sodium", "copper", "nitrogen", "lead"],
    "invention": ["telephone", "light bulb", "bicycle", "printing press", "microscope", "steam engine"],
    "stain": ["coffee", "red wine", "grass", "ink", "blood", "chocolate"],
    "plant": ["tomatoes", "basil", "roses", "lavender", "carrots", "orchids"],
    "appliance": ["dishwasher", "washing machine", "refrigerator", "coffee maker", "dryer", "microwave"],
    "shape": ["circle", "triangle", "trapezoid", "rectangle", "hexagon", "rhombus"],
    "spoken": ["Spanish", "German", "French", "Italian", "Japanese", "Arabic", "Korean", "Portuguese"],
    "phrase": ["good morning", "thank you", "how are you", "see you later", "I am lost", "the bill please"],
    "word": ["ephemeral", "ubiquitous", "candid", "stoic", "novel", "generous", "brave", "ancient"],
    "sport": ["soccer", "basketball", "volleyball", "rugby", "baseball", "handball"],
    "pet": ["dog", "cat", "hamster", "rabbit", "parrot", "turtle"],
    "n": ["3", "5", "7", "10", "12", "15", "20", "30", "45", "60", "90", "100", "250"],
    "p": ["5", "8", "10", "15", "20", "25", "30", "40"],
    "w": ["I", "II", "1", "2"],
}  # fmt: skip
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Group:
    """Ways to ask one thing. `template` names the line, `filled` the slots' values."""

    topic: str
    template: int
    filled: tuple[tuple[str, str], ...]
    forms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions. `category`: what was done; `template`: the line that both come from."""

    asked: str
    remembered: str
    same: bool
    category: str
    topic: str
    template: int


def templates() -> list[tuple[str, tuple[str, ...]]]:
    """(topic, forms) of each line of questions.txt."""
    rows = []
    for line in QUESTIONS.read_text().splitlines():
        if line and not line.startswith("#"):
            topic, rest = line.split(": ", 1)
            rows.append((topic, tuple(form.strip() for form in rest.split(" | "))))
    return rows


def fill(text: str, values: dict[str, str]) -> str:
    """The text with its slots filled."""
    return _SLOT.sub(lambda match: values[match[1]], text)


def groups(rng: random.Random, per_template: int) -> list[Group]:
    """Every line with up to `per_template` fillings."""
    found = []
    for number, (topic, forms) in enumerate(templates()):
        slots = sorted(set(_SLOT.findall(" ".join(forms))))
        seen = set()
        for _ in range(per_template if slots else 1):
            values = {slot: rng.choice(SLOTS[slot]) for slot in slots}
            key = tuple(sorted(values.items()))
            if key not in seen:
                seen.add(key)
                found.append(Group(topic, number, key, tuple(fill(form, values) for form in forms)))
    return found


def paraphrases(group: Group) -> list[Pair]:
    """All pairs of a group's forms."""
    forms = group.forms
    return [
        Pair(a, b, True, "paraphrase", group.topic, group.template) for i, a in enumerate(forms) for b in forms[i + 1 :]
    ]


_LEADS = (
    "Hi, ", "Hello! ", "Please tell me: ", "Quick question: ", "Hey there, ", "I was wondering, ", "Just curious: ",
    "Good morning. ", "Sorry to bother you, ", "I have a question: ", "Could you tell me, ", "So, ", "OK, ", "Excuse me, ",
)  # fmt: skip
_TAILS = (" please", " Thanks!", ", thanks in advance", " Thank you.", " Any ideas?", " Can you help?", " Please help.", " pls", " Cheers!")  # fmt: skip
_SHORT = (("What is", "What's"), ("How do I", "How can I"), ("How do I", "How do you"), ("How do I", "How to"), ("I am", "I'm"), ("do not", "don't"), ("Who is", "Who's"), ("Where is", "Where's"), ("What is", "What is, exactly,"), ("How can I", "How could I"), ("How do I", "How would I"))  # fmt: skip
_SWAPS = (("buy", "purchase"), ("fix", "repair"), ("big", "large"), ("begin", "start"), ("picture", "photo"), ("make", "create"), ("quickly", "fast"), ("get rid of", "remove"), ("computer", "PC"), ("delete", "remove"), ("change", "modify"), ("recommended", "advised"), ("movie", "film"), ("needs", "requires"), ("two", "2"), ("percent", "%"))  # fmt: skip
_COURTESY = ("Could you please tell me ", "Can you tell me ", "Do you know ", "I'd like to know ", "I want to know ", "Tell me ", "Please explain ")  # fmt: skip


def typo(rng: random.Random, text: str) -> str:
    """One slip in one long word."""
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) > 5 and word.isalpha() and word.islower()]
    if not long:
        return text.lower()
    at = rng.choice(long)
    word = words[at]
    i = rng.randrange(2, len(word) - 1)
    slip = rng.choice(("swap", "drop", "double"))
    if slip == "swap" and word[i] != word[i - 1]:
        word = word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :]
    elif slip == "drop":
        word = word[:i] + word[i + 1 :]
    else:
        word = word[:i] + word[i] + word[i:]
    return " ".join([*words[:at], word, *words[at + 1 :]])


_FILLERS = (
    "really",
    "exactly",
    "actually",
    "currently",
    "normally",
    "usually",
    "properly",
    "correctly",
    "generally",
    "just",
    "simply",
    "typically",
    "easily",
    "successfully",
    "possibly",
    "best",
    "quickly",
)
_ENDS = (
    " right now",
    " nowadays",
    " these days",
    " at the moment",
    " exactly",
    " in general",
    " properly",
    " currently",
    " usually",
)


def filler(rng: random.Random, text: str) -> str:
    """An empty word more, where it may stand."""
    if rng.random() < 0.5:
        body = text.rstrip("?.")
        return body + rng.choice(_ENDS) + text[len(body) :]
    found = re.match(r"((?:How (?:do|can|should) (?:I|you)|Can I|How to|Does|Why do|Why does \w+ \w+) )(.+)", text)
    return f"{found[1]}{rng.choice(_FILLERS)} {found[2]}" if found else text


def synonym(rng: random.Random, text: str) -> str:
    """A word in the place of one that means the same."""
    groups = [line.split() for line in _NEAR.strip().splitlines() if len(line.split()) == 2]
    options = [(a, b) for pair in groups for a, b in (pair, pair[::-1]) if f" {a} " in text]
    if not options:
        return text
    a, b = rng.choice(options)
    return text.replace(f" {a} ", f" {b} ", 1)


def turned(text: str) -> str:
    """The last phrase in front."""
    found = re.match(r"(How|What|Why|Where|When|Who)( .+) ((?:in|on|with|for) (?:a |the |my )?\w+)\?$", text)
    return f"{found[3][0].upper()}{found[3][1:]}, {found[1].lower()}{found[2]}?" if found else text


def near_repeat(rng: random.Random, text: str) -> str:
    """The text with one or two small changes that ask nothing else."""
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choice(
            (
                "lead",
                "tail",
                "lower",
                "mark",
                "typo",
                "short",
                "swap",
                "space",
                "courtesy",
                "upper",
                "filler",
                "filler",
                "synonym",
                "turned",
                "article",
            )
        )
        if kind == "lead":
            text = (
                rng.choice(_LEADS)
                + text[0].lower() * (text[1:2].islower())
                + text[0] * (not text[1:2].islower())
                + text[1:]
            )
        elif kind == "tail":
            text = text + rng.choice(_TAILS)
        elif kind == "lower":
            text = text.lower()
        elif kind == "upper":
            text = text[0].upper() + text[1:]
        elif kind == "mark":
            text = text.rstrip("?.") + rng.choice(("", "??", "?!", "..", " ?"))
        elif kind == "typo":
            text = typo(rng, text)
        elif kind == "filler":
            text = filler(rng, text)
        elif kind == "synonym":
            text = synonym(rng, text)
        elif kind == "turned":
            text = turned(text)
        elif kind == "article":
            text = re.sub(r" (?:the|a|an|my) ", " ", text, count=1)
        elif kind == "space":
            text = "  " + text.replace(" ", "  ", 1) + "\n"
        elif kind == "courtesy" and re.match(r"(How to|What|Why|Where|When|Who) ", text):
            text = rng.choice(_COURTESY) + text[0].lower() + text[1:]
        else:
            options = [(a, b) for a, b in (_SHORT if kind == "short" else _SWAPS) if a in text]
            if options:
                a, b = rng.choice(options)
                text = text.replace(a, b, 1)
    return text


def near_repeats(rng: random.Random, group: Group, per_form: int) -> list[Pair]:
    """Near repeats of each of a group's forms."""
    return [
        Pair(near_repeat(rng, form), form, True, "near_repeat", group.topic, group.template)
        for form in group.forms
        for _ in range(per_form)
    ]
