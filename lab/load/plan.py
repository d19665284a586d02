"""The definition of a load: which builds, of which flavors, when each is meant to leave, and which
are deleted again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from bus.clock import new_uuid
from bus.contracts.build import BuildRequest

# Drawn ahead of their time, so many at once.
DRAWN_AT_ONCE = 1_000
PLAIN = "m1."  # flavors of plain virtual machines
# The size of a load when none is given.
DEFAULT_BOOTS = 1_000
# The most that one load may be, and the largest number in a ramp.
MAX_BOOTS = 10_000_000
MAX_IN_RAMP = 1e9

Mode = Literal["open", "ramp", "trace", "closed", "burst"]


class PlanError(ValueError):
    """A plan that cannot be: `code` is stable (load.ramp, load.mix, ...)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Arrival(Struct, frozen=True):
    """One build of a plan. at_s: after the start. lifetime_s: deleted so long after it, once active; None: not."""

    at_s: float
    flavor: str
    lifetime_s: float | None = None


class LoadPlan(Struct, frozen=True, kw_only=True):
    """The load to fire. mix: {flavor: weight}. The first of these that is set decides how:

    trace: arrivals as they were once. phases: open loop, ((rate a second, seconds), ...) one after the other.
    ramp_s: open loop, the rate going evenly from ramp_from_per_s to rate_per_s. rate_per_s: open loop at a constant
    rate. concurrency: closed loop, builds in flight at once. Else all at once.

    Latency is counted from the intended time. churn: the share of builds that is deleted as soon as it is active.
    retry_for_s: how long a request that the broker refuses (its queue is full) is offered again; None: in an open loop
    not at all, it counts as refused by backpressure; else as long as the timeout.
    timeout_s: a build that was sent and has not ended within it is lost.
    """

    boots: int
    mix: Mapping[str, float]
    project_id: str = "load"
    concurrency: int = 0
    rate_per_s: float = 0.0
    ramp_from_per_s: float = 0.0
    ramp_s: float = 0.0
    trace: tuple[Arrival, ...] = ()
    phases: tuple[tuple[float, float], ...] = ()
    churn: float = 0.0
    retry_for_s: float | None = None
    timeout_s: float = 300.0
    name_prefix: str = "load"

    @property
    def mode(self) -> Mode:
        """How the arrivals come."""
        if self.trace:
            return "trace"
        if self.phases:
            return "open"
        if self.ramp_s > 0:
            return "ramp"
        if self.rate_per_s > 0:
            return "open"
        return "closed" if self.concurrency > 0 else "burst"

    @property
    def offers_again_s(self) -> float:
        """How long a refused request is offered again."""
        if self.retry_for_s is not None:
            return self.retry_for_s
        return self.timeout_s if self.mode in {"closed", "burst"} else 0.0


def draw_requests(plan: LoadPlan, rng: random.Random) -> list[BuildRequest]:
    """All requests of a plan at once, flavors drawn by weight from `rng`."""
    return [request for _, request in draw(plan, rng)]


def draw(
    plan: LoadPlan, rng: random.Random, chance: random.Random | None = None
) -> Iterator[tuple[Arrival, BuildRequest]]:
    """The builds of a plan in the order in which they are meant to leave. chance: draws their uuids (else `rng`)."""
    for number, arrival in enumerate(arrivals(plan, rng)):
        yield (
            arrival,
            BuildRequest(
                instance_uuid=new_uuid(chance or rng),
                flavor=arrival.flavor,
                project_id=plan.project_id,
                user_id="load",
                name=f"{plan.name_prefix}-{number}",
            ),
        )


def arrivals(plan: LoadPlan, rng: random.Random) -> Iterator[Arrival]:
    """When each build is meant to leave, and as what."""
    if plan.trace:
        yield from plan.trace
        return
    flavors = list(plan.mix)
    weights = [plan.mix[flavor] for flavor in flavors]
    for first in range(0, plan.boots, DRAWN_AT_ONCE):
        count = min(DRAWN_AT_ONCE, plan.boots - first)
        for number, flavor in enumerate(rng.choices(flavors, weights=weights, k=count), first):
            dies = plan.churn > 0 and rng.random() < plan.churn
            yield Arrival(due_s(plan, number), flavor, 0.0 if dies else None)


