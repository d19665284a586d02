"""Values as OpenStack's services serialise them: objects of oslo.versionedobjects (`nova_object.name`, `.namespace`,
`.version`, `.data`), and texts that mean yes or no.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OBJECT: Final = "nova_object."
NAMESPACE: Final = "nova"
MAX_FIELDS = 1_000

Primitive = dict[str, Any]

_TRUE = frozenset({"1", "t", "true", "on", "y", "yes"})


class ObjectUnreadable(ValueError):
    """A value that is no versioned object of the class that is read."""


class ObjectOfOtherVersion(ObjectUnreadable):
    """The same, because its major version is another."""


def data_of(value: object, name: str) -> Mapping[str, object]:
    """The fields of an object of this class, 1.x, as they came. Raises ObjectUnreadable."""
    if not isinstance(value, Mapping):
        raise ObjectUnreadable(f"{name}: no versioned object")
    found, namespace, version, data = (value.get(OBJECT + key) for key in ("name", "namespace", "version", "data"))
    if (found, namespace) != (name, NAMESPACE) or not isinstance(data, Mapping):
        raise ObjectUnreadable(f"{name}: no versioned object of this class")
    if not isinstance(version, str) or version.partition(".")[0] != "1":
        raise ObjectOfOtherVersion(f"{name}: version {str(version)[:20]!r}; 1.x is understood")
    if len(data) > MAX_FIELDS:
        raise ObjectUnreadable(f"{name}: more than {MAX_FIELDS} fields")
    return data


def versioned(name: str, version: str, fields: Mapping[str, object]) -> Primitive:
    """An object of Nova's with these fields, all of which its writer has set."""
    return {
        OBJECT + "name": name,
        OBJECT + "namespace": NAMESPACE,
        OBJECT + "version": version,
        OBJECT + "data": dict(fields),
        OBJECT + "changes": sorted(fields),
    }


def is_true(text: object) -> bool:
    """Whether a setting's text means yes (oslo.utils' bool_from_string; everything that it does not know is no)."""
    return text if isinstance(text, bool) else str(text).strip().lower() in _TRUE
