"""The incarnation of a cell's database: the number of its history. Pure."""

from __future__ import annotations

from msgspec import Struct


class SetBack(Struct, frozen=True):
    """Which history of the database this is: each set-back begins another one, with a higher number."""

    incarnation: int = 1
