"""`berth load`: many builds against a running system, and what became of each."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

import typer
from msgspec import Struct

from berth.commands.common import (
    EXIT_NO,
    EXIT_TIME,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    Stop,
    Timeout,
    client,
    err,
    out,
    run,
    settings_of,
)
from berth.commands.load_options import (
    Boots,
    BusUrl,
    Churn,
    Compare,
    Concurrency,
    Deletes,
    JsonFile,
    Mix,
    Project,
    Ramp,
    Rate,
    ReportFile,
    RetryFor,
    Seed,
    Skip,
    Speed,
    Trace,
)
from berth.load import LoadPlan, LoadRun, PlanError
from berth.load.compare import compare as compare_records
from berth.load.live import LiveView, render_record
from berth.load.plan import DEFAULT_BOOTS, Arrival, is_metal, parse_mix, parse_ramp, ramp_boots
from berth.load.record import LoadRecord, RecordError, decode, encode
from berth.load.report import render as render_html
from berth.load.sampler import Sample
from berth.load.session import looking_on, recorded
from berth.load.trace import Shape, read_trace
from berth.settings import Settings
from berth.site import Site, process_name
from bus.service.settings import hide_password
from scheduler_worker.config import Flavor

DEFAULT_MIX = "m1.tiny=40,m1.small=40,m1.medium=15,m1.large=5"
EXIT_INTERRUPTED = 130
STDOUT = Path("-")


def load(
    context: typer.Context,
    boots: Boots = None,
    mix: Mix = DEFAULT_MIX,
    rate: Rate = 0.0,
    ramp: Ramp = None,
    concurrency: Concurrency = 0,
    trace: Trace = None,
    speed: Speed = 1.0,
    deletes: Deletes = True,
    skip: Skip = 0.0,
    churn: Churn = 0.0,
    retry_for: RetryFor = None,
    project: Project = "load",
    seed: Seed = None,
    timeout: Timeout = 300.0,
    bus: BusUrl = None,
    json_file: JsonFile = None,
    report: ReportFile = None,
    compare: Compare = None,
) -> None:
    """Fire builds at a system and print what became of each.

    A build that was accepted and has not ended --timeout seconds later is late when a scheduler still has it under way,
    else lost. Exit status: 0 fine, 1 not one became active, or one ended twice, 3 the bus was
    unavailable, 4 builds or deletes were late or lost, 130 interrupted (Ctrl-C ends with a summary).
    """

    async def body() -> int:
        if compare is not None:
            return _compare(*compare, report)
        settings = settings_of(context, bus=bus)
        replayed = None if trace is None else Replayed(trace, speed, deletes, skip)
        plan = _plan(settings, boots, mix, rate, ramp, concurrency, replayed, churn, retry_for, project, timeout)
        for path in (json_file, report):
            if path not in {None, STDOUT}:
                _writable(path)
        rng = random.Random(seed) if seed is not None else random.SystemRandom()
        record = await _fire(settings, plan, rng, seed=seed, trace=str(trace or ""), speed=speed)
        _write_record(record, json_file, report)
        return _status(record)

    run(body)


async def _fire(settings: Settings, plan: LoadPlan, rng: random.Random, **more: object) -> LoadRecord:
    """Run the plan, showing how it goes; the first signal ends it with a summary, the second at once."""
    site = Site(settings)
    process = process_name("load")
    async with client(settings) as berth, looking_on(site, process) as transports:
        firing: list[LoadRun] = []
        views: list[LiveView] = []

        def started(run: LoadRun) -> None:
            firing.append(run)
            views.append(LiveView(run, err))

        def show(sample: Sample) -> None:
            views[0].show(sample)

        task = asyncio.ensure_future(
            recorded(
                berth, plan, clock=berth.bus.clock, rng=rng, chance=random.SystemRandom(), transports=transports,
                started=started, show=show, bus=hide_password(settings.bus.url), cells=site.cells, **more,
            )
        )  # fmt: skip

        def stop() -> None:
            if firing and not firing[0].interrupted:
                firing[0].interrupt()
            else:
                task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            if views:
                views[0].close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


class Replayed(Struct, frozen=True):
    """A trace, and how it is replayed."""

    path: Path
    speed: float
    deletes: bool
    skip_s: float

    def arrivals(self, flavors: dict[str, Shape]) -> tuple[Arrival, ...]:
        """Raises PlanError."""
        return read_trace(self.path, flavors, speed=self.speed, deletes=self.deletes, skip_s=self.skip_s)


def _plan(
    settings: Settings,
    boots: int | None,
    mix: str,
    rate: float,
    ramp: str | None,
    concurrency: int,
    trace: Replayed | None,
    churn: float,
    retry_for: float | None,
    project: str,
    timeout: float,
) -> LoadPlan:
    """The plan that the options mean. Raises Stop."""
    named = {"--rate": rate > 0, "--ramp": ramp is not None, "--concurrency": concurrency > 0, "--trace": trace}
    chosen = [name for name, given in named.items() if given]
    if len(chosen) > 1:
        raise Stop(EXIT_USAGE, "load.mode", f"{' and '.join(chosen)}: arrivals come one way or the other")
    if trace is not None and churn:
        raise Stop(EXIT_USAGE, "load.churn", "a trace has its own deletions: no --churn with --trace")
    flavors = settings.scheduler.flavors
    try:
        from_s, to_s, ramp_s = parse_ramp(ramp) if ramp is not None else (0.0, rate, 0.0)
        arrivals = () if trace is None else trace.arrivals(_shapes(flavors))
        all_of_it = len(arrivals) or (ramp_boots(from_s, to_s, ramp_s) if ramp_s else DEFAULT_BOOTS)
        return LoadPlan(
            boots=min(boots or all_of_it, len(arrivals) or sys.maxsize),
            mix=parse_mix(mix, list(flavors)),
            project_id=project,
            concurrency=concurrency,
            rate_per_s=to_s,
            ramp_from_per_s=from_s,
            ramp_s=ramp_s,
            trace=arrivals,
            churn=churn,
            retry_for_s=retry_for,
            timeout_s=timeout,
        )
    except PlanError as fault:
        raise Stop(EXIT_USAGE, fault.code, str(fault)) from fault


def _shapes(flavors: dict[str, Flavor]) -> dict[str, Shape]:
    """The size of each flavor of virtual machines; a trace requests no whole nodes."""
    return {
        name: Shape(flavor.vcpus, flavor.memory_mb, float(flavor.extra_specs.get("resources:VGPU", 0)))
        for name, flavor in flavors.items()
        if not is_metal(name)
    }


def _write_record(record: LoadRecord, json_file: Path | None, report: Path | None) -> None:
    """The end for a person, unless standard output is for a program; and the files that were requested."""
    if json_file == STDOUT:
        sys.stdout.write(encode(record).decode() + "\n")
    elif json_file is not None:
        _write(json_file, encode(record))
    if report is not None:
        _write(report, render_html(record).encode())
    if json_file != STDOUT:
        render_record(record, out)


def _status(record: LoadRecord) -> int:
    """The exit status that a run's end means; Stop with a sentence where there is one."""
    totals = record.totals
    bound = f"{record.settings.lost_after_s:g} s"
    if totals.twice:
        return EXIT_NO
    for outcome, words in (("lost", "were lost: no end was received"), ("late", "were still under way")):
        boots, deletes = totals.outcomes.get(outcome, 0), totals.delete_outcomes.get(outcome, 0)
        if boots or deletes:
            text = f"{boots} builds and {deletes} deletes {words} after {bound}"
            raise Stop(EXIT_TIME, f"load.{outcome}", text)
    if totals.interrupted:
        return EXIT_INTERRUPTED
    if totals.outcomes.get("unsent"):
        raise Stop(EXIT_UNAVAILABLE, "bus.unavailable", "the bus was unavailable: some builds were never confirmed")
    if totals.boots and not totals.outcomes.get("active"):
        raise Stop(EXIT_NO, "load.none_active", f"not one of {totals.boots} builds became active")
    return 0


def _compare(one: Path, two: Path, report: Path | None) -> int:
    """Two records side by side: in words here, as a page when there is a place for it."""
    if report is not None:
        _writable(report)
    found = compare_records(_read(one), _read(two), names=(str(one), str(two)))
    sys.stdout.write(found.text)
    if report is not None:
        _write(report, found.html.encode())
    return 0


def _read(path: Path) -> LoadRecord:
    try:
        return decode(path.read_bytes())
    except OSError as fault:
        raise Stop(EXIT_USAGE, "record.unreadable", f"cannot read {path}: {fault.strerror or fault}") from fault
    except RecordError as fault:
        raise Stop(EXIT_USAGE, fault.code, f"{path}: {fault}") from fault


def _writable(path: Path) -> None:
    """Find out before the load, not after it. Raises Stop."""
    try:
        path.open("ab").close()
    except OSError as fault:
        raise Stop(EXIT_USAGE, "report.unwritable", f"cannot write {path}: {fault.strerror or fault}") from fault


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as fault:
        raise Stop(EXIT_USAGE, "report.unwritable", f"cannot write {path}: {fault.strerror or fault}") from fault
