"""`scripts/chaos`: load on real processes, faults at random, rest, and a judgement from the outside.

A private RabbitMQ (one virtual host a bus), a private PostgreSQL, every worker its own process behind TCP proxies.
Exit status 1 when anything was lost, doubled, leaked or overcommitted, an invariant is broken, or the load cut short.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from msgspec import Struct
from rich.console import Console

from berth.audit.facts import gather, rest
from berth.audit.invariants import Facts, check_invariants
from berth.config.site import process_name
from berth.up.servers import hosts_known
from bus.contracts.build import BuildEvent, BuildState
from bus.service.telemetry import configure_logging
from lab.chaos.action_load import ActionLoad
from lab.chaos.churn import Churn
from lab.chaos.deployment import Deployment, connections, deployment, left_in_queues, wait_registered
from lab.chaos.draining import Draining
from lab.chaos.faults import FaultInjector
from lab.chaos.plan import ChaosPlan, FaultKind, FaultSchedule
from lab.chaos.report import (
    ChaosReport,
    breaches,
    counts,
    doubled_actions,
    longest_stall,
    lost_actions,
    recoveries,
    render,
)
from lab.feed_watch import FeedWatch, RecordingClient

PROGRESS_EVERY_S = 5.0
EXAMPLES = 5
# Each option that is a field of the plan.
OPTIONS = (
    ("--boots", "boots", "builds to be accepted"),
    ("--fault-every", "fault_every_s", "seconds"),
    ("--longest", "longest_s", "seconds; the load ends then"),
    ("--in-flight", "in_flight", "builds and deletes at once"),
    ("--population", "population", "machines kept before some are deleted"),
    ("--actions", "actions", "migrations, resizes, rebuilds and other actions to be accepted"),
    ("--gangs", "gangs", "share of builds that are gangs"),
    ("--drains", "drains", "hosts to be emptied, one after the other"),
)


class ChaosResult(Struct, frozen=True, kw_only=True):
    """How the run's last part went."""

    seconds: float
    at_rest: bool
    recovery_s: float
    facts: Facts
    dead_letters: dict[str, int]
    unended: tuple[str, ...] = ()  # builds and deletes whose end the client has no event of


async def chaos(plan: ChaosPlan, directory: Path, console: Console) -> ChaosReport:
    """One run. Raises ServerFailed when a server or worker cannot be brought back, CancelledError at SIGTERM.

    SIGTERM ends it as SIGINT does: the processes that it started, paused ones among them, end with it.
    """
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    async with deployment(plan, directory) as stage:
        run = Run(plan, stage, console)
        await run.client.open()
        await run.watch.open()
        await run.actions.open()
        try:
            await wait_registered(stage)
            await hosts_known(run.client, run.plan.processes)
            console.print(f"seed {plan.seed}; up: {', '.join(stage.processes.workers)}", soft_wrap=True)
            return run.summed_up(await run.through())
        finally:
            await run.actions.close()
            await run.watch.close()
            await run.client.close()


