"""The instance state machine: one table, total over states and events. It also draws docs/reference/states.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from bus.contracts.placement import Claim, ClaimOption, Release
from bus.faults import BrokenInvariant

from . import rules
from .events import (
    BuildAsked,
    Claimed,
    ClaimRefused,
    DeleteAsked,
    Destroyed,
    Event,
    HostMissing,
    HostRuns,
    Released,
    ServiceLost,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from .instance import Instance, State
from .rules import Step, Timeouts


class IllegalStep(BrokenInvariant):
    """An event that cannot happen in this state did. The reason carries the instance's history."""

    code = "instance.illegal_step"


class Rule(Struct, frozen=True):
    """What an event does in a state: the function, and every state it may lead to besides staying."""

    apply: Callable[[Instance, Any, Timeouts], Step]
    to: tuple[State, ...] = ()

    @property
    def name(self) -> str:
        """The function's name, as the table shows it."""
        return self.apply.__name__


IGNORE = Rule(rules.ignore)
DESTROY_ORPHAN = Rule(rules.destroy_orphan)
CONFIRM_RUNNING = Rule(rules.confirm_running)
REPEAT_DESTROY = Rule(rules.repeat_destroy)
AGAIN = Rule(rules.repeat_question)

# None: cannot happen. Events from outside (asked, hosts) are legal everywhere; TimedOut comes only from a row that has
# a deadline, and Claimed, ClaimRefused and Released only after the state that asks for them was once entered.
TABLE: Mapping[State, Mapping[type[Event], Rule | None]] = {
    State.ABSENT: {
        BuildAsked: Rule(rules.start_build, (State.BUILDING, State.RECLAIMING)),
        DeleteAsked: Rule(rules.tombstone, (State.TOMBSTONE,)),
        Spawned: IGNORE,  # no record proves nothing: the database may be new, another's, or older than the machine
        SpawnFailed: IGNORE,
        TimedOut: None,
        Claimed: None,
        ClaimRefused: None,
        Destroyed: IGNORE,
        Released: None,
        HostRuns: IGNORE,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
    State.TOMBSTONE: {
        BuildAsked: Rule(rules.refuse_build, (State.RELEASING,)),
        DeleteAsked: IGNORE,
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: IGNORE,
        TimedOut: None,
        Claimed: None,
        ClaimRefused: None,
        Destroyed: IGNORE,
        Released: None,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
    State.BUILDING: {
        BuildAsked: IGNORE,
        DeleteAsked: Rule(rules.destroy, (State.DELETING,)),
        Spawned: Rule(rules.come_up, (State.ACTIVE,)),
        SpawnFailed: Rule(rules.fail_over, (State.RECLAIMING, State.GIVING_UP)),
        TimedOut: Rule(rules.time_out, (State.RECLAIMING, State.GIVING_UP)),
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: Rule(rules.fail_over_destroyed, (State.RECLAIMING, State.GIVING_UP)),
        Released: None,
        HostRuns: Rule(rules.come_up, (State.ACTIVE,)),
        HostMissing: IGNORE,  # it may not have started yet: the deadline decides
        ServiceLost: Rule(rules.leave_service, (State.RECLAIMING,)),
    },
    State.RECLAIMING: {
        BuildAsked: IGNORE,
        DeleteAsked: Rule(rules.abandon, (State.ABANDONING,)),
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: IGNORE,
        TimedOut: AGAIN,
        Claimed: Rule(rules.move_on, (State.BUILDING,)),
        ClaimRefused: Rule(rules.run_out, (State.GIVING_UP, State.FAILED)),
        Destroyed: IGNORE,
        Released: None,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
    State.ABANDONING: {
        BuildAsked: IGNORE,
        DeleteAsked: IGNORE,
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: IGNORE,
        TimedOut: AGAIN,
        Claimed: Rule(rules.release_alternate, (State.RELEASING,)),
        ClaimRefused: Rule(rules.drop, (State.RELEASING, State.DELETED)),
        Destroyed: IGNORE,
        Released: None,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
    State.ACTIVE: {
        BuildAsked: IGNORE,
        DeleteAsked: Rule(rules.destroy, (State.DELETING,)),
        Spawned: CONFIRM_RUNNING,
        SpawnFailed: IGNORE,  # a host that corrects itself does so by reporting what it runs
        TimedOut: None,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,  # no order of ours: it is lost when a report, which the breaker judges, leaves it out
        Released: None,
        HostRuns: CONFIRM_RUNNING,
        HostMissing: Rule(rules.lose, (State.GIVING_UP,)),
        ServiceLost: IGNORE,  # its machines may run: only a person, or a fence, can say that they do not
    },
    State.GIVING_UP: {
        BuildAsked: IGNORE,
        DeleteAsked: Rule(rules.delete_instead, (State.RELEASING,)),
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: IGNORE,
        TimedOut: AGAIN,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,
        Released: Rule(rules.end_failed, (State.FAILED,)),
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
    State.FAILED: {
        BuildAsked: Rule(rules.restart_build, (State.BUILDING, State.RECLAIMING)),
        DeleteAsked: Rule(rules.end_deleted, (State.DELETED,)),
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: IGNORE,
        TimedOut: None,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,
        Released: IGNORE,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
    State.DELETING: {
        BuildAsked: IGNORE,
        DeleteAsked: IGNORE,
        Spawned: REPEAT_DESTROY,
        SpawnFailed: IGNORE,
        TimedOut: Rule(rules.destroy_again),
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: Rule(rules.release_destroyed, (State.RELEASING,)),
        Released: None,
        HostRuns: REPEAT_DESTROY,
        HostMissing: Rule(rules.release_destroyed, (State.RELEASING,)),
        ServiceLost: IGNORE,  # the order waits in its queue, and the allocation with it
    },
    State.RELEASING: {
        BuildAsked: IGNORE,
        DeleteAsked: IGNORE,
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: IGNORE,
        TimedOut: AGAIN,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,
        Released: Rule(rules.end_deleted, (State.DELETED,)),
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
    State.DELETED: {
        BuildAsked: IGNORE,
        DeleteAsked: IGNORE,
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: IGNORE,
        TimedOut: None,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,
        Released: IGNORE,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
    },
}


def step(instance: Instance, event: Event, timeouts: Timeouts) -> Step:
    """The instance after an event, and the commands that follow. Raises IllegalStep with the history."""
    rule = TABLE[instance.state][type(event)]
    if rule is None:
        raise IllegalStep(f"{type(event).__name__} while {instance.state}: {event!r} on {instance!r}")
    if isinstance(event, Claimed) and event.attempt > instance.attempt + (instance.state in MAY_HAVE_ASKED):
        # A claim that no record of ours has requested would leak: no worker would ever release it.
        raise IllegalStep(f"claim of attempt {event.attempt} while {instance.state}: {instance!r}")
    stepped = rule.apply(instance, event, timeouts)
    after = stepped.instance.state
    assert after is instance.state or after in rule.to, (rule.name, instance.state, after)
    return stepped


ASKS_A_CLAIM = frozenset({State.RECLAIMING, State.ABANDONING})
ASKS_A_RELEASE = frozenset({State.GIVING_UP, State.RELEASING})
# A request may be sent twice at once (a redelivered message, the sweep), answered "full", and then "claimed" because
# there is room meanwhile. What the first answer led to releases that very attempt: nothing leaks.
MAY_HAVE_ASKED = ASKS_A_CLAIM | ASKS_A_RELEASE | {State.FAILED, State.DELETED}


def wanted(instance: Instance) -> Claim | Release | None:
    """The request to placement that this state waits for. It follows from the record alone, so a
    crash at any moment leads to the very same question.
    """
    if instance.state in ASKS_A_CLAIM:
        assert instance.spec is not None
        return Claim(
            consumer=instance.uuid,
            attempt=instance.attempt + 1,
            consumer_generation=instance.consumer_generation,
            release_first=True,
            options=tuple(
                ClaimOption(
                    allocations=s.allocations, shapes=s.shapes, host=s.host_uuid if instance.server_group else None
                )
                for s in instance.alternates
            ),
            server_group=instance.server_group,
            limits=instance.limits,
            project_id=instance.spec.project_id,
            user_id=instance.spec.user_id,
        )
    if instance.state in ASKS_A_RELEASE:
        # One attempt further than the last: a claim that was requested and never answered may still be on its way
        # (a placement worker that waits for its database), and must find itself fenced.
        return Release(consumer=instance.uuid, attempt=instance.attempt + 1)
    return None
