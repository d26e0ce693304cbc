"""What to say for a text, and where to breathe: written text -> clauses -> spoken words.

`ClauseSplitter` cuts a stream of text into clauses that are good to speak one by one. `spoken` turns a written clause into what a
voice can say: numbers and money in words, no markdown, no emoji. Both are pure. Knows English. Knows nothing of phonemes or audio.

Rules
- The cuts depend on the text alone, not on the pieces it came in: streamed speech is the speech of the whole text.
- A clause is a span of the original, in order; between two lies white space or code, nothing else. Code in fences is not spoken.
- Neither raises on any text, and neither holds back more than `MAX_CHARS` of it (code aside).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

MAX_CHARS = 300  # a clause is cut here if nothing better came

# ---- clauses ---------------------------------------------------------------------------------------------------------------------


class Clause(NamedTuple):
    """A piece of the original text to speak in one breath."""

    text: str  # original[start:end]; begins and ends with what is no white space
    start: int  # characters since the start of the stream
    end: int


class Breath(NamedTuple):
    """How long a clause may be: the first audio hurries, what follows it has the time that it plays."""

    soft_words: int  # a comma ends the clause from this many words on
    max_words: int  # and this many end it anyhow


FIRST_WORDS = 4  # most words of the first clause, unless said otherwise
BREATHS = (Breath(4, 12), Breath(10, 40))  # of the second clause, and of all others

ABBREVIATIONS = {
    "mr": "mister", "mrs": "missus", "ms": "miz", "dr": "doctor", "prof": "professor", "st": "saint", "jr": "junior", "sr": "senior",
    "e.g": "for example", "i.e": "that is", "vs": "versus", "etc": "et cetera", "approx": "approximately", "dept": "department",
    "no": "number", "vol": "volume", "fig": "figure", "jan": "January", "feb": "February", "mar": "March", "apr": "April", "jun": "June",
    "jul": "July", "aug": "August", "sep": "September", "sept": "September", "oct": "October", "nov": "November", "dec": "December",
}  # fmt: skip
ALWAYS_SHORT = {"mr", "mrs", "ms", "dr", "prof", "e.g", "i.e", "vs", "approx", "dept", "vol"}  # never the end of a sentence
CONNECTORS = frozenset(
    "and or but because which that who when where while with without for in on at to of from by as is are was were than if so".split()  # noqa: SIM905
)
FENCE = "```"
_WORD = re.compile(r"\s*(\S+)")
_CLOSERS = "\"'”’»)]}*_"
_HARD = frozenset(".!?…。！？")
_SOFT = frozenset(",;:—–，、；：")


class ClauseSplitter:
    """One stream of text: `push` what comes, speak the clauses that it gives, `finish` for the rest.

    `first_words`: the most that the first clause may have. Fewer are heard sooner, more sound better.
    """

    def __init__(self, first_words: int = FIRST_WORDS) -> None:
        self._breaths = (Breath(2, first_words), *BREATHS)
        self._text = ""  # not given out yet
        self._base = 0  # where it begins in the stream
        self._count = 0  # clauses given out
        self._in_code = False

    def push(self, text: str) -> list[Clause]:
        self._text += text
        return self._cut(is_end=False)

    def finish(self) -> list[Clause]:
        """The rest, cut as if nothing could follow. The splitter is done."""
        return self._cut(is_end=True)

    def _cut(self, *, is_end: bool) -> list[Clause]:
        clauses: list[Clause] = []
        position = 0
        while (cut := self._next_cut(position, is_end=is_end)) is not None:
            start, end, position = cut
            if start < end:
                clauses.append(Clause(self._text[start:end], self._base + start, self._base + end))
                self._count += 1
        self._text = self._text[position:]
        self._base += position
        return clauses

    def _next_cut(self, position: int, *, is_end: bool) -> tuple[int, int, int] | None:
        """(start, end, where to go on) of the next clause from `position`; None while more text could change it.

        Looks at whole words, and at the first character after the white space behind them: enough to know "3." from "3.5".
        """
        text, breath = self._text, self._breaths[min(self._count, len(self._breaths) - 1)]
        ends: list[int] = []  # of the words so far
        start = -1
        here = position
        while True:
            word = _WORD.match(text, here)
            if word is None:  # white space to the end
                if is_end and ends:
                    return start, ends[-1], len(text)
                return None if ends or here == len(text) else (len(text),) * 3
            begin, end = word.span(1)
            following = _WORD.match(text, end)
            is_whole = is_end or (following is not None and following.start(1) > end)

            if self._in_code:
                if not is_whole:
                    return None if here == position else (here, here, here)
                self._in_code = word[1].count(FENCE) % 2 == 0
                here = position = end
                if not self._in_code or is_end:
                    return end, end, end
                continue
            start = begin if start < 0 else start
            if end - start > MAX_CHARS:
                return (start, ends[-1], ends[-1]) if ends else (start, start + MAX_CHARS, start + MAX_CHARS)
            if not is_whole:
                return None
            if FENCE in word[1]:
                if ends:
                    return start, ends[-1], ends[-1]
                self._in_code = word[1].count(FENCE) % 2 == 1
                return end, end, end

            ends.append(end)
            gap = text[end : following.start(1)] if following else ""
            after = text[following.start(1)] if following else ""
            strength = _boundary(word[1], gap, after, is_first=len(ends) == 1)
            if strength == 2 or (strength == 1 and len(ends) >= breath.soft_words):
                return start, end, end
            if len(ends) > breath.max_words:
                cut = _breathing_place(text, start, ends, breath.max_words)
                return start, cut, cut
            here = end


def _boundary(word: str, gap: str, after: str, *, is_first: bool) -> int:
    """How strongly the white space `gap` after `word` parts what is before from `after`: 0 not, 1 a clause, 2 a sentence."""
    bare = word.rstrip(_CLOSERS)
    last = bare[-1:] if bare else word[-1:]
    if gap.count("\n") > 1:
        return 2
    if "\n" in gap and (last in _HARD or last in _SOFT or after in "-*+•#>|`" or after.isdigit()):
        return 2
    if last == ".":
        stem = bare.lstrip("\"'“‘([{*_").rstrip(".").lower()
        if (
            stem in ALWAYS_SHORT
            or (stem in ABBREVIATIONS and not after.isupper())
            or (len(stem) == 1 and stem.isalpha() and after.isupper())
        ):
            return 0  # "Dr. Smith", "etc. and", "J. Bach"
        if is_first and stem.isdigit():
            return 0  # "1. Open the box": the number belongs to what follows
        return 2
    if last in _HARD:
        return 2
    return 1 if last in _SOFT or word in ("-", "--") else 0


def _breathing_place(text: str, start: int, ends: list[int], max_words: int) -> int:
    """Where to cut a run of words without a comma: before a connecting word if one is near the end, else at the limit."""
    for count in range(max_words, max_words // 2, -1):
        following = text[ends[count - 1] : ends[count]].strip().lower()
        if following in CONNECTORS and text[start : ends[count - 1]].rsplit(None, 1)[-1].lower() not in CONNECTORS:
            return ends[count - 1]
    return ends[max_words - 1]


# ---- spoken words ----------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What is said for a span of the written text; "" for what is not said."""

    text: str
    start: int
    end: int


