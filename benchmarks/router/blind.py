"""The judge of near hits on pairs that neither its rules' authors nor its training have seen.

    python benchmarks/router.py blind [--pairs 125] [--seed 20261130] [--sample 0] [--out FILE]

blind_traps.txt  templates of question pairs whose right answers differ, by kind; `--pairs` of each kind are drawn,
                 evenly over its templates, and dressed: greetings, typos, lower case, a sentence before or after.
blind_same.txt   pairs of the same meaning, all written by hand: near repeats and rewordings.

A pair is served when its cosine (MiniLM) reaches τ and `services.router.match.judge` calls it the same, with the rules
that are the default. Pairs of one template are alike, so that Wilson's intervals, which take them as independent, are
narrower than the truth; the number of templates with a served pair is printed for it.
Last, every kind once more with a sentence before or after both questions, to tell the kind's own rate from the
frame's.
`--sample N` prints N random traps and judges nothing: that is how labels are checked before verdicts are seen.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TAUS = (0.7, 0.8, 0.9)
LISTED = 40
PER_TEMPLATE = 12
"""Most pairs of one template; a kind with too few gives fewer pairs."""

OPENINGS = (
    "Hi! ",
    "Quick question: ",
    "I'm new to this, sorry if it is obvious. ",
    "My roommate and I were arguing about this yesterday. ",
    "Not sure who else to ask, so here goes. ",
    "I've searched for an hour and found nothing useful. ",
    "ok so ",
)
CLOSINGS = (
    " Thanks!",
    " Please keep it short.",
    " I only have a few minutes, so just tell me what matters.",
    " Explain it step by step, as I've never dealt with it before.",
    " thx",
)
COURTESIES = ("Hello, ", "Hey there, ", "Good morning. ", "One more thing: ")
TYPOS = {
    "what": "waht",
    "which": "wich",
    "should": "shoud",
    "with": "wiht",
    "does": "deos",
    "from": "form",
    "happens": "hapens",
    "difference": "diffrence",
    "between": "bewteen",
    "the": "teh",
    "how": "hwo",
    "and": "adn",
}


@dataclass(frozen=True)
class Pair:
    """Two questions. `template` is the line of its file."""

    kind: str
    topic: str
    template: int
    asked: str
    remembered: str


def _lines(name: str) -> Iterator[tuple[int, str, str]]:
    """Line number, section and text of the lines of a file that are not comments."""
    section = ""
    for number, line in enumerate((HERE / name).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            section = line[3:].strip()
        elif line.strip() and not line.startswith("# "):
            yield number, section, line.strip()


def _choices(text: str) -> list[tuple[str, str]]:
    """Every pair that a template can give, undressed."""
    shared = re.findall(r"\[[^\[\]{}]*\|[^\[\]{}]*\]", text)
    contexts = [text]
    for group in shared:
        contexts = [c.replace(group, option, 1) for c in contexts for option in group[1:-1].split("|")]
    pairs = []
    for context in contexts:
        if " == " in context:
            a, b = context.split(" == ")
            pairs.append((a, b))
            continue
        groups = re.findall(r"\{[^{}]*\}", context)
        many = max(len(group[1:-1].split("|")) for group in groups)
        filled = []
        for at in range(many):
            out = context
            for group in groups:
                out = out.replace(group, group[1:-1].split("|")[at], 1)
            filled.append(out)
        pairs += [(a, b) for i, a in enumerate(filled) for j, b in enumerate(filled) if i != j]
    return pairs


def _typo(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if word.lower() in TYPOS]
    if places:
        at = rng.choice(places)
        words[at] = TYPOS[words[at].lower()]
    return " ".join(words)


def _informal(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip("?.!")


def _dress(a: str, b: str, kind: str, rng: random.Random) -> tuple[str, str]:
    """The same pair as users would type it; nothing here changes what is asked."""
    way = rng.random()
    if way < 0.45:
        return a, b
    if way < 0.58:
        return (_informal(a), _informal(b)) if rng.random() < 0.5 else (_informal(a), b)
    if way < 0.68 and kind not in ("code", "quoted"):
        return _typo(a, rng), b
    if way < 0.82:
        opening = rng.choice(OPENINGS)
        return opening + a, opening + b
    if way < 0.92:
        closing = rng.choice(CLOSINGS)
        return a + closing, b + closing
    return rng.choice(COURTESIES) + a, b


def _dress_of(pair: Pair) -> str:
    if pair.asked.startswith(OPENINGS):
        return "opening" if pair.asked.split()[0] not in ("Hi!", "Quick", "ok") else "greeting"
    if pair.asked.startswith(COURTESIES):
        return "greeting"
    return "closing" if pair.asked.endswith(CLOSINGS) else "plain"


def _bare(text: str) -> str:
    return " ".join(text.replace("?", " ").replace(".", " ").split())


def traps(each: int, seed: int) -> list[Pair]:
    """`each` pairs of every kind, evenly over its templates."""
    rng = random.Random(seed)
    kinds: dict[str, list[list[tuple[int, str, str, str]]]] = {}
    for number, kind, line in _lines("blind_traps.txt"):
        topic, text = line.split("> ", 1)
        choices = [(number, topic, a, b) for a, b in _choices(text) if _bare(a) != _bare(b)]
        # Both ways round are one pair here: which was asked first is drawn.
        seen: set[frozenset[str]] = set()
        rng.shuffle(choices)
        once = []
        for choice in choices:
            key = frozenset(choice[2:])
            if key not in seen:
                seen.add(key)
                once.append(choice)
        kinds.setdefault(kind, []).append(once[:PER_TEMPLATE])
    out = []
    for kind, templates in kinds.items():
        rng.shuffle(templates)
        drawn = []
        for turn in range(PER_TEMPLATE):
            drawn += [choices[turn] for choices in templates if turn < len(choices)]
        # A kind short of pairs takes some again, the other way round and in another dress.
        drawn += [(number, topic, b, a) for number, topic, a, b in drawn]
        taken: set[tuple[str, str]] = set()
        for number, topic, a, b in drawn:
            dressed = _dress(a, b, kind, rng)
            if len(taken) < each and dressed not in taken:
                taken.add(dressed)
                out.append(Pair(kind, topic, number, *dressed))
    return out


def paraphrases() -> list[Pair]:
    """The pairs written by hand."""
    out = []
    for number, kind, line in _lines("blind_same.txt"):
        asked, remembered = line.split(" == ")
        out.append(Pair(kind, "", number, asked, remembered))
    return out


def _describe(pairs: Sequence[Pair]) -> str:
    lengths = sorted(len(text.split()) for pair in pairs for text in (pair.asked, pair.remembered))
    return f"{lengths[0]} to {lengths[-1]} words, median {lengths[len(lengths) // 2]}"


def _measure(pairs: Sequence[Pair], say: Callable[[str], None]) -> None:
    import numpy as np

    from services.router.match import judge
    from services.router.match.wilson import wilson
    from services.router.near.embedder import MiniLmEmbedder

    texts = sorted({text for pair in pairs for text in (pair.asked, pair.remembered)})
    vectors = dict(zip(texts, MiniLmEmbedder().embed_batch(texts), strict=True))
    cosines, served, verdicts = [], [], []
    for pair in pairs:
        a, b = vectors[pair.asked], vectors[pair.remembered]
        assert a is not None
        assert b is not None
        cosine = float(np.dot(a, b))
        verdict = judge(pair.asked, pair.remembered, cosine)
        cosines.append(cosine)
        verdicts.append(verdict)
        served.append(verdict.same and cosine >= TAUS[0])

    def row(name: str, places: Sequence[int]) -> None:
        cells = []
        for tau in TAUS:
            hits = sum(served[i] and cosines[i] >= tau for i in places)
            low, high = wilson(hits, len(places))
            rate = 100 * hits / len(places)
            cells.append(f"{hits:4d} {rate:6.2f} % [{100 * low:5.2f}, {100 * high:5.2f}]")
        near = sum(cosines[i] >= TAUS[0] for i in places)
        lines = len({pairs[i].template for i in places if served[i]})
        of = len({pairs[i].template for i in places})
        say(f"{name:12s} {len(places):5d} {near:5d}  " + "  ".join(cells) + f"  {lines:3d} of {of}")

    heads = "  ".join(f"served at τ {tau}, Wilson 95 %  " for tau in TAUS)
    say(f"{'':12s} pairs ≥ {TAUS[0]}  {heads}  templates")
    same = ("near", "rewording")
    wrong = [i for i, pair in enumerate(pairs) if pair.kind not in same]
    right = [i for i, pair in enumerate(pairs) if pair.kind in same]
    for kind in dict.fromkeys(pairs[i].kind for i in wrong):
        row(kind, [i for i in wrong if pairs[i].kind == kind])
    row("all traps", wrong)
    say("\nthe same traps by what stands around the question: a sentence before it, after it, a greeting, nothing")
    for dress in ("opening", "closing", "greeting", "plain"):
        row(dress, [i for i in wrong if _dress_of(pairs[i]) == dress])
    say("")
    for kind in same:
        row(kind, [i for i in right if pairs[i].kind == kind])
    row("all same", right)

    def tally(title: str, places: Sequence[int]) -> None:
        counts = Counter(verdicts[i].guard or "(model)" for i in places)
        say(f"\n{title}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))

    tally(f"same, cosine ≥ {TAUS[0]}, refused by", [i for i in right if not served[i] and cosines[i] >= TAUS[0]])
    tally(f"traps, cosine ≥ {TAUS[0]}, refused by", [i for i in wrong if not served[i] and cosines[i] >= TAUS[0]])
    hits = [i for i in wrong if served[i]]
    # Over the templates, then over their pairs, so that no template fills the list.
    turns: Counter[int] = Counter()
    order = []
    for i in sorted(hits, key=lambda i: -cosines[i]):
        order.append((turns[pairs[i].template], i))
        turns[pairs[i].template] += 1
    listed = sorted(i for _, i in sorted(order)[:LISTED])
    say(f"\nserved traps, {len(listed)} of {len(hits)} (cosine, probability):")
    for i in listed:
        pair, probability = pairs[i], verdicts[i].probability
        shown = "  - " if probability is None else f"{probability:.2f}"
        say(f"  {pair.kind:12s} {cosines[i]:.3f} {shown}  {pair.asked}\n{'':27s}{pair.remembered}")
    lost = [i for i in right if pairs[i].kind == "near" and not served[i]]
    say(f"\nnear repeats refused, {len(lost)} (cosine, by):")
    for i in lost:
        pair = pairs[i]
        say(f"  {cosines[i]:.3f} {verdicts[i].guard or '(model)':10s} {pair.asked} == {pair.remembered}")


def _crossed(seed: int, say: Callable[[str], None]) -> None:
    """Two pairs of every template, each bare and with the same sentence around both of its questions."""
    import numpy as np

    from services.router.match import judge
    from services.router.near.embedder import MiniLmEmbedder

    frames = (("bare", "", ""), ("before", "It is raining today. ", ""), ("after", "", " It is raining today."))
    embedder = MiniLmEmbedder()
    counts: Counter[tuple[str, str]] = Counter()
    totals: Counter[str] = Counter()
    bare: list[tuple[str, str, str]] = []
    for number, kind, line in _lines("blind_traps.txt"):
        choices = _choices(line.split("> ", 1)[1])
        for a, b in random.Random(seed + number).sample(choices, min(2, len(choices))):
            bare.append((kind, a, b))
            totals[kind] += 1
    for name, before, after in frames:
        texts = [f"{before}{text}{after}" for _, a, b in bare for text in (a, b)]
        vectors = embedder.embed_batch(texts)
        for at, (kind, _, _) in enumerate(bare):
            x, y = vectors[2 * at], vectors[2 * at + 1]
            assert x is not None
            assert y is not None
            cosine = float(np.dot(x, y))
            counts[name, kind] += cosine >= TAUS[0] and judge(texts[2 * at], texts[2 * at + 1], cosine).same
    say(f"\nserved at τ {TAUS[0]}, the same pairs bare, with a sentence before both and with one after both")
    for kind, total in [*totals.items(), ("all traps", totals.total())]:
        cells = []
        for name, _, _ in frames:
            hits = counts[name, kind] if kind in totals else sum(counts[name, k] for k in totals)
            cells.append(f"{name} {hits:3d} {100 * hits / total:5.1f} %")
        say(f"{kind:12s} {total:5d}  " + "   ".join(cells))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=125)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    wrong = traps(args.pairs, args.seed)
    if args.sample:
        for pair in random.Random(args.seed + 1).sample(wrong, args.sample):
            print(f"{pair.kind:12s} {pair.asked}\n{'':13s}{pair.remembered}")
        return 0
    right = paraphrases()
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    say("$ python benchmarks/router.py blind " + " ".join(argv if argv is not None else sys.argv[1:]))
    topics = len({pair.topic for pair in wrong})
    say(f"traps: {len(wrong)} pairs, {len({p.template for p in wrong})} templates, {topics} topics, {_describe(wrong)}")
    say(f"same: {len(right)} pairs, {_describe(right)}\n")
    _measure([*wrong, *right], say)
    _crossed(args.seed, say)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
