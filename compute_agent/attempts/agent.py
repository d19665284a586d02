"""The compute service itself: takes commands, has its driver carry them out, and reports each attempt's result."""

# A command is recorded (`Records`) before its message is acknowledged, so an accepted build survives the service: the
# next start finishes it. The jobs on one instance on one host form a chain and run one at a time (`jobs`); a Destroy
# cancels the build before it. Answers that change no record (to a late or repeated command) may be lost with the
# process, because a requester that still waits repeats its request.

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from msgspec import Struct, structs
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.actions import ChangeMachine, MachineChanged
from bus.contracts.base import MAX_REASON
from bus.contracts.cell import ComputeResult, Destroy, Spawn
from bus.contracts.placement import OTHER_SERVICE
from bus.retrying import Retrying, RetryPolicy
from bus.tracing.tracer import work_for
from compute_agent import metrics
from compute_agent.attempts.jobs import Chain, Jobs
from compute_agent.attempts.machine_changes import MachineChanges
from compute_agent.attempts.results import Results
from compute_agent.driver import (
    Build,
    BuildAbort,
    BuildFault,
    Driver,
    DriverUnavailable,
    Machine,
    MachineProtected,
    NotOwned,
)
from compute_agent.hosts.scan import MachineScanner, is_of_attempt
from compute_agent.records.attempt import (
    AttemptPhase,
    DestroyAction,
    HostAttempt,
    SpawnAction,
    built,
    destroyed,
    failed,
    lost,
    on_destroy,
    on_destroy_if_incomplete,
    on_spawn,
)
from compute_agent.records.records import HostAttemptRow, Key, Records

log = structlog.get_logger()

# A destruction is repeated as often as the service's limits allow, a look at the machine before it until it succeeds.
DESTROY = RetryPolicy(first_s=0.2, longest_s=30.0, least=0.0)
DESTROY_RETRY_S = 60.0  # the interval at which failed destructions are tried again
MAX_DESTROY_RETRIES = (
    1_000  # the number of them that are tried at a time, because the driver may have just been unavailable
)


class Limits(Struct, frozen=True, kw_only=True):
    """The bounds of one service's work, as in ComputeConfig."""

    per_host: int
    builds: int
    accepted: int
    build_s: float
    destroy_attempts: int


