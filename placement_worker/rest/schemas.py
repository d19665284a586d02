"""The JSON schemas of bodies and query strings, by microversion. Their errors have the texts of Placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bus.contracts.base import MAX_AMOUNT

Schema = dict[str, Any]

UUID_KEY = "^[0-9a-fA-F-]{36}$"
NAME = "^[A-Z0-9_]+$"
CUSTOM_NAME = "^CUSTOM_[A-Z0-9_]+$"
NUMBER_SUFFIX = "[1-9][0-9]*"
WORD_SUFFIX = "[a-zA-Z0-9_-]{1,64}"
MAX_RATIO = 3.40282e38  # the largest value of a single-precision column

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
UUID: Schema = {"type": "string", "format": "uuid"}
OWNER: Schema = {"type": "string", "minLength": 1, "maxLength": 255}
TRAIT: Schema = {"type": "string", "minLength": 1, "maxLength": 255}


def record(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these properties, some of them required, and no others."""
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    schema["additionalProperties"] = False
    return schema


def mapping(pattern: str, value: Schema, *, at_least: int = 0, closed: bool = True) -> Schema:
    """Return the schema of an object whose keys match the pattern."""
    schema: Schema = {"type": "object", "patternProperties": {pattern: value}}
    if at_least:
        schema["minProperties"] = at_least
    if closed:
        schema["additionalProperties"] = False
    return schema


def _whole(minimum: int) -> Schema:
    return {"type": "integer", "maximum": MAX_AMOUNT, "minimum": minimum}


# --- providers

_NAME_OF_PROVIDER: Schema = {"type": "string", "maxLength": 200}
_PARENT: Schema = {"anyOf": [UUID, {"type": "null"}]}
POST_PROVIDER = record({"name": _NAME_OF_PROVIDER, "uuid": UUID}, "name")
POST_PROVIDER_14 = record({"name": _NAME_OF_PROVIDER, "uuid": UUID, "parent_provider_uuid": _PARENT}, "name")
PUT_PROVIDER = record({"name": _NAME_OF_PROVIDER}, "name")
PUT_PROVIDER_14 = record({"name": _NAME_OF_PROVIDER, "parent_provider_uuid": _PARENT}, "name")

_LIST = {"name": TEXT, "uuid": UUID}
LIST_PROVIDERS = (
    (18, record({**_LIST, "member_of": TEXT, "resources": TEXT, "in_tree": UUID, "required": TEXT})),
    (14, record({**_LIST, "member_of": TEXT, "resources": TEXT, "in_tree": UUID})),
    (4, record({**_LIST, "member_of": TEXT, "resources": TEXT})),
    (3, record({**_LIST, "member_of": TEXT})),
    (0, record(_LIST)),
)

# --- inventories

_INVENTORY = {
    "resource_provider_generation": INTEGER,
    "total": _whole(1),
    "reserved": _whole(0),
    "min_unit": _whole(1),
    "max_unit": _whole(1),
    "step_size": _whole(1),
    "allocation_ratio": {"type": "number", "maximum": MAX_RATIO},
}
PUT_INVENTORY = record(_INVENTORY, "total", "resource_provider_generation")
POST_INVENTORY = record(
    {**_INVENTORY, "resource_class": {"type": "string", "pattern": NAME}}, "total", "resource_class"
)
PUT_INVENTORIES = record(
    {
        "resource_provider_generation": INTEGER,
        "inventories": mapping(NAME, record(_INVENTORY, "total"), closed=False),
    },
    "resource_provider_generation",
    "inventories",
)

# --- aggregates, traits, classes

AGGREGATES: Schema = {"type": "array", "items": UUID, "uniqueItems": True}
AGGREGATES_19 = record(
    {"aggregates": AGGREGATES, "resource_provider_generation": INTEGER}, "aggregates", "resource_provider_generation"
)
PROVIDER_TRAITS = record(
    {"traits": {"type": "array", "items": TRAIT}, "resource_provider_generation": INTEGER},
    "traits",
    "resource_provider_generation",
)
LIST_TRAITS = record({"name": TEXT, "associated": TEXT})
RESOURCE_CLASS = record({"name": {"type": "string", "pattern": CUSTOM_NAME, "maxLength": 255}}, "name")

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

# --- allocations

_RESOURCES = mapping(NAME, {"type": "integer", "minimum": 1}, at_least=1)
_ALLOCATION_LIST: Schema = {
    "type": "array",
    "minItems": 1,
    "items": record(
        {"resource_provider": record({"uuid": UUID}, "uuid"), "resources": _RESOURCES},
        "resource_provider",
        "resources",
    ),
}
_OF_PROVIDER = record({"generation": INTEGER, "resources": _RESOURCES}, "resources")
_OWNERS = {"project_id": OWNER, "user_id": OWNER}
_ANY_ALLOCATIONS = {"allocations": mapping(UUID_KEY, _OF_PROVIDER)}
_GENERATION = {"consumer_generation": {"type": ["integer", "null"]}}
_MAPPINGS = {
    "mappings": mapping(WORD_SUFFIX, {"type": "array", "minItems": 1, "items": UUID}, at_least=1, closed=False)
}
_TYPE = {"consumer_type": {"type": "string", "pattern": NAME, "minLength": 1, "maxLength": 255}}

ALLOCATIONS_0 = record({"allocations": _ALLOCATION_LIST}, "allocations")
ALLOCATIONS_8 = record({"allocations": _ALLOCATION_LIST, **_OWNERS}, "allocations", "project_id", "user_id")
ALLOCATIONS_12 = record(
    {"allocations": mapping(UUID_KEY, _OF_PROVIDER, at_least=1), **_OWNERS}, "allocations", "project_id", "user_id"
)
ALLOCATIONS_13 = record({**_ANY_ALLOCATIONS, **_OWNERS}, "allocations", "project_id", "user_id")
ALLOCATIONS_28 = record(
    {**_ANY_ALLOCATIONS, **_OWNERS, **_GENERATION}, "allocations", "project_id", "user_id", "consumer_generation"
)
ALLOCATIONS_34 = record(
    {**_ANY_ALLOCATIONS, **_OWNERS, **_GENERATION, **_MAPPINGS},
    "allocations",
    "project_id",
    "user_id",
    "consumer_generation",
)
ALLOCATIONS_38 = record(
    {**_ANY_ALLOCATIONS, **_OWNERS, **_GENERATION, **_MAPPINGS, **_TYPE},
    "allocations",
    "project_id",
    "user_id",
    "consumer_generation",
    "consumer_type",
)


def many(allocations: Schema, *, at_least: int = 1) -> Schema:
    """Return the schema of POST /allocations: an object with allocations for each consumer."""
    return mapping(UUID_KEY, allocations, at_least=at_least)


def reshape(allocations: Schema) -> Schema:
    """Return the schema of POST /reshaper."""
    return record(
        {
            "inventories": mapping(UUID_KEY, PUT_INVENTORIES, at_least=1),
            "allocations": many(allocations, at_least=0),
        },
        "inventories",
        "allocations",
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
