"""What one transaction of a conductor records and sends, what of it may be published before it is on disk, and what
is counted of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import structlog
from msgspec import Struct

from bus.contracts.actions import ActionEvent
from bus.contracts.build import BuildEvent
from bus.contracts.cell import Spawn
from bus.persistence.outbox import OutboxMessage
from cell_conductor import metrics
from cell_conductor.awaited_request import AwaitedRequest
from cell_conductor.state.instance import Instance, State

log = structlog.get_logger(__name__)


class RecordedChanges(Struct, frozen=True):
    """The changes that one transaction makes to its instances, the messages that it sends, and the lines to log after
    it.
    """

    instances: Mapping[str, Instance]
    requests: Mapping[str, AwaitedRequest]  # the requests that its instances wait for
    outgoing: list[OutboxMessage]
    steps: Counter[tuple[State, str]]
    ended: list[Instance]
    leaves_stale: bool = False  # whether a machine on a fenced host has become stale by it


def is_repeatable(recorded: RecordedChanges, known: Mapping[str, Instance]) -> bool:
    """Whether a message may be published before the commit is on disk: the message that caused it is acknowledged after
    that. known: the instances as they were before.
    """
    # A database that loses the commit in a crash receives the message again, and publishes the same again (decision
    # 0011). On disk first are: commands to hosts and requests to placement; the end of a request (if it were lost, a
    # refused request could be carried out after all, and a finished one could fail); a transfer (another cell has the
    # instance from then on); and what a host has answered when its attempt's deadline had passed (lost, the attempt
    # would be abandoned before the message comes again, and a machine be destroyed that its client was informed of).
    if any(one.queried and recorded.instances.get(uuid) is not one for uuid, one in known.items()):
        return False
    if recorded.requests:
        return False
    outgoing = [addressed.message for addressed in recorded.outgoing]
    if any(isinstance(one, ActionEvent) and (one.terminal or one.transfer is not None) for one in outgoing):
        return False
    return all(isinstance(message, BuildEvent | ActionEvent) for message in outgoing)


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