def pieces(text: str) -> list[Piece]:
    """The written text, span by span, with what is said for it. The spans cover it all, in order."""
    found: list[Piece] = []
    position = 0
    while position < len(text):
        match = _RULES.match(text, position)
        if match is not None and match.end() > position:
            name = match.lastgroup or ""
            found.append(Piece(_SAY[name](match[name]), position, match.end()))
            position = match.end()
        else:
            found.append(Piece(_say_character(text[position]), position, position + 1))
            position += 1
    return found


def spoken(text: str) -> str:
    """What a voice says for a written clause; "" when there is nothing to say."""
    words = re.sub(r"\s+", " ", "".join(piece.text for piece in pieces(text))).strip()
    words = re.sub(r"\s+([,.;:!?…])", r"\1", words)
    words = re.sub(r"([,;:])(?:\s*[,;:])+", r"\1", words)
    words = re.sub(r"^[\s,;:.!?…—]+", "", words)
    return words if any(character.isalnum() for character in words) else ""


ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen".split()  # noqa: SIM905
ONES += [f"{stem}teen" for stem in ("fif", "six", "seven", "eigh", "nine")]
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
MONTHS = "January February March April May June July August September October November December".split()  # noqa: SIM905
MONEY = {
    "$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", ""), "₹": ("rupee", "paisa"),
}  # fmt: skip
AMOUNTS = {"k": "thousand", "m": "million", "bn": "billion", "b": "billion", "tn": "trillion"}
UNITS = {
    "km": "kilometers", "m": "meters", "cm": "centimeters", "mm": "millimeters", "kg": "kilograms", "g": "grams", "mg": "milligrams",
    "lb": "pounds", "lbs": "pounds", "oz": "ounces", "ft": "feet", "mi": "miles", "mph": "miles per hour", "km/h": "kilometers per hour",
    "l": "liters", "ml": "milliliters", "°c": "degrees Celsius", "°f": "degrees Fahrenheit", "°": "degrees", "ms": "milliseconds",
    "s": "seconds", "min": "minutes", "h": "hours", "hz": "hertz", "khz": "kilohertz", "mhz": "megahertz", "ghz": "gigahertz",
    "kb": "kilobytes", "mb": "megabytes", "gb": "gigabytes", "tb": "terabytes", "w": "watts", "kw": "kilowatts", "kwh": "kilowatt hours",
}  # fmt: skip
SYMBOLS = {
    "&": " and ", "@": " at ", "+": " plus ", "=": " equals ", "°": " degrees ", "×": " times ", "÷": " divided by ", "±": " plus or minus ",
    "<": " less than ", ">": " greater than ", "≤": " at most ", "≥": " at least ", "≈": " about ", "→": " to ", "©": " copyright ",
    "™": " ", "®": " ", "§": " section ", "½": " one half ", "¼": " one quarter ", "¾": " three quarters ",
    "—": ", ", "–": ", ", "…": "… ", "’": "'", "‘": "'", "“": "", "”": "", "«": "", "»": "", '"': "", "/": " ", "\\": " ", "|": ", ",
    "*": "", "_": " ", "~": "", "`": "", "#": "", "^": "", "[": "", "]": "", "{": "", "}": "", "(": ", ", ")": ", ", "•": "",
    "。": ". ", "！": "! ", "？": "? ", "，": ", ", "、": ", ", "；": "; ", "：": ": ", "$": " dollars ", "€": " euros ", "£": " pounds ", "%": " percent ",
}  # fmt: skip


