"""Changes machines in place: start, stop, hand over, resize, rebuild, snapshot."""

# One at a time for one instance on one host, in the chain that its builds and destructions go through. Of the changes
# of one attempt, one with a higher number takes the place of the one before, wherever that stands; one with a lower
# number is late, one with the same is a copy, and both are dropped. One for another attempt than that on record is
# refused. The number is on record before the message is acknowledged. A change that was in progress when its service
# died is not resumed: that it is unknown whether it has taken place is its answer, and the conductor repeats its
# command, under a higher number.

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.actions import MACHINE_ABSENT, ChangeKind, ChangeMachine, MachineChanged
from bus.contracts.base import MAX_REASON
from bus.tracing.tracer import work_for
from compute_agent import metrics
from compute_agent.attempts.jobs import Chain, Jobs
from compute_agent.driver import (
    Build,
    BuildFault,
    ChangeFault,
    ChangeOrder,
    Driver,
    DriverUnavailable,
    HandOverRefused,
    NotOwned,
)
from compute_agent.records.attempt import AttemptPhase, HostAttempt
from compute_agent.records.records import HostAttemptRow, Key, Records


class MachineChanges:
    """The changes of one service's machines. send: queues an answer to be published, without waiting. started: no
    change begins before it is set.
    """

    def __init__(
        self,
        *,
        service: str,
        driver: Driver,
        records: Records,
        jobs: Jobs,
        send: Callable[[MachineChanged], None],
        clock: Clock,
        started: asyncio.Event,
    ) -> None:
        self._service = service
        self._driver = driver
        self._records = records
        self._jobs = jobs
        self._send = send
        self._clock = clock
        self._started = started

    def handle(self, command: ChangeMachine, *, is_host: bool) -> HostAttemptRow | None:
        """Start the work of the command. Returns the entry to record before the command is acknowledged."""
        key = (command.host_uuid, command.spec.instance_uuid)
        if not is_host:
            self._answer(command, done=False, code="host.unknown", reason="this service has no such host")
            return None
        if command.change is ChangeKind.CHECK:
            # A check changes nothing, so it need not wait for other jobs.
            self._jobs.start(key, Chain(), self._check(command))
            return None
        entry = self._records.get(key)
        if entry is not None and entry.attempt == command.attempt and command.change_number <= entry.change_number:
            metrics.COMMANDS.labels(self._service, "stale").inc()
            return None
        row = None
        if entry is not None:
            if not _is_its_machine(entry, command):  # a late copy: what goes on here is for another attempt
                self._refuse(command, entry)
                return None
            row = self._records.note(
                key, replace(entry, change_number=command.change_number, changing=command.change), None
            )
        chain = self._jobs.without_build(key)
        chain.build = self._jobs.start(key, chain, self._change(key, chain, command))
        return row

    def answer_unfinished(self, key: Key, entry: HostAttempt) -> None:
        """Answer a change that the last run of this service left without an answer."""
        assert entry.changing is not None
        self._send(
            MachineChanged(
                instance_uuid=key[1],
                attempt=entry.attempt,
                change_number=entry.change_number,
                host_uuid=key[0],
                service=self._service,
                change=entry.changing,
                done=False,
                code="service.restarted",
                reason="the service was restarted meanwhile",
            )
        )

    async def _check(self, command: ChangeMachine) -> None:
        build = Build(
            command.host_uuid, command.spec, command.attempt, dict(command.allocations), command.database_id, None
        )
        try:
            async with asyncio.timeout(command.timeout_s):
                await self._driver.check(build)
        except BuildFault as fault:
            self._answer(command, done=False, code=fault.code, reason=fault.reason)
        except NotOwned as fault:
            self._answer(command, done=False, code="host.machine_conflict", reason=str(fault))
        except DriverUnavailable as fault:
            self._answer(command, done=False, code=fault.code, reason=str(fault))
        except TimeoutError:
            self._answer(command, done=False, code="check.timeout", reason="the driver did not answer in time")
        else:
            self._answer(command, done=True)

    async def _change(self, key: Key, chain: Chain, command: ChangeMachine) -> None:
        await self._started.wait()
        async with chain.lock:
            if not await self._is_here(key, command):
                return
            change = ChangeOrder(
                kind=command.change,
                host_uuid=command.host_uuid,
                spec=command.spec,
                attempt=command.attempt,
                change_number=command.change_number,
                allocations=dict(command.allocations),
                database_id=command.database_id,
                to_host=command.to_host,
                rescue_password=command.rescue_password,
            )
            try:
                with work_for(f"change {command.change.value}", key[1], host=key[0], attempt=command.attempt):
                    async with asyncio.timeout(command.timeout_s):
                        await self._check_source(change)
                        ended = await self._driver.change(change)
            except HandOverRefused as fault:
                self._answer(command, code=fault.code, reason=fault.reason, runs=fault.runs, refusal=fault)
            except ChangeFault as fault:
                self._answer(command, done=False, code=fault.code, reason=fault.reason, runs=fault.runs)
            except NotOwned as fault:
                self._answer(command, done=False, code="change.not_owned", reason=str(fault), runs=False)
            except DriverUnavailable as fault:
                self._answer(command, done=False, code=fault.code, reason=str(fault))
            except TimeoutError:
                self._answer(command, done=False, code="change.timeout", reason="the driver did not answer in time")
            else:
                if command.change in (ChangeKind.RESIZE, ChangeKind.REBUILD):
                    self._records.keep_spec(key, command.attempt, command.spec, command.allocations)
                self._answer(command, done=True, runs=ended.runs, image=ended.image)

    async def _check_source(self, change: ChangeOrder) -> None:
        """The source's side of the check before a live migration, where the driver has one. Raises HandOverRefused."""
        check = getattr(self._driver, "check_source", None)
        if change.kind is ChangeKind.HAND_OVER_LIVE and check is not None:
            await check(change)

    async def _is_here(self, key: Key, command: ChangeMachine) -> bool:
        """Whether the machine belongs to this attempt; without a record the machine's own tag decides."""
        entry = self._records.get(key)
        if entry is None:
            listed = await self._listed(key)
            if listed is None:
                self._answer(command, done=False, code="driver.unavailable", reason="its host could not be looked at")
                return False
            if listed != (command.attempt, command.database_id):
                self._answer(command, done=False, code=MACHINE_ABSENT, reason="no such machine is here", runs=False)
                return False
            entry = HostAttempt(command.attempt, AttemptPhase.RUNNING, database_id=command.database_id, reported=True)
            self._records.put(key, replace(entry, change_number=command.change_number, changing=command.change))
            return True
        if _is_its_machine(entry, command):
            return (
                entry.change_number == command.change_number
            )  # otherwise a later change is on record, whose answer counts
        self._refuse(command, entry)
        return False

    def _refuse(self, command: ChangeMachine, entry: HostAttempt) -> None:
        """Answer a command about another machine than the one on record."""
        code, reason = "machine.other", "another attempt's machine is here"
        if entry.phase is not AttemptPhase.RUNNING:
            code, reason = MACHINE_ABSENT, "no such machine runs here"
        self._answer(command, code=code, reason=reason, runs=False)

    async def _listed(self, key: Key) -> tuple[int | None, str | None] | None:
        """Return the tag of the machine; None when its host was not listed."""
        try:
            listed = await self._driver.list((key[0],))
        except DriverUnavailable:
            return None
        machines = listed.get(key[0])
        if machines is None:
            return None
        found = next((one for one in machines if one.instance_uuid == key[1] and one.built), None)
        return (None, None) if found is None else (found.attempt, found.database_id)

    def _answer(
        self,
        command: ChangeMachine,
        *,
        done: bool = False,
        code: str = "",
        reason: str = "",
        runs: bool | None = None,
        image: str = "",
        refusal: HandOverRefused | None = None,
    ) -> None:
        metrics.COMMANDS.labels(self._service, f"{command.change.value} {'done' if done else 'failed'}").inc()
        self._send(
            MachineChanged(
                instance_uuid=command.spec.instance_uuid,
                attempt=command.attempt,
                change_number=command.change_number,
                host_uuid=command.host_uuid,
                service=self._service,
                change=command.change,
                done=done,
                runs=runs,
                image=image,
                code=code,
                reason=reason[:MAX_REASON],
                refused=refusal is not None,
                retry_other_host=refusal is not None and refusal.retry_other_host,
            )
        )


def _is_its_machine(entry: HostAttempt, command: ChangeMachine) -> bool:
    """Whether the machine on record is the one that the command means."""
    is_attempt = entry.phase is AttemptPhase.RUNNING and entry.attempt == command.attempt > entry.max_ended_attempt
    return is_attempt and entry.database_id == command.database_id