class Run:
    """One run on a running deployment: load with faults, recovery, the report."""

    def __init__(self, plan: ChaosPlan, stage: Deployment, console: Console) -> None:
        rng = random.Random(plan.seed)
        site, process = stage.site, process_name("chaos")
        self.plan = plan
        self.stage = stage
        self.client = RecordingClient(site.bus(process), clock=site.clock, process=process, durable=True)
        self.watch = FeedWatch(site.bus(f"{process}-feed"))
        self.churn = Churn(self.client, plan, clock=site.clock, rng=random.Random(rng.getrandbits(64)))
        self.actions = ActionLoad(
            self.client, plan, self.churn.pick, clock=site.clock, rng=random.Random(f"actions {plan.seed}")
        )
        self.draining = Draining(self.client, plan, clock=site.clock, rng=random.Random(f"drains {plan.seed}"))
        self.injector = FaultInjector(stage, random.Random(rng.getrandbits(64)))
        self._schedule = FaultSchedule(plan.deck, rng)
        self._clock = site.clock
        self._console = console

    async def through(self) -> ChaosResult:
        """All of it."""
        began = self._clock.monotonic()
        await self._storm()
        seconds = self._clock.monotonic() - began
        watching = asyncio.create_task(self.injector.watch())
        try:
            return await self._recover(seconds)
        finally:
            watching.cancel()

    async def _storm(self) -> None:
        """Load and faults, until the last request is accepted; drains that are under way then end without new ones."""
        async with asyncio.TaskGroup() as group:
            disturbing = group.create_task(
                self.injector.disturb(self._schedule, self.plan.fault_every_s, self.plan.most_faults)
            )
            others = [group.create_task(self.injector.watch()), group.create_task(self._print_load())]
            drains = group.create_task(self.draining.run())
            await asyncio.wait([group.create_task(self.churn.run()), group.create_task(self.actions.run())])
            disturbing.cancel()
            self.draining.stop()
            await drains
            for task in others:
                task.cancel()

    async def _recover(self, seconds: float) -> ChaosResult:
        """No further fault: everything comes back, comes to rest and is judged."""
        plan, client, site = self.plan, self.client, self.stage.site
        self._console.print(f"the load is over after {seconds:.0f} s: undoing the last faults")
        await self.injector.settle()
        self._console.print(f"nothing is broken any more: waiting for rest, {plan.rest_s:g} s at most")
        over = max((fault.over_at or 0.0 for fault in self.injector.injected), default=self._clock.monotonic())
        all_ended = await client.until(lambda: not client.unfinished, plan.rest_s)
        unended = tuple(
            f"{'delete' if one.deleting else 'build'} of {one.instance_uuid}, {one.state} ({one.sequence})"
            for one in client.open_requests()
        )
        all_ended = await self.actions.settle(max(1.0, plan.rest_s - (self._clock.monotonic() - over))) and all_ended
        left = max(1.0, plan.rest_s - (self._clock.monotonic() - over))
        quiet = await rest(site, timeout_s=left)
        recovery_s = self._clock.monotonic() - over
        facts = await gather(
            site,
            accepted=self.churn.accepted,
            events=client.events,
            changes=self.watch.changes,
            connections=await connections(self.stage),
        )
        return ChaosResult(
            seconds=seconds,
            at_rest=quiet and all_ended,
            recovery_s=recovery_s,
            facts=facts,
            dead_letters=await left_in_queues(self.stage),
            unended=unended,
        )

    async def _print_load(self) -> None:
        """How it goes, now and then."""
        began = self._clock.monotonic()
        while True:
            await self._clock.sleep(PROGRESS_EVERY_S)
            injected = self.injector.injected
            last = f"the last: {injected[-1].fault.label} {injected[-1].fault.target}" if injected else ""
            self._console.print(
                f"{self._clock.monotonic() - began:5.0f} s {len(self.churn.accepted):7} accepted "
                f"{len(self.churn.ended):7} ended {self.client.unfinished:5} in flight "
                f"{len(self.actions.requested):6} actions {self.draining.ended:3} drains "
                f"{len(injected):5} faults {last}",
                soft_wrap=True,
            )

    def summed_up(self, ending: ChaosResult) -> ChaosReport:
        """The whole report of the run."""
        facts, faults, events, ended = ending.facts, self.injector.injected, self.client.events, self.churn.ended
        states = Counter(facts.requests.get(uuid, "unknown") for uuid in self.churn.accepted)
        results = check_invariants(facts)
        found = breaches(results)

        distinct = {(event.instance_uuid, event.sequence, event.state) for event in events}
        actions_lost, actions_doubled = lost_actions(facts, self.actions.requested), doubled_actions(self.actions.ends)
        examples = {
            "without an end for its client": ending.unended,
            "actions lost": actions_lost,
            "actions doubled": actions_doubled,
        }
        return ChaosReport(
            seed=self.plan.seed,
            seconds=round(ending.seconds, 1),
            requests=len(self.churn.accepted),
            wanted=self.churn.wanted,
            stopped=self.churn.stopped or self.actions.stopped,
            deletes=self.churn.deletes,
            active=states[BuildState.ACTIVE],
            failed=states[BuildState.FAILED],
            refused=states[BuildState.REFUSED],
            deleted=states[BuildState.DELETED],
            failures_by_code=_failures(events),
            failure_reasons=_reasons(events),
            events=len(events),
            events_repeated=len(events) - len(distinct),
            lost=found["lost"] + len(actions_lost),
            doubled=found["doubled"] + len(actions_doubled),
            leaked=found["leaked"],
            overcommitted=found["overcommitted"],
            faults=counts(faults),
            faults_total=len(faults),
            connections_cut=self.injector.connections_cut,
            died=tuple(self.injector.deaths),
            ends_per_s=round(len(ended) / max(ending.seconds, 1e-9), 1),
            longest_stall=longest_stall(ended, faults),
            recovery_s=round(ending.recovery_s, 1),
            recovery_by_kind={name: (round(median(ts), 2), max(ts)) for name, ts in recoveries(ended, faults).items()},
            at_rest=ending.at_rest,
            dead_letters=ending.dead_letters,
            verdicts=results,
            examples={name: uuids[:EXAMPLES] for name, uuids in examples.items()},
            actions=len(self.actions.requested),
            actions_wanted=self.plan.actions,
            actions_by_result=self.actions.results,
            gangs=len(facts.gangs or ()),
            drains=self.draining.ended,
            drained=self.draining.moved,
            drains_by_code=dict(self.draining.codes),
        )


