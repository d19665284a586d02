"""Names of resource classes as the book spells them (FEATURES P-67, P-69)."""

from __future__ import annotations

import re
from functools import lru_cache

import os_resource_classes

CUSTOM = "CUSTOM_"
MAX_NAME = 255
STANDARD_CLASSES: frozenset[str] = frozenset(os_resource_classes.STANDARDS)

_FOREIGN = re.compile(r"[^0-9A-Za-z]+")
_CUSTOM_NAME = re.compile(r"CUSTOM_[A-Z0-9_]+")


@lru_cache(maxsize=4096)
def class_name(name: str) -> str:
    """A resource class as the book spells it: standard and CUSTOM_ names as they are, others normalised (P-69).

    Ironic's `baremetal.with-GPU` becomes `CUSTOM_BAREMETAL_WITH_GPU`, as Nova and Ironic write it. A name that
    already starts with CUSTOM_ is kept, where Nova would prefix it twice.
    """
    if name in STANDARD_CLASSES or _CUSTOM_NAME.fullmatch(name):
        return name
    return CUSTOM + _FOREIGN.sub("_", name.removeprefix(CUSTOM)).upper()


def is_custom(name: str) -> bool:
    """Whether a class or trait is a site's own, and so may be created on demand."""
    return name.startswith(CUSTOM)
