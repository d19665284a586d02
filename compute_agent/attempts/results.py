"""The answers of a service: one result for every attempt that ended, was refused, or is gone."""

from __future__ import annotations

from collections.abc import Callable

from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.cell import ComputeOutcome, ComputeResult
from compute_agent import metrics
from compute_agent.attempts.jobs import Chain
from compute_agent.records.attempt import HostAttempt, answer
from compute_agent.records.records import Key, Records


class Results:
    """One service's results. send: queues one to be published, without waiting."""

    def __init__(self, service: str, send: Callable[[ComputeResult], None], clock: Clock, records: Records) -> None:
        self._service = service
        self._records = records
        self._send = send
        self._clock = clock
        self._ended = {outcome: metrics.BUILDS.labels(service, outcome.value) for outcome in ComputeOutcome}

    def send_result(self, key: Key, entry: HostAttempt, started_at: float = 0.0) -> None:
        """Report how the attempt on record ended."""
        result = answer(entry)
        assert result is not None, entry
        self._report(key, result[0], result[1], entry.code, entry.reason, final=entry.final, started_at=started_at)

    def send_refusal(self, key: Key, attempt: int, code: str, reason: str) -> None:
        """Report that the attempt is not taken on this host, and why."""
        self._report(key, attempt, ComputeOutcome.FAILED, code, reason[:MAX_REASON])

    def send_destroyed(self, key: Key, attempt: int) -> None:
        """Report that nothing is left of the attempt."""
        self._report(key, attempt, ComputeOutcome.DESTROYED)

    def send_cleared(self, key: Key, chain: Chain) -> None:
        """Report that nothing is left of all attempts that this chain owes an answer for."""
        for attempt in sorted(chain.answers):
            self.send_destroyed(key, attempt)
        chain.answers.clear()

    def _report(
        self,
        key: Key,
        attempt: int,
        outcome: ComputeOutcome,
        code: str = "",
        reason: str = "",
        *,
        final: bool = False,
        started_at: float = 0.0,
    ) -> None:
        self._ended[outcome].inc()
        self._send(
            ComputeResult(
                instance_uuid=key[1],
                attempt=attempt,
                host_uuid=key[0],
                service=self._service,
                outcome=outcome,
                code=code,
                reason=reason,
                at=self._clock.time(),
                final=final,
                started_at=started_at,
                epoch=self._records.epoch,
                scan=self._records.scans,
            )
        )