def _failures(events: Sequence[BuildEvent]) -> dict[str, int]:
    ends = {
        event.instance_uuid: event.code
        for event in events
        if event.terminal and event.state in (BuildState.FAILED, BuildState.REFUSED)
    }
    return dict(Counter(ends.values()).most_common())


def _reasons(events: Sequence[BuildEvent]) -> dict[str, str]:
    """One reason of each code, with the funnel of its search."""
    found: dict[str, str] = {}
    for event in events:
        if event.terminal and event.state in (BuildState.FAILED, BuildState.REFUSED) and event.code not in found:
            steps = "; ".join(f"{step.step} left {step.remaining} {step.rejected or ''}" for step in event.funnel)
            found[event.code] = f"{event.reason} {steps}".strip()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; print the tables; 0 when everything is as promised."""
    parser = _parser()
    options = parser.parse_args(arguments)
    plan = _plan(options)
    if not plan.deck:
        parser.error(f"no such fault: {', '.join(options.only)}")
    configure_logging(process="chaos", role="chaos", level=options.log, style="json")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="berth-chaos-") as temporary:
        directory = options.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            report = uvloop.run(chaos(plan, directory.absolute(), console))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    render(report, console)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return 0 if report.sound else 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__, formatter_class=raw)
    bare = ChaosPlan()
    for option, field, meaning in OPTIONS:
        default = getattr(bare, field)
        parser.add_argument(option, dest=field, type=type(default), default=default, metavar="N", help=meaning)
    parser.add_argument("--seed", type=int, default=None, help="faults and load are drawn from it (default: at random)")
    parser.add_argument("--only", nargs="*", default=[], metavar="FAULT", help="only these, as kill_broker or pause")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as data, too")
    parser.add_argument("--logs", type=Path, metavar="DIRECTORY", help="keep the workers' logs there")
    parser.add_argument("--log", default="error", choices=("info", "warning", "error"), help="info: every fault")
    return parser


def _plan(options: argparse.Namespace) -> ChaosPlan:
    return ChaosPlan(
        **{field: getattr(options, field) for _, field, _ in OPTIONS},
        seed=random.SystemRandom().randrange(10**6) if options.seed is None else options.seed,
        deck=tuple(card for card in ChaosPlan().deck if chosen(card.kind, card.role, options.only)),
    )


def chosen(kind: FaultKind, role: str, only: Sequence[str]) -> bool:
    """Whether a card is among those requested: by kind, by role, or by both (`kill`, `broker`, `kill_broker`)."""
    return not only or bool({kind.value, role, f"{kind}_{role}"} & set(only))
