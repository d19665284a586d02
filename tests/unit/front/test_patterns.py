"""The accepted texts are given in words: no user reads a regular expression of msgspec's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import inspect

from berth.settings import Settings
from bus.contracts.catalogue import MESSAGES
from bus.contracts.objects import CellBus
from bus.contracts.patterns import OTHER, matching, reason_of
from scheduler_worker.domain.objects import BODIES

ROOT = Path(__file__).parents[3]
OURS = ("berth", "bus", "cell_conductor", "compute_sim", "ironic_sync", "placement_worker", "scheduler_worker")
# Bodies of Placement's REST API are refused in the real Placement's words, which have its patterns.
PLACEMENTS_WORDS = {"placement_worker/rest/bodies.py"}
DECODING = {"ValidationError", "DecodeError", "MsgspecError"}


def patterns(found: Any) -> Iterator[str]:
    """Every pattern in a tree of msgspec's descriptions of types."""
    seen: dict[int, None] = {}
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = None
        if isinstance(one, list | tuple):
            waiting.extend(one)
        elif isinstance(one, inspect.StrType) and one.pattern is not None:
            yield one.pattern
        elif isinstance(one, inspect.Type | inspect.Field):
            waiting.extend(getattr(one, name) for name in one.__struct_fields__)


def test_every_pattern_of_messages_objects_and_settings_is_given_in_words() -> None:
    kinds = [*(row.message for row in MESSAGES), *BODIES.values(), Settings]
    found = {one for kind in kinds for one in patterns(inspect.type_info(kind))}
    assert len(found) > 10
    for pattern in found:
        words = reason_of(ValueError(f"Expected `str` matching regex {pattern!r} - at `$.x`"))
        assert words.startswith("Expected ") and OTHER not in words and "regex" not in words, pattern
        assert words.endswith(" - at `$.x`")


def test_a_file_name_that_is_a_path_is_refused_in_words() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"url_file": "../../etc/passwd"}, CellBus)
    assert reason_of(raised.value).startswith("Expected the name of a file alone, without a directory")
    assert reason_of(raised.value).endswith(" - at `$.url_file`")


@pytest.mark.parametrize("pattern", ["^a'b$", '^a"b$', "^a'\"b$", r"^a\"'\\b$"])
def test_a_pattern_with_quotes_is_found(pattern: str) -> None:
    kind = Annotated[str, matching(pattern, "an a and a b")]
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"k": "x"}, dict[str, kind])  # type: ignore[valid-type]
    assert reason_of(raised.value) == "Expected an a and a b - at `$[...]`"


def test_an_unknown_pattern_is_not_shown_either() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert("x", Annotated[str, msgspec.Meta(pattern="^unknown$")])
    assert reason_of(raised.value) == f"Expected {OTHER}"


def raw_uses(handler: ast.ExceptHandler) -> Iterator[int]:
    """The lines that use the exception otherwise than in reason_of, type or as the cause of another."""
    allowed = {
        id(one)
        for node in ast.walk(handler)
        for one in (
            [node.cause]
            if isinstance(node, ast.Raise)
            else node.args
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("reason_of", "type")
            else []
        )
    }
    for node in ast.walk(handler):
        if isinstance(node, ast.Name) and node.id == handler.name and id(node) not in allowed:
            yield node.lineno


def test_no_handler_shows_what_msgspec_printed() -> None:
    wrong = []
    for path in sorted(path for package in OURS for path in (ROOT / package).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())) if name not in PLACEMENTS_WORDS else ():
            if isinstance(node, ast.ExceptHandler) and node.type is not None and node.name is not None:
                caught = set(re.findall(r"\w+", ast.unparse(node.type)))
                wrong += [f"{name}:{line}" for line in raw_uses(node) if caught & DECODING]
    assert wrong == [], "use reason_of of bus/contracts/patterns.py"
