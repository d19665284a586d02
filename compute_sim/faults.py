"""Planned faults: what goes wrong with which attempt, decided by the seed and the attempt alone."""

# The same seed gives the same fate to the same attempt, whatever else happens and in whichever order, and again after a
# restart.

from __future__ import annotations

import struct
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.service.settings import Rate, Seconds


class Faults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The faults of the simulated fleet, and how often they occur. A rate is a share of the attempts."""

    delay_min_s: Seconds = 0.0
    """Least seconds that a build takes."""
    delay_max_s: Seconds = 0.0
    """The most seconds that a build takes."""
    destroy_delay_s: Seconds = 0.0
    """Seconds that a destruction takes."""
    fail_rate: Rate = 0.0
    """Of builds: fail on this host; another host may succeed."""
    fail_hosts: tuple[str, ...] = ()
    """Names of hosts on which every build fails."""
    abort_rate: Rate = 0.0
    """Of builds: fail in a way that no host can repair."""
    leftover_rate: Rate = 0.0
    """Of failed builds: leave a half-built machine behind."""
    hang_rate: Rate = 0.0
    """Of builds: never answer."""
    late_rate: Rate = 0.0
    """Of builds: succeed, but their result is sent `late_s` afterwards."""
    late_s: Seconds = 60.0
    """Seconds that such a result is late, whatever is commanded meanwhile."""
    duplicate_rate: Rate = 0.0
    """Of builds: send their result twice."""
    die_rate: Rate = 0.0
    """Of builds: the whole service ends when it accepts the build."""
    die_after: Annotated[int, Bound(ge=1)] | None = None
    """The service ends once, when it has accepted this many builds since its first start. Not set: never."""
    change_min_s: Seconds = 0.0
    """Least seconds that a change of a machine (stop, resize, migrate, ...) takes."""
    change_max_s: Seconds = 0.0
    """The most seconds that a change takes."""
    copy_mb_s: Annotated[float, Bound(ge=0)] = 0.0
    """MiB of a machine's memory that a migration copies per second. 0: at once."""
    change_fail_rate: Rate = 0.0
    """Of changes, and of checks of a destination: fail before anything was done."""
    change_break_rate: Rate = 0.0
    """Of changes: are done, and reported as failed."""
    change_hang_rate: Rate = 0.0
    """Of changes: never answer."""
    source_refuse_rate: Rate = 0.0
    """Of live migrations: refused by the source before they begin, whatever the destination."""
    source_refuse_host_rate: Rate = 0.0
    """Of live migrations: refused by the source before they begin, for this destination only."""


class PlannedEnding(StrEnum):
    """How a simulated build ends."""

    WORKS = "works"
    FAILS = "fails"
    ABORTS = "aborts"
    HANGS = "hangs"


class PlannedSourceAnswer(StrEnum):
    """Whether the source lets a machine go to a host. Refused are all hosts, or only this one."""

    PASSES = "passes"
    REFUSED = "refused"
    REFUSED_HERE = "refused-here"


class PlannedChange(Struct, frozen=True):
    """The fault of one change."""

    delay_s: float = 0.0
    fails: bool = False  # it fails before anything is done
    breaks: bool = False  # it fails after all is done
    hangs: bool = False  # it never answers


class AttemptPlan(Struct, frozen=True):
    """The fault of one attempt."""

    ending: PlannedEnding = PlannedEnding.WORKS
    delay_s: float = 0.0
    leftover: bool = False
    late_s: float = 0.0
    copies: int = 1
    dies: bool = False


FAULTLESS = AttemptPlan()  # nothing goes wrong, at once
NO_FAULTS = Faults()
_ROLLS = struct.Struct("<8I")
_FULL = 2.0**32


def plan_attempt(faults: Faults, seed: int, host: str, instance_uuid: str, attempt: int) -> AttemptPlan:
    """Decide one attempt's fate."""
    if faults == NO_FAULTS:
        return FAULTLESS
    digest = blake2b(f"{seed}/{host}/{instance_uuid}/{attempt}".encode(), digest_size=32).digest()
    ends, waits, leaves, lies, doubles, dies, _, _ = (roll / _FULL for roll in _ROLLS.unpack(digest))
    ending = _ending(faults, host, ends)
    return AttemptPlan(
        ending=ending,
        delay_s=faults.delay_min_s + waits * max(0.0, faults.delay_max_s - faults.delay_min_s),
        leftover=ending in (PlannedEnding.FAILS, PlannedEnding.ABORTS) and leaves < faults.leftover_rate,
        late_s=faults.late_s if ending is PlannedEnding.WORKS and lies < faults.late_rate else 0.0,
        copies=2 if doubles < faults.duplicate_rate else 1,
        dies=dies < faults.die_rate,
    )


def _ending(faults: Faults, host: str, roll: float) -> PlannedEnding:
    """One roll over the endings laid end to end, so that the rates add up and never overlap."""
    if host in faults.fail_hosts:
        return PlannedEnding.FAILS
    for rate, ending in (
        (faults.fail_rate, PlannedEnding.FAILS),
        (faults.abort_rate, PlannedEnding.ABORTS),
        (faults.hang_rate, PlannedEnding.HANGS),
    ):
        if roll < rate:
            return ending
        roll -= rate
    return PlannedEnding.WORKS


def plan_source_check(faults: Faults, seed: int, host: str, instance_uuid: str, to_host: str) -> PlannedSourceAnswer:
    """Decide whether a source lets a machine go to a host: always the same, and apart from all other plans."""
    if not faults.source_refuse_rate and not faults.source_refuse_host_rate:
        return PlannedSourceAnswer.PASSES
    for rate, about, answer in (
        (faults.source_refuse_rate, "", PlannedSourceAnswer.REFUSED),
        (faults.source_refuse_host_rate, to_host, PlannedSourceAnswer.REFUSED_HERE),
    ):
        digest = blake2b(f"{seed}/{host}/{instance_uuid}/source check {about}".encode(), digest_size=32).digest()
        if _ROLLS.unpack(digest)[0] / _FULL < rate:
            return answer
    return PlannedSourceAnswer.PASSES


def plan_change(faults: Faults, seed: int, host: str, instance_uuid: str, change_number: int) -> PlannedChange:
    """Decide how one change ends: by its change number, so that a repeated command may turn out otherwise."""
    if faults == NO_FAULTS:
        return PlannedChange()
    digest = blake2b(f"{seed}/{host}/{instance_uuid}/change {change_number}".encode(), digest_size=32).digest()
    ends, waits, *_ = (roll / _FULL for roll in _ROLLS.unpack(digest))
    fail, broken = faults.change_fail_rate, faults.change_fail_rate + faults.change_break_rate
    return PlannedChange(
        delay_s=faults.change_min_s + waits * max(0.0, faults.change_max_s - faults.change_min_s),
        fails=ends < fail,
        breaks=fail <= ends < broken,
        hangs=broken <= ends < broken + faults.change_hang_rate,
    )
