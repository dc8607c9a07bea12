"""Words by which an answer depends on when it is asked. A question with one of them is answered by its like alone
while that lives, never by a similar one: over-cautious is cheap, yesterday's news is not."""

from __future__ import annotations

import re
import unicodedata

_UNIT = "second|minute|hour|day|night|week|weekend|month|quarter|season|semester|year|decade|century"
_PART = f"{_UNIT}|morning|afternoon|evening|noon|monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_WORDS = (
    r"today(?:['’]?s)?|tonight(?:['’]?s)?|tomorrow(?:['’]?s)?|yesterday(?:['’]?s)?|nowadays|now|"
    r"current(?:ly)?|present(?:ly)|recent(?:ly)?|lately|latest|newest|upcoming|"
    r"as we speak|tonite|still alive|is it (?:raining|snowing)|"
    r"(?:weather|forecast|traffic)(?: like)? (?:in|at|for|on)|(?:stock|share|bitcoin|gas|gold) prices?|"
    rf"(?:{_UNIT})s? (?:until|till|left|since|to go)|how long (?:until|till|ago)|"
    rf"(?:last|next|past|previous|coming) (?:few|couple of|several|\d+|two|three|four|five|six|ten) (?:{_UNIT})s?|"
    r"so far|right away|at the moment|at present|these days|as of|to date|up[- ]to[- ]date|breaking news|"
    rf"(?:this|last|next|past|coming|previous) (?:{_PART})s?|(?:this|last|next) (?:spring|summer|autumn|fall|winter)|"
    rf"(?:{_UNIT})s? ago|"
    r"(?:what|which) (?:time|day|date|year|month) is it|what(?:['’]s| is) the (?:time|date)|"
    # The same in the commonest other languages, where a word is not one of English too.
    r"heute|gestern|aktuell\w*|derzeit|jetzt|aujourd['’]hui|demain|maintenant|actuel\w*|hoy|ayer|mañana|ahora|"
    r"oggi|ieri|domani|adesso|hoje|ontem|amanhã|agora|сегодня|вчера|завтра|сейчас"
)
# The electric one and the like are no dates.
_NO_DATE = r"(?<!electric )(?<!electrical )(?<!alternating )(?<!direct )(?<!ocean )(?<!eddy )"
_LATIN = re.compile(rf"\b{_NO_DATE}(?:{_WORDS})\b", re.IGNORECASE)
_OTHER = re.compile("今天|昨天|明天|现在|目前|最新|今日|昨日|明日|오늘|어제|내일|지금")


def relative_date(text: str) -> str:
    """The first such word of `text`, lower case, "" when it has none."""
    text = unicodedata.normalize("NFKC", text)
    found = _LATIN.search(" ".join(text.split())) or _OTHER.search(text)
    return found[0].lower() if found else ""
