"""What is said for a text, and where it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.speech.text import MAX_CHARS, ClauseSplitter, cardinal, ordinal, pieces, spoken, year


def cut(text: str, size: int = 10**9) -> list[str]:
    splitter = ClauseSplitter(first_words=6)
    clauses = [clause for start in range(0, len(text), size) for clause in splitter.push(text[start : start + size])]
    return [clause.text for clause in clauses + splitter.finish()]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("I paid $3.50, then £1 and €2,000.", "I paid three dollars and fifty cents, then one pound and two thousand euros."),
        ("$0.99 or $2.5 million", "ninety nine cents or two point five million dollars"),
        ("3.5% of 1,234,567", "three point five percent of one million two hundred thirty four thousand five hundred sixty seven"),
        ("It is 25°C, or -5.", "It is twenty five degrees Celsius, or minus five."),
        ("2024-03-05 and 7/4/1976", "March fifth, twenty twenty four and July fourth, nineteen seventy six"),
        ("at 9:30 am, 12:05, 8:00", "at nine thirty a m, twelve oh five, eight o'clock"),
        ("the 1st, 22nd and 30th", "the first, twenty second and thirtieth"),
        ("in 1984, 2005 and 1900", "in nineteen eighty four, two thousand five and nineteen hundred"),
        (
            "agent 007, room 12345678901234567890",
            "agent zero zero seven, room " + " ".join(["one two three four five six seven eight nine zero"] * 2),
        ),
        ("version 1.2.3", "version one point two point three"),
        ("10-20 km, 1 kg, 1/2", "ten to twenty km, one kilogram, one half"),
        ("Dr. Smith, e.g. Mr. Jones vs. him", "doctor Smith, for example mister Jones versus him"),
        ("**Bold**, _soft_ and `code`", "Bold, soft and code"),
        ("# Title\n- one\n2. two\n> three", "Title, one two, two three"),
        ("see [the docs](https://x.org/a?b=1)!", "see the docs!"),
        ("go to https://www.example.com/about.", "go to example dot com slash about."),
        ("write to me.you@mail.org", "write to me dot you at mail dot org"),
        ("```python\nprint(1)\n```\nDone", "Done"),
        ("<b>strong</b> &amp", "strong and amp"),
        ("Hi 😀👍🏽 there 👨‍👩‍👧!", "Hi there!"),
        ("wait... “really”?", "wait… really?"),
        ("it’s a — well — dash", "it's a, well, dash"),
        ("bell\x07 and\x00 null\u200b", "bell and null"),
        ("| a | b |", "a, b,"),
        ("", ""),
        ("😀 *** --- ```", ""),
        ("naïve café", "naïve café"),
    ],
)
def test_what_is_said(written, said):
    assert spoken(written) == said


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("The capital of France is Paris.", ["The capital of France is Paris."]),
        ("Sure, I can help with that. It is easy.", ["Sure, I can help with that.", "It is easy."]),
        ("Of course, my friend. Yes.", ["Of course,", "my friend.", "Yes."]),
        ("It has 3.5 million people. Dr. Smith says so.", ["It has 3.5 million people.", "Dr. Smith says so."]),
        ("One of the best known cities of the world is Rome.", ["One of the best known cities", "of the world is Rome."]),
        ("Do you? I do! Well…  Fine", ["Do you?", "I do!", "Well…", "Fine"]),
        ("First line\n\nSecond line", ["First line", "Second line"]),
        ("a wrapped\nline of text", ["a wrapped\nline of text"]),
        ("Do this:\n1. Open it.\n2. Close it.", ["Do this:", "1. Open it.", "2. Close it."]),
        ("- one\n- two", ["- one", "- two"]),
        ("Here it is: ```x = 1. y``` and more.", ["Here it is:", "and more."]),
        ("No. That is J. Bach etc. and more.", ["No.", "That is J. Bach etc. and more."]),
        ('He said "yes." Then left.', ['He said "yes."', "Then left."]),
        ("  \n ", []),
        ("", []),
    ],
)
def test_where_it_is_cut(text, clauses):
    assert cut(text) == clauses


def test_the_first_clause_is_as_short_as_it_is_asked_to_be():
    assert [clause.text for clause in ClauseSplitter(first_words=4).push("The capital of France is Paris. It ")] == [
        "The capital of France",
        "is Paris.",
    ]
    assert [clause.text for clause in ClauseSplitter(first_words=6).push("The capital of France is Paris. It ")] == [
        "The capital of France is Paris."
    ]


def test_the_first_clause_comes_before_the_sentence_ends():
    splitter = ClauseSplitter(first_words=6)
    assert splitter.push("One of the best known cities of") == []
    assert [clause.text for clause in splitter.push(" t")] == ["One of the best known cities"]


def test_later_clauses_are_whole_sentences():
    long = (
        "Well then. "
        + "It was a fine day. "
        + "The people who lived there, and those who came to visit, liked the old town very much indeed."
    )
    assert cut(long)[2:] == ["The people who lived there, and those who came to visit,", "liked the old town very much indeed."]


def test_a_word_without_end_is_cut_at_the_limit():
    assert [len(clause) for clause in cut("a" * 700, 50)] == [MAX_CHARS, MAX_CHARS, 100]


def test_numbers_in_words():
    assert cardinal(999_999_999_999_999).startswith("nine hundred ninety nine trillion")
    assert [ordinal(n) for n in (1, 12, 20, 101)] == ["first", "twelfth", "twentieth", "one hundred first"]
    assert [year(n) for n in (1066, 2000, 2010)] == ["ten sixty six", "two thousand", "twenty ten"]


TEXTS = st.text() | st.text(alphabet="ab 1.,-!?\n`*_#$%/:@😀é漢。()[]") | st.text(alphabet=st.characters(codec=None), max_size=60)


@given(TEXTS)
def test_pieces_cover_the_text_in_order(text):
    position = 0
    for piece in pieces(text):
        assert piece.start == position < piece.end
        position = piece.end
    assert position == len(text)
    spoken(text)


@given(TEXTS, st.integers(1, 9))
def test_cuts_lose_nothing_and_depend_on_the_text_alone(text, size):
    whole, position = ClauseSplitter(first_words=6), 0
    clauses = whole.push(text) + whole.finish()
    for clause in clauses:
        assert text[clause.start : clause.end] == clause.text == clause.text.strip()
        assert clause.start >= position
        assert len(clause.text) <= MAX_CHARS
        between = text[position : clause.start]
        assert not between.strip() or "```" in text
        position = clause.end
    assert not text[position:].strip() or "```" in text
    assert cut(text, size) == [clause.text for clause in clauses]