def cardinal(number: int) -> str:
    """1234 -> "one thousand two hundred thirty four"."""
    if number < 0:
        return f"minus {cardinal(-number)}"
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens] + (f" {ONES[ones]}" if ones else "")
    for size, name in SCALES:
        if number >= size:
            many, rest = divmod(number, size)
            return f"{cardinal(many)} {name}" + (f" {cardinal(rest)}" if rest else "")
    raise AssertionError(number)


def ordinal(number: int) -> str:
    """21 -> "twenty first"."""
    head, _, last = cardinal(number).rpartition(" ")
    regular = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return f"{head} {ORDINALS.get(last, regular)}".strip()


def year(number: int) -> str:
    """1984 -> "nineteen eighty four"."""
    high, low = divmod(number, 100)
    if 2000 <= number < 2010 or (low == 0 and high % 10 == 0):
        return cardinal(number)
    return f"{cardinal(high)} {'hundred' if low == 0 else f'oh {ONES[low]}' if low < 10 else cardinal(low)}"


def number_in_words(written: str) -> str:
    """ "1,234.50" -> words; digits one by one when it is too long to be an amount, or begins with zero."""
    written = written.replace(",", "")
    whole, *decimals = written.split(".")
    if len(whole) > 15 or (len(whole) > 1 and whole[0] == "0"):
        words = _digits(whole)
    elif len(whole) == 4 and not decimals and (1100 <= int(whole) < 2100):
        words = year(int(whole))
    else:
        words = cardinal(int(whole or "0"))
    return " ".join([words, *(f"point {_digits(part)}" for part in decimals)])


def _digits(written: str) -> str:
    return " ".join(ONES[int(digit)] for digit in written)


