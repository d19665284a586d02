"""Topic patterns against a second way of reading them: as regular expressions over words."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from bus.topology import matches

WORD = st.sampled_from(["a", "b", "build", "event"])
KEYS = st.lists(WORD, max_size=5)
PATTERNS = st.lists(st.one_of(WORD, st.sampled_from(["*", "#"])), max_size=5)


def by_expression(pattern: list[str], key: list[str]) -> bool:
    """Every word of the key is followed by a dot; `*` is one of those, `#` any number."""
    words = {"*": r"[^.]+\.", "#": r"(?:[^.]+\.)*"}
    expression = "".join(words.get(word, re.escape(word) + r"\.") for word in pattern)
    return re.fullmatch(expression, "".join(f"{word}." for word in key)) is not None


@given(PATTERNS, KEYS)
@example(["#"], [])
@example(["a", "#"], ["a"])
@example(["#", "*"], [])
@example(["*", "#", "b"], ["a", "b"])
def test_a_pattern_takes_just_the_keys_that_its_expression_takes(pattern: list[str], key: list[str]) -> None:
    assert matches(pattern, key) == by_expression(pattern, key)