class Agent:
    """One service over one driver. send: queues a result. on_failures: called with a host whose build failed. started:
    no build or change begins before it is set. owner_of: the other service that a host is (None: it is this one's).
    """

    # Before `started` is set (None: it is set), the command that ends a build may still be in the queue. A host that is
    # another service's takes no builds. on_destroys_done: called when nothing of an instance is left to be destroyed on
    # a host.

    def __init__(
        self,
        *,
        service: str,
        driver: Driver,
        records: Records,
        scanner: MachineScanner,
        send: Callable[[ComputeResult | MachineChanged], None],
        clock: Clock,
        rng: random.Random,
        limits: Limits,
        on_failures: Callable[[str], None] = lambda _: None,
        on_accepted: Callable[[Spawn], None] = lambda _: None,
        on_destroys_done: Callable[[Key], None] = lambda _: None,
        started: asyncio.Event | None = None,
        owner_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._driver = driver
        self._records = records
        self._scanner = scanner
        self._results = Results(service, send, clock, records)
        self._clock = clock
        self._limits = limits
        self._destroying = Retrying(structs.replace(DESTROY, attempts=limits.destroy_attempts), clock, rng)
        self._looking = Retrying(DESTROY, clock, rng)
        self._on_failures = on_failures
        self._on_accepted = on_accepted
        self._on_destroys_done = on_destroys_done
        self._started = started or is_set()
        self._owner_of = owner_of
        self._jobs = Jobs(self._settle)
        self._changes = MachineChanges(
            service=service,
            driver=driver,
            records=records,
            jobs=self._jobs,
            send=send,
            clock=clock,
            started=self._started,
        )
        self._failed_destroys: dict[Key, None] = {}  # the failed destructions, oldest first
        self._accepted = 0
        self._slots = asyncio.Semaphore(limits.builds)
        self._host_slots: dict[str, asyncio.Semaphore] = {}
        self._actions = {
            action: metrics.COMMANDS.labels(service, action.value) for action in (*SpawnAction, *DestroyAction)
        }
        self._build_s = metrics.BUILD_S.labels(service)
        metrics.ACCEPTED.labels(service).set_function(lambda: self._accepted)

    # --- commands

    def handle(self, commands: Sequence[Spawn | Destroy | ChangeMachine]) -> None:
        """Decide these commands in order and start their work. They are recorded when this method returns."""
        rows: list[HostAttemptRow] = []
        for command in commands:
            match command:
                case Spawn():
                    row = self._on_spawn(command)
                case Destroy():
                    row = self._on_destroy(command)
                case ChangeMachine():
                    row = self._changes.handle(command, is_host=command.host_uuid in self._scanner.hosts)
            if row is not None:
                rows.append(row)
        self._records.write(rows)

    def _on_spawn(self, command: Spawn) -> HostAttemptRow | None:
        key = (command.host_uuid, command.spec.instance_uuid)
        action, entry = on_spawn(self._records.get(key), command.attempt, command.database_id, command.spec.project_id)
        self._actions[action].inc()
        if action is SpawnAction.UNDERWAY:
            return None
        if action is SpawnAction.REPEAT:
            self._results.send_result(key, entry)
            return None
        if action in (SpawnAction.ALREADY_ENDED, SpawnAction.SUPERSEDED):
            self._results.send_refusal(
                key, command.attempt, f"spawn.{action.value}", "this attempt has ended on this host"
            )
            return None
        if action is SpawnAction.NOT_OWNED:
            self._results.send_refusal(
                key, command.attempt, "spawn.not_owned", "another database's machine has this uuid here"
            )
            return None
        if command.host_uuid not in self._scanner.hosts:
            self._results.send_refusal(key, command.attempt, "host.unknown", "this service has no such host")
            return None
        if (owner := self._owner_of(command.host_uuid)) is not None:
            self._results.send_refusal(key, command.attempt, OTHER_SERVICE, f"the host is the service {owner}'s")
            return None
        if self._accepted >= self._limits.accepted:
            self._results.send_refusal(key, command.attempt, "service.busy", "too many builds are waiting here")
            return None
        row = self._records.note(key, entry, command)
        self._records.accepted += 1
        self._start_build(key, command, clear=entry.max_ended_attempt if action is SpawnAction.REPLACE else 0)
        self._on_accepted(command)
        return row

    def _on_destroy(self, command: Destroy) -> HostAttemptRow | None:
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
                looking = self._jobs.without_build(key)
                self._jobs.start(key, looking, self._verify_then_destroy(key, looking, command, known))
                return None
        action, entry = on_destroy(known, command.attempt, command.database_id)
        self._actions[action].inc()
        chain = self._jobs.chain(key)
        if action is DestroyAction.NOT_OWNED:
            self._refuse_destroy(key, command.attempt, "the machine here was built for another database")
            return None
        if action is DestroyAction.DESTROY or (action is DestroyAction.JOIN and chain is None):
            # A command that joins a failed destruction starts it again.
            self._start_destroy(key, command.attempt, entry.database_id)
        elif chain is not None and (action is DestroyAction.JOIN or chain.clearing):
            chain.answers.add(command.attempt)
        else:
            self._results.send_destroyed(key, command.attempt)
        return None if entry == known else self._records.note(key, entry, self._records.spawn_of(key))

    # --- builds and destructions

    def _start_build(self, key: Key, command: Spawn, *, clear: int) -> Chain:
        chain = self._jobs.without_build(key)
        chain.clearing = clear > 0
        self._accepted += 1
        chain.build = self._jobs.start(key, chain, self._build(key, chain, command, clear))
        chain.build.add_done_callback(self._build_over)
        return chain

    def _build_over(self, _: asyncio.Task[None]) -> None:
        self._accepted -= 1

    def _start_destroy(self, key: Key, attempt: int, database_id: str | None) -> None:
        chain = self._jobs.without_build(key)
        chain.answers.add(attempt)
        self._jobs.start(key, chain, self._destroy_leftovers(key, chain, attempt, database_id))

    async def _verify_then_destroy(self, key: Key, chain: Chain, command: Destroy, known: HostAttempt | None) -> None:
        """Handle a Destroy of what is not on record: the machine's own tag shows whether the attempt is complete,
        which is then recorded.
        """
        # A recovery commands about a leftover only once.
        async with chain.lock:
            listed = await self._looking.call(
                partial(self._driver.list, (key[0],)),
                lambda error: isinstance(error, DriverUnavailable),
                on_failure=lambda fault, _: log.warning(
                    "destroy.not_checked", instance=key[1], cause=key[1], host=key[0], reason=str(fault)
                ),
            )
            entry = HostAttempt(command.attempt, AttemptPhase.RUNNING, database_id=command.database_id)
            if known is not None:
                entry = replace(entry, max_ended_attempt=known.max_ended_attempt, project=known.project)
            if self._records.get(key) is not known:  # another command has arrived meanwhile
                self.handle((command,))
            elif any(m.instance_uuid == key[1] and m.built and is_of_attempt(entry, m) for m in listed.get(key[0], ())):
                self._records.put(key, entry)
                self._results.send_result(key, entry)
            else:
                self.handle((replace(command, keep_if_complete=False),))

    def _refuse_destroy(self, key: Key, attempt: int, reason: str) -> None:
        log.warning("destroy.not_owned", instance=key[1], cause=key[1], host=key[0], attempt=attempt, reason=reason)
        message = f"{reason}; nothing was changed: an operator who wants it gone removes it on the host itself"
        self._results.send_refusal(key, attempt, NotOwned.code, message)

    async def _build(self, key: Key, chain: Chain, command: Spawn, clear: int) -> None:
        await self._started.wait()
        started, started_at = self._clock.monotonic(), self._clock.time()
        slot = self._host_slots.get(key[0])
        if slot is None:
            slot = self._host_slots[key[0]] = asyncio.Semaphore(self._limits.per_host)
        # The host's slot is taken first, so that builds that wait for a stuck host do not use up the service's slots.
        with work_for("build", key[1], host=key[0], attempt=command.attempt):
            async with chain.lock, slot, self._slots:
                entry = await self._attempt(key, chain, command, clear)
        if entry is None:  # it was destroyed or replaced while it ended; that job answers
            return
        self._records.put(key, entry)
        self._build_s.observe(self._clock.monotonic() - started)
        if not entry.final:
            self._record_build_outcome(key[0], works=entry.phase is AttemptPhase.RUNNING)
        self._results.send_result(key, entry, started_at)

    async def _attempt(self, key: Key, chain: Chain, command: Spawn, clear: int) -> HostAttempt | None:
        """Have the driver build. Returns the result as the entry to record."""
        number = command.attempt
        try:
            if clear:
                await self._clear(key, clear, command.database_id)
                chain.clearing = False
                self._results.send_cleared(key, chain)
                self._settle(key)  # the build that follows may take long, and the host may be offered meanwhile
            async with asyncio.timeout(self._limits.build_s):
                warning = await self._driver.spawn(
                    Build(key[0], command.spec, number, command.allocations, command.database_id, command.origin)
                )
        except BuildFault as fault:
            code, reason, final = fault.code, fault.reason, isinstance(fault, BuildAbort)
        except DriverUnavailable as fault:
            code, reason, final = fault.code, str(fault), False
        except NotOwned as fault:
            code, reason, final = "host.machine_conflict", str(fault), False
        except TimeoutError:
            code, reason, final = "build.timeout", f"not built within {self._limits.build_s:g} s", False
        else:
            return built(self._records.get(key), number, (warning or "")[:MAX_REASON])
        return failed(self._records.get(key), number, code, reason[:MAX_REASON], final=final)

    async def _destroy_leftovers(self, key: Key, chain: Chain, attempt: int, database_id: str | None) -> None:
        async with chain.lock:
            try:
                await self._clear(key, attempt, database_id)
            except NotOwned as fault:
                # This destruction is not repeated by itself, because only an operator can change the reason; the next
                # Destroy checks again.
                for owed in sorted(chain.answers):
                    self._refuse_destroy(key, owed, str(fault))
                chain.answers.clear()
                return
            except DriverUnavailable as fault:
                # Only certain results are reported. The entry stays `destroying`: a repeated Destroy, `retry_destroys`,
                # or the next start of the service tries again.
                code = "destroy.protected" if isinstance(fault, MachineProtected) else "destroy.failed"
                log.error(code, instance=key[1], cause=key[1], host=key[0], reason=str(fault))
                self._results.send_refusal(key, attempt, code, str(fault))
                chain.answers.clear()
                self._failed_destroys[key] = None
                return
            entry = destroyed(self._records.get(key))
            if entry is not None:
                self._records.put(key, entry)
            self._results.send_cleared(key, chain)

    async def retry_destroys(self) -> None:
        """Repeat the destructions that have failed, until cancelled."""
        # No conductor sends a second command for an instance that has failed, and the remains of its machine would keep
        # its host.
        while True:
            await self._clock.sleep(DESTROY_RETRY_S)
            self.resume_destroys()

    def resume_destroys(self) -> None:
        """Start the oldest failed destructions, unless their records have changed meanwhile."""
        for key in list(itertools.islice(self._failed_destroys, MAX_DESTROY_RETRIES)):
            del self._failed_destroys[key]
            if self._jobs.chain(key) is not None:
                continue  # what is under way ends it
            entry = self._records.get(key)
            if entry is not None and entry.phase is AttemptPhase.DESTROYING:
                self._start_destroy(key, entry.max_ended_attempt, entry.database_id)
            else:
                self._settle(key)

    def pending_destroys(self) -> list[Key]:
        """The (host, instance) pairs of machines that are being destroyed, and of those whose destruction has failed so
        far.
        """
        found = dict.fromkeys(self._failed_destroys)
        for key, chain in self._jobs.chains():
            entry = self._records.get(key)
            if chain.clearing or entry is None or entry.phase is AttemptPhase.DESTROYING:
                found[key] = None
        return list(found)

    def is_busy(self, key: Key) -> bool:
        """Whether a machine is being changed or destroyed, or its destruction has failed so far; a build is neither."""
        chain, entry = self._jobs.chain(key), self._records.get(key)
        if chain is None:
            return key in self._failed_destroys or (entry is not None and entry.phase is AttemptPhase.DESTROYING)
        return chain.clearing or entry is None or entry.phase is not AttemptPhase.BUILDING

    def _settle(self, key: Key) -> None:
        if key not in self._failed_destroys:
            self._on_destroys_done(key)

    async def _clear(self, key: Key, attempt: int, database_id: str | None) -> None:
        """Destroy what is left up to this attempt, and up to the limit that commands raise meanwhile: they are answered
        with it.
        """
        cleared = -1
        while cleared < (attempt := max(attempt, self._max_ended_attempt(key))):
            cleared = attempt
            await self._destroying.call(
                partial(self._driver.destroy, key[0], key[1], attempt, database_id),
                lambda error: isinstance(error, DriverUnavailable) and not isinstance(error, MachineProtected),
            )
        self._failed_destroys.pop(key, None)

    def _max_ended_attempt(self, key: Key) -> int:
        entry = self._records.get(key)
        return 0 if entry is None else entry.max_ended_attempt

    def _record_build_outcome(self, host: str, *, works: bool) -> None:
        count = 0 if works else self._records.failed_builds(host) + 1
        if self._records.record_failed_builds(host, count):
            self._on_failures(host)

    # --- start, stop

    async def resume(self) -> None:
        """Read the machines of the hosts, and continue work that the last run of this service left unfinished or
        unreported.
        """
        # A machine without a record is reported by its tag and gets no record, because the conductor decides about it.
        await self._scanner.load_hosts()
        listed = await self._driver.list()
        self._scanner.on_scanned(listed)
        found = {(m.host_uuid, m.instance_uuid): m for machines in listed.values() for m in machines}
        for key, entry in self._records.entries():
            self._resume(key, entry, found.pop(key, None), seen=key[0] in listed)
        for key, machine in found.items():
            log.warning(
                "machine.unrecorded", instance=key[1], cause=key[1], host=key[0], database_id=machine.database_id or ""
            )

    def _resume(self, key: Key, entry: HostAttempt, machine: Machine | None, *, seen: bool) -> None:
        if entry.phase is AttemptPhase.BUILDING and machine and machine.built and is_of_attempt(entry, machine):
            entry = replace(entry, phase=AttemptPhase.RUNNING)
            self._records.put(key, entry)
        command = self._records.spawn_of(key)
        # A machine of an ended attempt: its destruction was recorded, but did not take place.
        survived_destroy = (
            machine is not None
            and machine.attempt is not None
            and machine.attempt <= entry.max_ended_attempt
            and machine.database_id == entry.database_id
            and not machine.tag_only
        )
        if entry.phase is AttemptPhase.DESTROYING or (survived_destroy and entry.phase is not AttemptPhase.BUILDING):
            fence = max(entry.max_ended_attempt, entry.attempt)
            self._records.put(
                key,
                HostAttempt(
                    entry.attempt, AttemptPhase.DESTROYING, max_ended_attempt=fence, database_id=entry.database_id
                ),
            )
            self._start_destroy(key, fence, entry.database_id)
            return
        if entry.phase is AttemptPhase.BUILDING and command is not None and key[0] in self._scanner.hosts:
            chain = self._start_build(key, command, clear=entry.max_ended_attempt)
            if entry.max_ended_attempt:
                chain.answers.add(entry.max_ended_attempt)
        elif entry.phase is AttemptPhase.BUILDING:
            ended = failed(entry, entry.attempt, "service.restarted", "its host is not this service's any more")
            assert ended is not None
            self._records.put(key, ended)
            self._results.send_result(key, ended)
        elif entry.phase is AttemptPhase.RUNNING and machine is None and seen:
            self._records.put(key, lost(entry))
        elif not entry.reported:
            self._results.send_result(key, entry)
        if entry.phase is AttemptPhase.RUNNING and entry.changing is not None:
            self._changes.answer_unfinished(key, entry)

    async def watch(self) -> None:
        """Raise the first fault of any job."""
        await self._jobs.watch()

    async def stop(self, grace_s: float) -> None:
        """Let builds end within the grace time (seconds), and leave the rest on record for the next start."""
        await self._jobs.stop(grace_s)


def is_set() -> asyncio.Event:
    """An event that has happened."""
    event = asyncio.Event()
    event.set()
    return event
