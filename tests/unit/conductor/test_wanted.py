"""What a record proves to be over, state by state, against a table of values from before the table of desires.

`wanted_by_state.json` is an oracle, not a derived file: it was written once by the hand-kept sets of states that were
there before, and shares no code with what it checks. Its 33 states have become 19, of which three say what follows:
`NAMES` has what each of them was. An instance that leaves for another cell gives its source up as a confirmed move
does; five of the frozen states were of a machine that was kept for another cell, and are gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from msgspec import Struct

from bus.contracts.cell import UNKNOWN_ATTEMPT
from cell_conductor.domain.instance import Phase, State
from cell_conductor.domain.proof import is_over

FROZEN: dict[str, str] = json.loads((Path(__file__).parent / "data" / "wanted_by_state.json").read_text())
HERE, SOURCE, ELSEWHERE = "here", "source", "elsewhere"
# The current attempt is 3, its move's source has 2, and 5 was the last that was given out.
ATTEMPTS = (UNKNOWN_ATTEMPT, 1, 2, 3, 4, 6)
IN_PLACE, NO_SOURCE = "in place", "none"


WAITS: dict[Phase, str] = {
    (State.CLAIMING, State.BUILDING): "reclaiming",
    (State.CLAIMING, State.DELETED): "abandoning",
    (State.CLAIMING, State.PREPARING): "claiming",
    (State.CLAIMING, State.ACTIVE): "adopting",
    (State.RELEASING, State.FAILED): "giving_up",
    (State.RELEASING, State.DELETED): "releasing",
    (State.RELEASING, State.OFFLOADED): "vacating",
    (State.RELEASING, State.ACTIVE): "releasing_source",
    (State.RELEASING, State.DEPARTED): "releasing_source",
    (State.DESTROYING, State.DELETED): "deleting",
    (State.DESTROYING, State.ACTIVE): "confirming",
    (State.DESTROYING, State.REVERTING): "undoing",
    (State.DESTROYING, State.OFFLOADED): "offloading",
    (State.DESTROYING, State.DEPARTED): "confirming",
}
NAMES: dict[Phase, str] = {
    **WAITS,
    **{(state, None): state.value for state in State if state not in {waiting for waiting, _ in WAITS}},
}
PHASES = tuple(NAMES)


class Record(Struct, frozen=True, kw_only=True):
    """What the proof reads of a record."""

    phase: Phase
    source: str
    doubted: bool
    reused_from: int
    machine_exists: bool
    first_not_tried: bool
    uuid: str = "i"
    since: float = 0.0
    host_uuid: str | None = HERE
    attempt: int = 3
    last_attempt: int = 5

    @property
    def state(self) -> State:
        return self.phase[0]

    @property
    def source_host_uuid(self) -> str | None:
        return SOURCE if self.source == SOURCE else None

    @property
    def source_attempt(self) -> int:
        return 0 if self.source == NO_SOURCE else 2


def cases(phase: Phase) -> Iterator[tuple[Record, int, str]]:
    """(record, attempt, host) in the order of the frozen values."""
    booleans = (False, True)
    for source, doubted, reused, exists, untried in product(
        (NO_SOURCE, SOURCE, IN_PLACE), booleans, (0, 2, 4), booleans, booleans
    ):
        record = Record(
            phase=phase,
            source=source,
            doubted=doubted,
            reused_from=reused,
            machine_exists=exists,
            first_not_tried=untried,
        )
        for attempt, host in product(ATTEMPTS, (HERE, SOURCE, ELSEWHERE)):
            yield record, attempt, host


def values(phase: Phase) -> str:
    """Whether each case is over, as bits, in hexadecimal."""
    bits = "".join("1" if is_over(*case) else "0" for case in cases(phase))
    return f"{int(bits, 2):0{len(bits) // 4}x}"


def frozen_over(phase: Phase) -> list[bool]:
    """The frozen answers, in the order of `cases`."""
    frozen = FROZEN[NAMES[phase]]
    bits = f"{int(frozen, 16):b}"
    return [bit == "1" for bit in bits.zfill(len(frozen) * 4)]


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_over_has_not_changed(phase: Phase) -> None:
    wrong = [case for case, was in zip(cases(phase), frozen_over(phase), strict=True) if is_over(*case) is not was]
    assert not wrong, wrong[:3]


def test_every_state_is_frozen() -> None:
    kept = {"reassigning", "releasing_kept", "clearing", "leaving", "kept"}
    assert set(FROZEN) - kept == set(NAMES.values()) and len(FROZEN) == 33 and len(NAMES) == 30
    assert sum(map(sum, map(frozen_over, PHASES))) > 0
