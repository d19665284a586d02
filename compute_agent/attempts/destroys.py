"""Destroys what is left of attempts on their hosts: as commanded, and again where it has failed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.cell import Destroy
from bus.retrying import Retrying, RetryPolicy
from compute_agent import metrics
from compute_agent.attempts.jobs import Chain, Jobs
from compute_agent.attempts.results import Results
from compute_agent.driver import Driver, DriverUnavailable, MachineProtected, NotOwned
from compute_agent.hosts.scan import is_of_attempt
from compute_agent.records.attempt import (
    AttemptPhase,
    DestroyAction,
    HostAttempt,
    destroyed,
    on_destroy,
    on_destroy_if_incomplete,
)
from compute_agent.records.records import CheckRow, HostAttemptRow, Key, Records

log = structlog.get_logger()

# A destruction is repeated as often as the service's limits allow, and so is a look before it.
DESTROY = RetryPolicy(first_s=0.2, longest_s=30.0, least=0.0)
DESTROY_RETRY_S = 60.0  # the interval at which failed destructions are tried again
# The number of them that are tried at a time, and of looks, because the driver may have just been unavailable.
MAX_RETRIES = 1_000


class Destroys:
    """The destructions of one service. max_calls: how often the driver is called before one has failed. on_done: called
    when nothing of an instance is left to be destroyed on a host.
    """

    def __init__(
        self,
        *,
        service: str,
        driver: Driver,
        records: Records,
        results: Results,
        jobs: Jobs,
        clock: Clock,
        rng: random.Random,
        max_calls: int,
        on_done: Callable[[Key], None] = lambda _: None,
    ) -> None:
        self._driver = driver
        self._records = records
        self._results = results
        self._jobs = jobs
        self._clock = clock
        self._destroying = Retrying(replace(DESTROY, max_calls=max_calls), clock, rng)
        self._on_done = on_done
        self._failed: dict[Key, None] = {}  # oldest first
        self._actions = {action: metrics.COMMANDS.labels(service, action.value) for action in DestroyAction}
        jobs.on_idle = self.settle

    def handle(self, command: Destroy) -> HostAttemptRow | CheckRow | None:
        """Start the work of the command. Returns the row to record before the command is acknowledged."""
        key = (command.host_uuid, command.instance_uuid)
        known = self._records.get(key)
        if command.keep_if_complete:
            check = on_destroy_if_incomplete(known, command.attempt, command.database_id)
            if check is not None:
                self._actions[check].inc()
            if check is DestroyAction.BUILT and known is not None:
                self._results.send_result(key, known)
                return None
            if check is DestroyAction.VERIFY:
                return self._start_check(key, command, known)
        action, entry = on_destroy(known, command.attempt, command.database_id)
        self._actions[action].inc()
        chain = self._jobs.chain(key)
        if action is DestroyAction.NOT_OWNED:
            self._refuse(key, command.attempt, "the machine here was built for another database")
            return None
        if action is DestroyAction.DESTROY or (action is DestroyAction.JOIN and chain is None):
            # A command that joins a failed destruction starts it again.
            self.start(key, command.attempt, entry.database_id)
        elif chain is not None and (action is DestroyAction.JOIN or chain.clearing):
            chain.answers.add(command.attempt)
        else:
            self._results.send_destroyed(key, command.attempt)
        return None if entry == known else self._records.note(key, entry, self._records.spawn_of(key))

    def start(self, key: Key, attempt: int, database_id: str | None) -> None:
        """Destroy what is left up to this attempt, and report it."""
        chain = self._jobs.without_build(key)
        chain.answers.add(attempt)
        self._jobs.start(key, chain, self._destroy_leftovers(key, chain, attempt, database_id))

    async def clear(self, key: Key, attempt: int, database_id: str | None) -> None:
        """Destroy what is left up to this attempt, and up to the limit that commands raise meanwhile: they are answered
        with it. Raises NotOwned, DriverUnavailable.
        """
        cleared = -1
        while cleared < (attempt := max(attempt, self._max_ended_attempt(key))):
            cleared = attempt
            await self._destroying.call(
                partial(self._driver.destroy, key[0], key[1], attempt, database_id),
                lambda error: isinstance(error, DriverUnavailable) and not isinstance(error, MachineProtected),
            )
        self._failed.pop(key, None)

    def settle(self, key: Key) -> None:
        """Nothing is under way there that is to be destroyed; unless that is owed, nothing is left of it."""
        if not self._is_owed(key):
            self._on_done(key)

    async def retry(self) -> None:
        """Repeat the destructions that have failed, and the looks, until cancelled."""
        # No conductor sends a second command for an instance that has failed, and the remains of its machine would keep
        # its host.
        while True:
            await self._clock.sleep(DESTROY_RETRY_S)
            self.resume_owed()

    def resume_owed(self) -> None:
        """Start the oldest of what is owed where nothing is under way, as far as the records still say so."""
        # As many of each kind: neither waits until the other has ended.
        idle = ([key for key in owed if self._jobs.chain(key) is None] for owed in (self._failed, self._records.checks))
        for key in dict.fromkeys(key for keys in idle for key in keys[:MAX_RETRIES]):
            self._failed.pop(key, None)
            entry = self._records.get(key)
            if entry is not None and entry.phase is AttemptPhase.DESTROYING:
                self.start(key, entry.max_ended_attempt, entry.database_id)
            for command in self._records.checks.get(key, ()):
                self._handle_again(command, self._records.note_check(command, is_due=False))
            if self._jobs.chain(key) is None:
                self.settle(key)

    def pending(self) -> list[Key]:
        """The (host, instance) pairs of machines that are being destroyed, and of those for which that is owed."""
        found = self._owed()
        for key, chain in self._jobs.chains():
            entry = self._records.get(key)
            if chain.clearing or entry is None or entry.phase is AttemptPhase.DESTROYING:
                found[key] = None
        return list(found)

    def is_busy(self, key: Key) -> bool:
        """Whether a machine is being changed or destroyed, or its destruction is owed; a build is neither."""
        chain, entry = self._jobs.chain(key), self._records.get(key)
        if self._is_owed(key) or (entry is not None and entry.phase is AttemptPhase.DESTROYING):
            return True
        return chain is not None and (chain.clearing or entry is None or entry.phase is not AttemptPhase.BUILDING)

    def _owed(self) -> dict[Key, None]:
        """Where a destruction has failed so far, or a host is yet to be looked at for one."""
        return dict.fromkeys((*self._failed, *self._records.checks))

    def _is_owed(self, key: Key) -> bool:
        return key in self._failed or key in self._records.checks

    def _start_check(self, key: Key, command: Destroy, known: HostAttempt | None) -> CheckRow | None:
        if command in self._records.checks.get(key, ()) and self._jobs.chain(key) is not None:
            return None
        chain = self._jobs.without_build(key)
        self._jobs.start(key, chain, self._verify_then_destroy(key, chain, command, known))
        return self._records.note_check(command, is_due=True)

    async def _verify_then_destroy(self, key: Key, chain: Chain, command: Destroy, known: HostAttempt | None) -> None:
        """Handle a Destroy of what is not on record: the machine's own tag shows whether the attempt is complete,
        which is then recorded.
        """
        async with chain.lock:
            try:
                listed = await self._destroying.call(
                    lambda: self._driver.list((key[0],)), lambda error: isinstance(error, DriverUnavailable)
                )
                if (machines := listed.get(key[0])) is None:  # that proves nothing, and no repeat within a pass does
                    raise DriverUnavailable("the driver does not list the host")
            except DriverUnavailable as fault:
                # It stays due: a recovery commands about a leftover only once.
                log.warning("destroy.not_checked", instance=key[1], cause=key[1], host=key[0], reason=str(fault))
                return
            looked = self._records.note_check(command, is_due=False)
            entry = HostAttempt(command.attempt, AttemptPhase.RUNNING, database_id=command.database_id)
            if known is not None:
                entry = replace(entry, max_ended_attempt=known.max_ended_attempt, project=known.project)
            if self._records.get(key) is not known:  # another command has arrived meanwhile
                self._handle_again(command, looked)
            elif any(m.instance_uuid == key[1] and m.built and is_of_attempt(entry, m) for m in machines):
                self._records.write([looked, self._records.note(key, entry)])
                self._results.send_result(key, entry)
            else:
                self._handle_again(replace(command, keep_if_complete=False), looked)

    def _handle_again(self, command: Destroy, *rows: CheckRow) -> None:
        row = self.handle(command)
        self._records.write(rows if row is None else [*rows, row])

    async def _destroy_leftovers(self, key: Key, chain: Chain, attempt: int, database_id: str | None) -> None:
        async with chain.lock:
            try:
                await self.clear(key, attempt, database_id)
            except NotOwned as fault:
                # This destruction is not repeated by itself, because only an operator can change the reason; the next
                # Destroy checks again.
                for owed in sorted(chain.answers):
                    self._refuse(key, owed, str(fault))
                chain.answers.clear()
                return
            except DriverUnavailable as fault:
                # Only certain results are reported. The entry stays `destroying`: a repeated Destroy, `retry`, or the
                # next start of the service tries again.
                code = "destroy.protected" if isinstance(fault, MachineProtected) else "destroy.failed"
                log.error(code, instance=key[1], cause=key[1], host=key[0], reason=str(fault))
                self._results.send_refusal(key, attempt, code, str(fault))
                chain.answers.clear()
                self._failed[key] = None
                return
            entry = destroyed(self._records.get(key))
            if entry is not None:
                self._records.put(key, entry)
            self._results.send_cleared(key, chain)

    def _refuse(self, key: Key, attempt: int, reason: str) -> None:
        log.warning("destroy.not_owned", instance=key[1], cause=key[1], host=key[0], attempt=attempt, reason=reason)
        message = f"{reason}; nothing was changed: an operator who wants it gone removes it on the host itself"
        self._results.send_refusal(key, attempt, NotOwned.code, message)

    def _max_ended_attempt(self, key: Key) -> int:
        entry = self._records.get(key)
        return 0 if entry is None else entry.max_ended_attempt
