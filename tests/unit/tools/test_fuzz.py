"""The fuzz finds what it is for: an input that raises, one that takes too long, one whose outcome may not be."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import msgspec
import pytest

from bus.rabbitmq import frames
from bus.wire import Codec
from compute_sim.journal import Journal
from placement_worker.rest import bodies
from tests.fuzz import __main__ as fuzz
from tests.fuzz.doors import DOORS

INPUTS = range(60)


class Broken:
    """A door that fails at some numbers."""

    def make(self, rng: random.Random) -> int:
        return rng.randrange(10)

    def take(self, given: int) -> None:
        if given == 3:
            raise KeyError("three")
        if given == 4:
            until = time.thread_time() + 2 * fuzz.LIMIT_S
            while time.thread_time() < until:
                pass


@pytest.mark.parametrize("name", DOORS)
def test_each_door_takes_what_is_invented_for_it(name: str) -> None:
    result = fuzz.tried(name, DOORS[name](), 1, INPUTS, math.inf)
    assert result["inputs"] == len(INPUTS)
    assert [defect for defect in result["defects"] if "ms of processor time" not in defect["wrong"]] == []


def test_what_raises_and_what_takes_too_long_is_found_and_found_again_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.02)
    result = fuzz.tried("x", Broken(), 1, range(40), math.inf)
    wrongs = {defect["wrong"].partition(":")[0] for defect in result["defects"]}
    assert "KeyError" in wrongs and any("ms of processor time" in wrong for wrong in wrongs)
    number = next(defect["number"] for defect in result["defects"] if "KeyError" in defect["wrong"])
    assert fuzz.tried("x", Broken(), 1, range(number, number + 1), math.inf)["defects"]
    assert not fuzz.summed(1, {"x": result})["passed"]
    assert not fuzz.summed(1, {})["passed"]


def _believing(journal: Journal[Any], line: bytes) -> object:
    """A journal without checksums."""
    try:
        return journal._decode(line.rpartition(b"\t")[0])
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "planted"),
    [
        ("journals", Journal, "_row", _believing),
        ("rest", bodies.Body, "parse", lambda body, raw: body._decode(raw)),
        ("amqp", Codec, "read", lambda codec, delivery, _: [msgspec.json.decode(delivery.body)]),
        ("amqp", frames, "cut", lambda text: text[:255]),
    ],
    ids=["no checksum", "a body is trusted", "a delivery is trusted", "a property is cut by characters"],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: object, attribute: str, planted: object
) -> None:
    monkeypatch.setattr(owner, attribute, planted)
    assert fuzz.tried(name, DOORS[name](), 1, range(1500), math.inf)["defects"]
