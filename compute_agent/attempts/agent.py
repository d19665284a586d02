"""The compute service itself: takes commands, has its driver carry them out, and reports each attempt's result."""

# A command is recorded (`Records`) before its message is acknowledged, so an accepted build survives the service: the
# next start finishes it. The jobs on one instance on one host form a chain and run one at a time (`jobs`); a Destroy
# cancels the build before it. Answers that change no record (to a late or repeated command) may be lost with the
# process, because a requester that still waits repeats its request.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.actions import ChangeMachine, MachineChanged
from bus.contracts.base import MAX_REASON
from bus.contracts.cell import Destroy, Spawn
from bus.contracts.placement import OTHER_SERVICE
from bus.tracing.tracer import work_for
from compute_agent import metrics
from compute_agent.attempts.destroys import Destroys
from compute_agent.attempts.jobs import Chain, Jobs
from compute_agent.attempts.machine_changes import MachineChanges
from compute_agent.attempts.results import Results
from compute_agent.driver import Build, BuildAbort, BuildFault, Driver, DriverUnavailable, Machine, NotOwned
from compute_agent.hosts.scan import MachineScanner, is_of_attempt
from compute_agent.records.attempt import (
    AttemptPhase,
    HostAttempt,
    SpawnAction,
    built,
    failed,
    lost,
    on_spawn,
)
from compute_agent.records.records import CheckRow, HostAttemptRow, Key, Records

log = structlog.get_logger()


class Limits(Struct, frozen=True, kw_only=True):
    """The bounds of one service's work, as in ComputeConfig."""

    per_host: int
    builds: int
    accepted: int
    build_s: float


class Agent:
    """One service over one driver. send: queues an answer. on_failures: called with a host whose build failed. started:
    no build or change begins before it is set. owner_of: the other service that a host is (None: it is this one's).
    """

    # Before `started` is set (None: it is set), the command that ends a build may still be in the queue. A host that is
    # another service's takes no builds.

    def __init__(
        self,
        *,
        service: str,
        driver: Driver,
        records: Records,
        scanner: MachineScanner,
        jobs: Jobs,
        results: Results,
        destroys: Destroys,
        send: Callable[[MachineChanged], None],
        clock: Clock,
        limits: Limits,
        on_failures: Callable[[str], None] = lambda _: None,
        on_accepted: Callable[[Spawn], None] = lambda _: None,
        started: asyncio.Event | None = None,
        owner_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._driver = driver
        self._records = records
        self._scanner = scanner
        self._jobs = jobs
        self._results = results
        self._destroys = destroys
        self._clock = clock
        self._limits = limits
        self._on_failures = on_failures
        self._on_accepted = on_accepted
        self._started = started or is_set()
        self._owner_of = owner_of
        self._changes = MachineChanges(
            service=service,
            driver=driver,
            records=records,
            jobs=jobs,
            send=send,
            clock=clock,
            started=self._started,
        )
        self._accepted = 0
        self._slots = asyncio.Semaphore(limits.builds)
        self._host_slots: dict[str, asyncio.Semaphore] = {}
        self._actions = {action: metrics.COMMANDS.labels(service, action.value) for action in SpawnAction}
        self._build_s = metrics.BUILD_S.labels(service)
        metrics.ACCEPTED.labels(service).set_function(lambda: self._accepted)

    # --- commands

    def handle(self, commands: Sequence[Spawn | Destroy | ChangeMachine]) -> None:
        """Decide these commands in order and start their work. They are recorded when this method returns."""
        rows: list[HostAttemptRow | CheckRow] = []
        for command in commands:
            row: HostAttemptRow | CheckRow | None
            match command:
                case Spawn():
                    row = self._on_spawn(command)
                case Destroy():
                    row = self._destroys.handle(command)
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

    # --- builds

    def _start_build(self, key: Key, command: Spawn, *, clear: int) -> Chain:
        chain = self._jobs.without_build(key)
        chain.clearing = clear > 0
        self._accepted += 1
        chain.build = self._jobs.start(key, chain, self._build(key, chain, command, clear))
        chain.build.add_done_callback(self._build_over)
        return chain

    def _build_over(self, _: asyncio.Task[None]) -> None:
        self._accepted -= 1

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
                await self._destroys.clear(key, clear, command.database_id)
                chain.clearing = False
                self._results.send_cleared(key, chain)
                self._destroys.settle(
                    key
                )  # the build that follows may take long, and the host may be offered meanwhile
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

    def _record_build_outcome(self, host: str, *, works: bool) -> None:
        count = 0 if works else self._records.failed_builds(host) + 1
        if self._records.record_failed_builds(host, count):
            self._on_failures(host)

    # --- start

    async def resume(self) -> None:
        """Read the machines of the hosts, and continue work that the last run of this service left unfinished or
        unreported.
        """
        # A machine without a record is reported by its tag and gets no record, because the conductor decides about it.
        await self._scanner.load_hosts()
        listed = await self._driver.list()
        found = {(m.host_uuid, m.instance_uuid): m for machines in listed.values() for m in machines}
        for key, entry in self._records.entries():
            self._resume(key, entry, found.pop(key, None), seen=key[0] in listed)
        self._destroys.resume_owed()
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
            last_ended = max(entry.max_ended_attempt, entry.attempt)
            self._records.put(
                key,
                HostAttempt(
                    entry.attempt, AttemptPhase.DESTROYING, max_ended_attempt=last_ended, database_id=entry.database_id
                ),
            )
            self._destroys.start(key, last_ended, entry.database_id)
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


def is_set() -> asyncio.Event:
    """An event that has happened."""
    event = asyncio.Event()
    event.set()
    return event
