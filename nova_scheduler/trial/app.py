"""Wires a trial: Nova's broker to listen on, its Placement to mirror, its API to read, and the front's own decision."""

from __future__ import annotations

from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.contracts.queues import FRONTEND
from bus.openstack.keystone import checked_address
from bus.openstack.rest import auth_of, tls_of
from bus.persistence.external_database import UnusableAddress
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.service.worker_heartbeat import add_heartbeat
from nova_scheduler.app import NAME, PlacementAccess, deciding, notifier_of, transport_of
from nova_scheduler.config import NovaConfig, TrialSettings
from nova_scheduler.decide.decision_log import PublishedCalls
from nova_scheduler.decide.placer_requests import parse_arguments
from nova_scheduler.decide.select_destinations import METHOD
from nova_scheduler.reload import SettingsReload
from nova_scheduler.request.request_spec import NotDecided, SpecRefused, parse_request_spec
from nova_scheduler.stock.comparison import AnswerComparison, instances_of
from nova_scheduler.stock.shadow import GrantedClaims
from nova_scheduler.trial.listener import CallListener
from nova_scheduler.trial.stock_choice import MirroredInstances, StockChoices
from nova_scheduler.wire.envelope import Call, RemoteFault
from nova_scheduler.wire.methods import check_method
from placement_worker.operations.export import PlacementReader
from placement_worker.operations.mirror import PlacementMirror, PlacementSource
from placement_worker.operations.mirror_database import DatabaseSource
from placement_worker.operations.mirror_rest import RestSource
from placement_worker.replica.replica import Replica
from scheduler_worker.config import SchedulerConfig


class TrialCalls:
    """Takes the calls that are heard, and has each compared."""

    def __init__(self, comparison: AnswerComparison, choices: StockChoices, clock: Clock) -> None:
        self._clock = clock
        self._comparison = comparison
        self._choices = choices

    def heard(self, call: Call) -> None:
        """A call has come. Of a rebuild on its own host the stock scheduler's answer is nowhere to be seen."""
        if call.method != METHOD:
            return
        ignored: tuple[str, ...] = ()
        try:
            check_method(call)
            request = parse_request_spec(parse_arguments(call.arguments).spec_obj)
            if request.is_rebuild:
                return
            ignored = tuple(request.ignore_hosts or ())
        except (RemoteFault, SpecRefused, NotDecided):
            pass  # berth's decision says so again
        instances, heard_s = instances_of(call), self._clock.monotonic()
        stock = partial(self._choices.choice, instances, ignored, heard_s)
        self._comparison.start(call, stock, self._choices.left_out(instances))


class Trial(Struct, frozen=True):
    """A trial as a service, what it counts, and what it decides by."""

    service: WorkerRuntime
    comparison: AnswerComparison
    mirror: PlacementMirror


def build(
    env: Environment, config: NovaConfig, scheduler: SchedulerConfig, reload: SettingsReload | None = None
) -> Trial:
    """A trial. reload: None: settings are read at the start alone. Raises SettingsError."""
    config = replace(config, shadow=True)
    api, replica = env.bus(API), Replica()
    api.publishes_as(FRONTEND)
    settings = config.trial
    source, interval_s = _source(env, settings)
    mirror = PlacementMirror(source, replica, clock=env.clock, interval_s=interval_s)
    transport = transport_of(env.process, "transport_url", config.transport_url, config.rabbit)
    calls = PublishedCalls(api)
    decides = deciding(
        env,
        config,
        scheduler,
        PlacementAccess(replica, mirror, GrantedClaims(MirroredInstances(mirror))),
        notifier=notifier_of(env, config, transport),
        recorder=calls,
    )
    choices = StockChoices(mirror, decides.nova_state, decides.rest, clock=env.clock, wait_s=settings.answer_s)
    comparison = AnswerComparison(decides.destinations, replica, env.clock, calls)
    listener = CallListener(
        transport,
        control_exchange=config.control_exchange,
        unique=f"{env.rng.getrandbits(128):032x}",
        heard=TrialCalls(comparison, choices, env.clock).heard,
    )
    service = WorkerRuntime("nova-trial", clock=env.clock)
    service.add_resource(api.open, api.close)
    service.add_resource(None, source.close)
    service.add_task("nova calls told", calls.run)
    decides.add_to(service, reload)
    _add_mirror(service, mirror)
    _add_listener(service, listener, comparison)
    add_heartbeat(service, env, api, NAME)
    return Trial(service, comparison, mirror)


def _add_mirror(service: WorkerRuntime, mirror: PlacementMirror) -> None:
    service.add_task("replica", mirror.run)
    service.add_preparation(mirror.ready.wait)
    service.add_bus_check("replica", lambda: mirror.unavailable_reason)
    service.add_age("replica", lambda: mirror.age_s)


def _add_listener(service: WorkerRuntime, listener: CallListener, comparison: AnswerComparison) -> None:
    """Calls are heard once all else is prepared."""
    service.add_resource(None, comparison.close)
    service.add_counts(comparison.counts)
    service.add_resource(listener.open, listener.close)
    service.add_preparation(listener.start)
    service.add_drain(listener.stop)
    service.add_bus_check("bus nova", lambda: listener.unavailable_reason)


def _source(env: Environment, settings: TrialSettings) -> tuple[PlacementSource, float]:
    """Nova's Placement, and the time between two reads of it (seconds). Raises SettingsError."""
    if not settings.placement_database:
        reader, interval_s = _reader(env, settings), settings.interval_s
        return RestSource(reader, interval_s=interval_s, whole_s=settings.whole_s), interval_s
    try:
        return DatabaseSource(settings.placement_database), settings.database_interval_s
    except UnusableAddress as error:
        reason = f"nova.trial.placement_database cannot be used: {error}"
        raise SettingsError("nova.placement_database", reason) from error


def _reader(env: Environment, settings: TrialSettings) -> PlacementReader:
    """Raises SettingsError."""
    verify = tls_of(verify=settings.verify_tls, ca_file=settings.ca_file, setting="nova.trial.ca_file")
    auth = auth_of(
        settings.keystone,
        username="",
        password="",
        clock=env.clock,
        timeout_s=settings.request_timeout_s,
        verify=verify,
        setting="nova.trial.keystone",
    )
    return PlacementReader(
        checked_address(settings.placement_url, setting="nova.trial.placement_url"),
        token=settings.token,
        auth=auth,
        verify=verify,
        clock=env.clock,
        timeout_s=settings.request_timeout_s,
    )