def due_s(plan: LoadPlan, number: int) -> float:
    """When build `number` (from 0) of an open loop is meant to leave; 0 when it does not matter."""
    if plan.phases:
        return _due_in_phases(plan.phases, number)
    if plan.mode == "open":
        return number / plan.rate_per_s
    if plan.mode != "ramp":
        return 0.0
    # The area under a line: number = from * t + steepness * t^2 / 2, solved for t without dividing by steepness.
    steepness = (plan.rate_per_s - plan.ramp_from_per_s) / plan.ramp_s
    root = math.sqrt(max(plan.ramp_from_per_s**2 + 2 * steepness * number, 0.0))
    return 2 * number / (plan.ramp_from_per_s + root) if number else 0.0


def _due_in_phases(phases: Sequence[tuple[float, float]], number: int) -> float:
    """The same where the rate changes from phase to phase; the last one goes on."""
    begun_s, before = 0.0, 0
    for rate, seconds in phases[:-1]:
        if number < before + round(rate * seconds):
            return begun_s + (number - before) / rate
        begun_s, before = begun_s + seconds, before + round(rate * seconds)
    return begun_s + (number - before) / phases[-1][0]


def phase_boots(phases: Sequence[tuple[float, float]]) -> int:
    """How many builds phases are."""
    return sum(round(rate * seconds) for rate, seconds in phases)


def ramp_boots(from_per_s: float, to_per_s: float, seconds: float) -> int:
    """How many builds a ramp is. Raises PlanError."""
    boots = max(1, round((from_per_s + to_per_s) / 2 * seconds))
    if boots > MAX_BOOTS:
        raise PlanError("load.ramp", f"that ramp is {boots} builds, and {MAX_BOOTS} are the most")
    return boots


def parse_ramp(text: str) -> tuple[float, float, float]:
    """`A..B/SECONDS` as (from, to, seconds). Raises PlanError."""
    rates, slash, seconds = text.partition("/")
    low, dots, high = rates.partition("..")
    try:
        values = (float(low), float(high), float(seconds))
    except ValueError:
        values = (-1.0, -1.0, -1.0)
    from_per_s, to_per_s, length_s = values
    sound = slash and dots and all(0 <= value <= MAX_IN_RAMP for value in values) and length_s > 0
    if not sound or from_per_s + to_per_s <= 0:
        raise PlanError("load.ramp", f"a ramp is FROM..TO/SECONDS, builds a second, as in 100..4000/60: not {text!r}")
    return values


def parse_mix(text: str, flavors: Sequence[str] = ()) -> dict[str, float]:
    """`name=weight,...` as a dictionary. Raises PlanError.

    A short name means the flavor of `flavors` that ends in it, a plain one first (`small`: `m1.small`, `gold`:
    `bm.gold`), and `metal` every bare-metal one (`bm.`...) in equal parts.
    """
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            share = float(weight or 1)
        except ValueError:
            raise PlanError("load.mix", f"not a weight: {weight!r} in {text!r}") from None
        named = _flavors_named(name, flavors)
        for flavor in named:
            mix[flavor] = mix.get(flavor, 0.0) + share / len(named)
    sound = all(math.isfinite(weight) and weight >= 0 for weight in mix.values())
    if not all(mix) or not sound or not 0 < sum(mix.values()) < math.inf:
        raise PlanError("load.mix", f"a mix is flavor=weight,..., with weights above 0: {text!r}")
    return mix


def _flavors_named(name: str, flavors: Sequence[str]) -> list[str]:
    """The flavors that a name in a mix means; what is not known is left to the scheduler to refuse."""
    for known in (name, PLAIN + name):
        if known in flavors:
            return [known]
    metal = [flavor for flavor in flavors if is_metal(flavor)]
    if name == "metal" and metal:
        return metal
    alike = [flavor for flavor in flavors if flavor.rpartition(".")[2] == name]
    if len(alike) > 1:
        raise PlanError("load.mix", f"{name!r} can be {' or '.join(alike)}: name one")
    return alike or [name]


def is_metal(flavor: str) -> bool:
    """Whether a flavor is a whole node, by the name that berth's own flavors have."""
    return flavor.startswith("bm.")
