"""Texts that have to match a pattern, each with its rule in words: a user never reads a regular expression."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_WORDS: dict[str, str] = {}  # by the pattern as msgspec prints it
_PRINTED = re.compile(r"Expected `str` matching regex (?P<pattern>'.*?'|\".*?\")(?= - at `|$)", re.DOTALL)
OTHER = "a text of another form"


def matching(pattern: str, words: str, **bounds: Any) -> msgspec.Meta:
    """The bound of a text. words: the accepted values, in the words of a sentence ("1 to 64
    letters"). bounds: others.
    """
    _WORDS[repr(pattern)] = words
    return msgspec.Meta(pattern=pattern, **bounds)


def reason_of(error: Exception) -> str:
    """Why msgspec refused a value: its own sentence, with the rule in words where it prints a pattern."""
    return _PRINTED.sub(lambda found: f"Expected {_WORDS.get(found['pattern'], OTHER)}", str(error))
