"""Counts the values of a text of JSON before it is decoded, which is one call in C."""

from __future__ import annotations


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a text of JSON may have more values: its separators are counted, at first those in strings as well.

    Without these it takes up to 9 ms a megabyte. User data may be a table of thousands of lines.
    """
    if _separators(body) <= most:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return plain.count(b'"') > 4 * most or _separators(b"".join(plain.split(b'"')[::2])) > most


def _separators(body: bytes) -> int:
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")
