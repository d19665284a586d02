"""The JSON schemas of bodies, derived from their types, and of query strings, by microversion. Their errors have the
texts of Placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import inspect

Schema = dict[str, Any]

UUID_KEY = "^[0-9a-fA-F-]{36}$"
NAME = "^[A-Z0-9_]+$"
CUSTOM_NAME = "^CUSTOM_[A-Z0-9_]+$"
NUMBER_SUFFIX = "[1-9][0-9]*"
WORD_SUFFIX = "[a-zA-Z0-9_-]{1,64}"
MAX_RATIO = 3.40282e38  # the largest value of a single-precision column

TEXT: Schema = {"type": "string"}
UUID: Schema = {"type": "string", "format": "uuid"}
OWNER: Schema = {"type": "string", "minLength": 1, "maxLength": 255}


def record(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these properties, some of them required, and no others."""
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    schema["additionalProperties"] = False
    return schema


def mapping(pattern: str, value: Schema, *, at_least: int) -> Schema:
    """Return the schema of an object whose keys match the pattern."""
    least = {"minProperties": at_least} if at_least else {}
    return {"type": "object", "patternProperties": {pattern: value}, **least, "additionalProperties": False}


def schema_of(kind: Any) -> Schema:
    """Return the schema of a body's type. An `extra_json_schema` of the type replaces what is derived, None leaves it
    out.
    """
    return _derived(inspect.type_info(kind))


def _derived(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.Metadata():
            found = {**_derived(kind.type), **(kind.extra_json_schema or {})}
            return {name: value for name, value in found.items() if value is not None}
        case inspect.StructType():
            required = [field.encode_name for field in kind.fields if field.required]
            return record({field.encode_name: _derived(field.type) for field in kind.fields}, *required)
        case inspect.DictType():
            return mapping(_derived(kind.key_type)["pattern"], _derived(kind.value_type), at_least=kind.min_length or 0)
        case inspect.ListType():
            return _bounded("array", minItems=kind.min_length, items=_derived(kind.item_type))
        case inspect.UnionType():
            each = [_derived(one) for one in kind.types]
            simple = all(one.keys() == {"type"} for one in each)
            return {"type": [one["type"] for one in each]} if simple else {"anyOf": each}
        case inspect.StrType():
            pattern = None if kind.pattern is None else kind.pattern.replace(r"\Z", "$")
            return _bounded("string", pattern=pattern, minLength=kind.min_length, maxLength=kind.max_length)
        case inspect.IntType():
            return _bounded("integer", maximum=kind.le, minimum=kind.ge)
        case inspect.FloatType():
            return _bounded("number", maximum=kind.le, minimum=kind.ge)
    assert isinstance(kind, inspect.NoneType), kind
    return {"type": "null"}


def _bounded(kind: str, **bounds: object) -> Schema:
    return {"type": kind, **{name: value for name, value in bounds.items() if value is not None}}


# --- providers

_LIST = {"name": TEXT, "uuid": UUID}
LIST_PROVIDERS = (
    (18, record({**_LIST, "member_of": TEXT, "resources": TEXT, "in_tree": UUID, "required": TEXT})),
    (14, record({**_LIST, "member_of": TEXT, "resources": TEXT, "in_tree": UUID})),
    (4, record({**_LIST, "member_of": TEXT, "resources": TEXT})),
    (3, record({**_LIST, "member_of": TEXT})),
    (0, record(_LIST)),
)

# --- traits

LIST_TRAITS = record({"name": TEXT, "associated": TEXT})

# --- usages

USAGES_9 = record({"project_id": OWNER, "user_id": OWNER}, "project_id")
USAGES_38 = record(
    {
        "project_id": OWNER,
        "user_id": OWNER,
        "consumer_type": {"type": "string", "pattern": NAME + "|^all|^unknown$", "minLength": 1, "maxLength": 255},
    },
    "project_id",
)

# --- allocation candidates

_LIMIT: Schema = {"type": ["integer", "string"], "pattern": "^[1-9][0-9]*$", "minimum": 1, "minLength": 1}
_POLICY: Schema = {"type": "string", "enum": ["none", "isolate"]}


def _granular(suffix: str, *names: str, **more: Schema) -> Schema:
    properties = {"limit": _LIMIT, "group_policy": _POLICY, **more}
    patterns = {f"^{name}({suffix})?$": TEXT for name in names}
    return {**record(properties), "patternProperties": patterns}


_GROUP = ("resources", "required", "member_of", "in_tree")
CANDIDATES = (
    (36, _granular(WORD_SUFFIX, *_GROUP, root_required=TEXT, same_subtree=TEXT)),
    (35, _granular(WORD_SUFFIX, *_GROUP, root_required=TEXT)),
    (33, _granular(WORD_SUFFIX, *_GROUP)),
    (31, _granular(NUMBER_SUFFIX, *_GROUP)),
    (25, _granular(NUMBER_SUFFIX, *_GROUP[:3])),
    (21, record({"resources": TEXT, "limit": _LIMIT, "required": TEXT, "member_of": TEXT}, "resources")),
    (17, record({"resources": TEXT, "limit": _LIMIT, "required": TEXT}, "resources")),
    (16, record({"resources": TEXT, "limit": _LIMIT}, "resources")),
    (0, record({"resources": TEXT}, "resources")),
)
