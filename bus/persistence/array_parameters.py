"""Arrays as parameters of statements, without a Python call for each of their elements.

To find out whether an array has further dimensions asyncpg checks each element against two abstract base classes. Each
check is a call of `ABCMeta.__instancecheck__`: a twentieth of all function calls of a boot. Here it checks against
the classes that a parameter can have. A parameter of any other class is refused with asyncpg's DataError.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import asyncpg.protocol.protocol as driver

_DICT: dict[str, str] = {}
_ORDERED: OrderedDict[str, str] = OrderedDict()
VIEWS = (type(_DICT.keys()), type(_DICT.values()), type(_ORDERED.keys()), type(_ORDERED.values()))
CONTAINERS = (list, tuple, set, frozenset, range, deque, dict, *VIEWS)
_NAME = "IterableABC"  # in asyncpg 0.32; one that has no such name is left as it is


def install() -> None:
    """Make asyncpg check by these classes. Doing it twice is fine."""
    if hasattr(driver, _NAME):
        setattr(driver, _NAME, CONTAINERS)
