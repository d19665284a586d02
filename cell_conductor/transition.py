"""The effects of one transaction on its instances: whether its messages may be published before it is on disk, and the
counts for metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import structlog
from msgspec import Struct

from bus.contracts.build import BuildEvent
from bus.contracts.cell import Spawn
from bus.contracts.moves import MoveEvent
from bus.persistence.outbox import OutboxMessage

from . import metrics
from .domain.fences import Loss
from .domain.instance import Instance, State
from .domain.table import question_of

log = structlog.get_logger(__name__)


class Transition(Struct, frozen=True):
    """The changes that one transaction makes to its instances, the messages that it sends, and the lines to log after
    the commit.
    """

    instances: Mapping[str, Instance]
    outgoing: list[OutboxMessage]
    steps: Counter[tuple[State, str]]
    ended: list[Instance]
    losses: Sequence[Loss] = ()


def may_be_redone(recorded: Transition, known: Mapping[str, Instance]) -> bool:
    """Whether a message may be published before the commit is on disk: the message that caused it is acknowledged after
    that.

    A database that loses the commit in a crash receives the message again, and announces the same again; see
    docs/decisions/0011-what-waits-for-the-disk.md. Commands to hosts and requests to placement are on disk first; so is
    the end of a request: if it were lost, a refused request could be carried out after all, and a finished one could
    fail (seed 116). So is a departure: another cell has the instance from then on. So is what a host has answered when
    its attempt's deadline had passed: forgotten, the attempt would be given up before the message comes again, and a
    machine be destroyed that its client was informed of.

    known: the instances as they were before.
    """
    if any(one.queried and recorded.instances.get(uuid) is not one for uuid, one in known.items()):
        return False
    if any(question_of(instance) is not None for instance in recorded.instances.values()):
        return False
    outgoing = [addressed.message for addressed in recorded.outgoing]
    if any(isinstance(one, MoveEvent) and (one.terminal or one.departure is not None) for one in outgoing):
        return False
    return all(isinstance(message, BuildEvent | MoveEvent) for message in outgoing)


def observe_steps(
    steps: Counter[tuple[State, str]], ended: Sequence[Instance], outgoing: Sequence[OutboxMessage]
) -> None:
    """Count a batch, and log each instance that came to an end."""
    for (state, event), times in steps.items():
        metrics.STEPS.labels(state, event).inc(times)
    for instance in ended:
        metrics.ENDED.labels(instance.state).inc()
        write = log.info if instance.state is State.FAILED else log.debug
        write(
            "instance.ended",
            instance=instance.uuid,
            state=instance.state,
            attempt=instance.attempt,
            code=instance.code,
            reason=instance.reason,
            cause=instance.cause,
        )
    metrics.ALTERNATES.inc(sum(isinstance(a.message, Spawn) and a.message.attempt > 1 for a in outgoing))
    metrics.stages([a.message for a in outgoing])