def _say_money(written: str) -> str:
    symbol, rest = written[0], written[1:].strip()
    match = re.match(r"[\d,]*\d(?:\.\d+)?", rest)
    assert match is not None
    amount, scale = match[0].replace(",", ""), rest[match.end() :].strip().lower()
    unit, cent = MONEY[symbol]
    if scale:
        return f" {number_in_words(amount)} {AMOUNTS.get(scale, scale)} {_plural(unit, 2)} "
    whole, _, small = amount.partition(".")
    if len(whole) > 15 or len(small) > 2 or (small and not cent):
        return f" {number_in_words(amount)} {_plural(unit, 2)} "
    cents = int(small.ljust(2, "0")) if small else 0
    said = [f"{cardinal(int(whole))} {_plural(unit, int(whole))}"] if int(whole) or not cents else []
    said += [f"{cardinal(cents)} {_plural(cent, cents)}"] if cents else []
    return f" {' and '.join(said)} "


def _plural(unit: str, count: int) -> str:
    if count == 1 or unit == "yen":
        return unit
    return {"penny": "pence", "paisa": "paise"}.get(unit, f"{unit}s")


def _say_percent(written: str) -> str:
    return f" {number_in_words(written.rstrip('% '))} percent "


def _say_iso_date(written: str) -> str:
    years, months, days = written.split("-")
    return _say_date(int(years), int(months), int(days), written)


def _say_us_date(written: str) -> str:
    months, days, years = written.split("/")
    return _say_date(int(years), int(months), int(days), written)


def _say_date(years: int, months: int, days: int, written: str) -> str:
    if not (1 <= months <= 12 and 1 <= days <= 31 and years >= 1000):
        return f" {' '.join(number_in_words(part) for part in re.split('[-/]', written))} "
    return f" {MONTHS[months - 1]} {ordinal(days)}, {year(years)} "


def _say_time(written: str) -> str:
    match = re.match(r"(\d+):(\d+)(?::\d+)?\s*(.*)", written)
    assert match is not None
    hours, minutes, half = int(match[1]), int(match[2]), match[3].replace(".", "").lower()
    small = "" if minutes == 0 else f"oh {ONES[minutes]}" if minutes < 10 else cardinal(minutes)
    if not small and not half:
        small = "o'clock" if 1 <= hours <= 12 else "hundred"
    return f" {cardinal(hours)} {small} {' '.join(half)} "


def _say_unit(written: str) -> str:
    match = re.match(r"([\d,]*\d(?:\.\d+)?)\s*(.+)", written)
    assert match is not None
    first, space, rest = UNITS[match[2].lower()].partition(" ")
    if match[1] == "1":
        first = "foot" if first == "feet" else first.removesuffix("s")
    return f" {number_in_words(match[1])} {first}{space}{rest} "


def _say_range(written: str) -> str:
    low, high = re.split(r"\s?[-–]\s?", written)
    return f" {number_in_words(low)} to {number_in_words(high)} "


def _say_fraction(written: str) -> str:
    top, bottom = (int(part) for part in written.split("/"))
    known = {(1, 2): "one half", (1, 4): "one quarter", (3, 4): "three quarters"}
    return f" {known.get((top, bottom)) or f'{cardinal(top)} over {cardinal(bottom)}'} "


def _say_url(written: str) -> str:
    match = re.match(r"(?:https?://)?(?:www\.)?([^/?#:]*)(?::\d+)?([^?#]*)", written, re.IGNORECASE)
    assert match is not None
    host = match[1].replace(".", " dot ")
    path = [part for part in match[2].split("/") if part and len(part) <= 20]
    return f" {host}{''.join(f' slash {_letters(part)}' for part in path[:2])} "


def _say_email(written: str) -> str:
    name, _, host = written.partition("@")
    return f" {_letters(name)} at {host.replace('.', ' dot ')} "


def _letters(written: str) -> str:
    return re.sub(r"[^\w.]+|_", " ", written).replace(".", " dot ").strip()


def _say_abbreviation(written: str) -> str:
    return ABBREVIATIONS[written[:-1].lower()]


def _say_item(written: str) -> str:
    return f"{number_in_words(re.sub(r'[^0-9]', '', written))}, "


def _say_character(character: str) -> str:
    if character in SYMBOLS:
        return SYMBOLS[character]
    if character.isspace():
        return " "
    category = unicodedata.category(character)
    if category[0] == "L" or character in ",.;:!?'-" or character.isdecimal():
        return character
    # Emoji, joiners, private and unassigned characters, controls, lone surrogates: nothing that has a sound. Accents stay with their letter.
    return character if category == "Mn" and not 0xFE00 <= ord(character) <= 0xFE0F else " "


