"""Names of resource classes and traits: which names the book accepts, and which known name a mistyped one is
close to.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

import os_resource_classes

CUSTOM = "CUSTOM_"
MAX_NAME = 255
STANDARD_CLASSES: frozenset[str] = frozenset(os_resource_classes.STANDARDS)

_FOREIGN = re.compile(r"[^0-9A-Za-z]+")
_CUSTOM_NAME = re.compile(r"CUSTOM_[A-Z0-9_]+")


def is_class(name: str) -> bool:
    """Whether this is a standard or a custom resource class (`CUSTOM_` and upper-case letters, digits, `_`)."""
    return name in STANDARD_CLASSES or (len(name) <= MAX_NAME and _CUSTOM_NAME.fullmatch(name) is not None)


def suggestion(name: str, known: Collection[str] = STANDARD_CLASSES) -> str:
    """Return `; did you mean X?` for a name that is refused: X is the closest known name, or else the name with
    CUSTOM_.
    """
    near = difflib.get_close_matches(name[:MAX_NAME].upper(), sorted(known))
    own = CUSTOM + _FOREIGN.sub("_", name.removeprefix(CUSTOM)).strip("_").upper()
    suggested = near[0] if near else own if len(own) <= MAX_NAME and own != CUSTOM else ""
    return f"; did you mean {suggested}?" if suggested else ""


def is_custom(name: str) -> bool:
    """Whether a class or trait is custom, and may therefore be created on demand."""
    return name.startswith(CUSTOM)