_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_LINE = r"(?:(?<=\n)|(?<![\s\S]))[ \t]*"  # at the start of a line
# First match wins. Each rule is (name, pattern, what is said for it).
_TABLE: list[tuple[str, str, Callable[[str], str]]] = [
    ("fence", r"```[^\n`]*(?:\n[\s\S]*?(?:```|\Z))?", lambda _: " "),
    ("url", r"(?:https?://|\bwww\.)[^\s<>()\[\]\"']*[^\s<>()\[\]\"'.,;:!?*_]", _say_url),
    ("email", r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+", _say_email),
    ("target", r"\]\((?:[^()\s]|\([^()\s]*\))*(?:\s+\"[^\"]*\")?\)", lambda _: " "),
    ("rule", _LINE + r"(?:-{3,}|\*{3,}|_{3,}|={3,}|\|?[\s:|-]*-{3,}[\s:|-]*)(?=\n|\Z)", lambda _: " "),
    ("marker", _LINE + r"(?:#{1,6}|>|[-*+•])[ \t]+", lambda _: " "),
    ("item", _LINE + r"\d{1,3}[.)][ \t]+", _say_item),
    ("tag", r"</?[A-Za-z][^<>]{0,200}>", lambda _: " "),
    ("money", rf"[$€£¥₹]\s?{_NUMBER}(?:\s?(?:thousand|million|billion|trillion|k|m|bn|b|tn)\b)?", _say_money),
    ("percent", rf"(?<![\d.]){_NUMBER}\s?%", _say_percent),
    ("iso_date", r"(?<![\d-])\d{4}-\d{2}-\d{2}(?![\d-])", _say_iso_date),
    ("us_date", r"(?<![\d/])\d{1,2}/\d{1,2}/\d{4}(?![\d/])", _say_us_date),
    ("time", r"(?<![\d:])(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d)?(?:\s?[AaPp]\.?[Mm]\b\.?)?(?![\d:])", _say_time),
    ("clock", r"(?<![\d:.])\d{1,2}\s?[AaPp]\.?[Mm]\b(?:\.(?=\s+[a-z]))?", lambda s: f" {cardinal(int(re.match('[0-9]+', s)[0]))} {' '.join(re.sub('[^a-z]', '', s.lower()))} "),  # type: ignore[index]
    ("ordinal", r"\b\d{1,6}(?:st|nd|rd|th)\b", lambda s: f" {ordinal(int(s[:-2]))} "),
    ("fraction", r"(?<![\d/.])\d{1,3}/\d{1,3}(?![\d/.])", _say_fraction),
    ("unit", rf"(?<![\w.]){_NUMBER}\s?(?:{'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))})(?!\w)", _say_unit),
    ("range", rf"(?<![\w.-]){_NUMBER}\s?[-–]\s?{_NUMBER}(?![\w-])", _say_range),
    ("minus", rf"(?<![\w)])[-−](?={_NUMBER})", lambda _: " minus "),
    ("hash", r"#(?=\d)", lambda _: " number "),
    ("number", r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)*", lambda s: f" {number_in_words(s)} "),
    ("ellipsis", r"\.{2,}", lambda _: "… "),
    ("short", rf"\b(?:{'|'.join(re.escape(name) for name in ABBREVIATIONS if name not in ('no', 'mar', 'sep', 'dec', 'jun', 'st'))})\.(?=\s|,|$)", _say_abbreviation),
    ("numero", r"\b[Nn]o\.(?=\s?\d)", lambda _: "number"),
    ("saint", r"\bSt\.(?=\s[A-Z])", lambda _: "saint"),
    ("dashes", r"\s+--?\s+", lambda _: ", "),
    ("underscores", r"(?<!\w)_+|_+(?!\w)", lambda _: ""),
]  # fmt: skip
# re.ASCII: `\d` is 0 to 9 here, digits of other scripts are left to the voice.
_RULES = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern, _ in _TABLE), re.ASCII | re.IGNORECASE)
_SAY = {name: say for name, _, say in _TABLE}
