"""Wires the frontend of a Nova: the API bus to placement, the replica and the placer, Nova's API, and its topic."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API, Bus
from bus.contracts.queues import FRONTEND
from bus.rabbitmq.address import BadBusUrl, parse_bus_url
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.service.worker_heartbeat import add_heartbeat
from nova_scheduler.cloud.cell_database import CellDatabase
from nova_scheduler.cloud.cells import cells_of
from nova_scheduler.cloud.facts_poller import HostFactsPoller
from nova_scheduler.cloud.host_facts import HostFacts
from nova_scheduler.cloud.in_flight import InstancesInFlight
from nova_scheduler.cloud.poller import NovaStatePoller
from nova_scheduler.cloud.rest import NovaRest
from nova_scheduler.cloud.state import NovaState, host_table
from nova_scheduler.config import NotificationSettings, NovaConfig, as_amqp
from nova_scheduler.decide.decision_log import CallRecorder, PublishedCalls
from nova_scheduler.decide.notifications import NovaNotifier
from nova_scheduler.decide.placer_requests import PlacerRequests
from nova_scheduler.decide.select_destinations import Destinations, Notifier
from nova_scheduler.filters.numa import NUMATopologyFilter
from nova_scheduler.filters.pci import PciPassthroughFilter, PCIWeigher
from nova_scheduler.reload import SettingsReload
from nova_scheduler.request.releases import check_release
from nova_scheduler.rpc.dispatcher import CallDispatcher
from nova_scheduler.rpc.server import RpcServer
from nova_scheduler.stock.comparison import AnswerComparison
from nova_scheduler.stock.forwarder import Fallback, StockForwarder
from nova_scheduler.stock.shadow import GrantedClaims, ShadowingForwarder, UpstreamDecides
from nova_scheduler.wire.queues import RabbitOptions
from placement_worker.replica.follower import Follower
from placement_worker.replica.replica import Replica
from scheduler_worker import plugins
from scheduler_worker.build.claim_ownership import ClaimOwnership
from scheduler_worker.build.placer import Placer, ReplicaFollower
from scheduler_worker.config import HOST_FACT_FILTERS, NOVA_WEIGHERS, SchedulerConfig
from scheduler_worker.fleet.metrics_listener import add_host_metrics
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.placement_client import BusClaims, ClaimPort
from scheduler_worker.selection.plugin import Filter
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig

log = structlog.get_logger("nova")

NAME = "nova-scheduler"
PCI_WEIGHER = f"{PCIWeigher.__module__}.{PCIWeigher.__qualname__}"


class PlacementAccess(Struct, frozen=True):
    """A replica of placement, what keeps it up to date, and what claims."""

    replica: Replica
    follower: ReplicaFollower
    claims: ClaimPort


class DecisionSettings:
    """How hosts are filtered and weighed: as the settings have it, with the aggregates that Nova has now."""

    def __init__(
        self,
        selector: Selector,
        nova_state: NovaState,
        requests: PlacerRequests,
        scheduler: SchedulerConfig,
        device_filters: Callable[[NovaConfig], Mapping[str, Filter]],
    ) -> None:
        self._selector = selector
        self._nova_state = nova_state
        self._requests = requests
        self._scheduler = scheduler
        self._device_filters = device_filters
        self._reloads = 0

    def configure(self) -> None:
        """Decide by Nova's aggregates as they are known now."""
        if (self._nova_state.version, self._reloads) != self._selector.config.revision:
            self._selector.config = self._configured(self._scheduler, self._selector.config.filters, self._reloads)

    def apply(self, config: NovaConfig, scheduler: SchedulerConfig) -> None:
        """Decide by these filters, weighers and multipliers from now on. Raises SettingsError; nothing is changed."""
        scheduler, lacking = _scheduler_settings(scheduler, config)
        filters = plugins.filters(scheduler, self._device_filters(config))
        self._selector.config = self._configured(scheduler, filters, self._reloads + 1)
        self._requests.enable(config, lacking)
        self._scheduler = scheduler
        self._reloads += 1

    def _configured(self, scheduler: SchedulerConfig, filters: Sequence[Filter], reloads: int) -> SelectorConfig:
        """Raises SettingsError: a weigher cannot be made of this."""
        nova_state = self._nova_state
        known = replace(scheduler, aggregates=nova_state.aggregates())
        return SelectorConfig(
            known,
            flavors={},
            filters=filters,
            weighings=plugins.weighings(known),
            revision=(nova_state.version, reloads),
            membership=nova_state.membership(),
        )


class Deciding(Struct, frozen=True):
    """What decides the calls of a Nova, and what it is kept up to date by."""

    destinations: Destinations
    selector: Selector
    nova_state: NovaState
    rest: NovaRest
    poller: NovaStatePoller
    facts: HostFacts
    facts_poller: HostFactsPoller
    settings: DecisionSettings

    def add_to(self, service: WorkerRuntime, reload: SettingsReload | None) -> None:
        """Have a service read Nova before calls are decided, and its settings again when it is told to."""
        if reload is not None:
            service.on_reload = partial(reload.run, self.settings.apply)
        service.add_resource(None, self.rest.close)
        service.add_task("nova state", self.poller.run)
        service.add_preparation(self.poller.first.wait)
        service.add_check("nova state", self.poller.first.is_set)
        if self.facts.cells:
            service.add_task("host facts", self.facts_poller.run)
            service.add_preparation(self.facts_poller.first.wait)


def deciding(
    env: Environment,
    config: NovaConfig,
    scheduler: SchedulerConfig,
    placed: PlacementAccess,
    *,
    notifier: Notifier,
    recorder: CallRecorder,
) -> Deciding:
    """What decides the calls. Raises SettingsError."""
    table, claims = host_table(), placed.claims
    facts = HostFacts(config.api.cell_databases, max_age_s=config.api.facts_max_age_s)
    in_flight = InstancesInFlight(facts, env.clock, pack=_packs(config), claims=not config.shadow)
    scheduler, lacking = _scheduler_settings(scheduler, config)
    selector = _selector(placed.replica, table, scheduler, device_filters(config, in_flight))
    selector.in_flight = in_flight if facts.cells else None
    held = ClaimOwnership(claims, table.last_cell_of, _no_records)
    nova_state = NovaState(table)
    rest = NovaRest(config.api, clock=env.clock, setting="nova.api", on_version=partial(check_release, config.release))
    cells = cells_of(config.api, env.clock)
    poller = NovaStatePoller(rest, nova_state, table, cells=cells, config=config.api, clock=env.clock)
    facts_poller = HostFactsPoller(
        _cell_databases(config),
        facts,
        in_flight,
        nova_state,
        selector.metrics,
        table=table,
        weighed=sorted(scheduler.metrics.weights),
        held=held,
        interval_s=config.api.facts_interval_s,
        hosts_known=poller.first,
        clock=env.clock,
    )
    requests = PlacerRequests(
        selector,
        nova_state,
        config,
        lacking=lacking,
        outdated=lambda: facts.outdated(env.clock.monotonic()),
        row_of=in_flight.row_of if facts.cells else None,
    )
    settings = DecisionSettings(selector, nova_state, requests, scheduler, partial(device_filters, in_flight=in_flight))
    rng = random.Random(env.rng.getrandbits(64))
    destinations = Destinations(
        Placer(claims, held, selector, placed.follower, clock=env.clock, rng=rng, config=scheduler),
        selector,
        nova_state,
        poller,
        placed.follower,
        requests=requests,
        configure=settings.configure,
        notifier=notifier,
        clock=env.clock,
        in_shadow=config.shadow,
        recorder=recorder,
    )
    return Deciding(destinations, selector, nova_state, rest, poller, facts, facts_poller, settings)


def build(
    env: Environment, config: NovaConfig, scheduler: SchedulerConfig, reload: SettingsReload | None = None
) -> WorkerRuntime:
    """One server of the topic. Any number may run side by side, and beside stock nova-schedulers.

    scheduler: how hosts are weighed and claimed. reload: None: settings are read at the start alone. Raises
    SettingsError.
    """
    service = WorkerRuntime(NAME, clock=env.clock)
    api = env.bus(API)
    api.publishes_as(FRONTEND)
    replica = Replica()
    follower = Follower(api, replica, process=env.process, clock=env.clock)
    claims: ClaimPort = BusClaims(api, timeout_s=scheduler.claim_timeout_s)
    transport = transport_of(env.process, "transport_url", config.transport_url, config.rabbit)
    notifier, calls = notifier_of(env, config, transport), PublishedCalls(api)
    decides = deciding(
        env,
        config,
        scheduler,
        PlacementAccess(replica, follower, GrantedClaims(claims) if config.shadow else claims),
        notifier=notifier,
        recorder=calls,
    )
    destinations, fallback = decides.destinations, _fallback(env, config)
    if fallback is not None and config.shadow:
        comparison = AnswerComparison(destinations, replica, env.clock, calls)
        service.add_counts(comparison.counts)
        shadow = ShadowingForwarder(comparison, fallback, env.clock)
        server = _server(env, config, transport, UpstreamDecides(destinations), shadow)
    else:
        server = _server(env, config, transport, destinations, fallback, recorder=calls)
    service.add_resource(api.open, api.close)
    service.add_task("nova notifications", notifier.run)
    service.add_task("nova calls told", calls.run)
    _add_follower(service, follower)
    decides.add_to(service, reload)
    _add_server(service, server, fallback)
    _add_bus(service, env, api, decides.selector)
    return service


def _add_follower(service: WorkerRuntime, follower: Follower) -> None:
    service.add_resource(follower.start, follower.close)
    service.add_task("replica", follower.run)
    service.add_preparation(follower.ready.wait)
    service.add_check("replica", follower.ready.is_set)


def _cell_databases(config: NovaConfig) -> list[CellDatabase]:
    return [CellDatabase(cell, url) for cell, url in sorted(config.api.cell_databases.items())]


def device_filters(config: NovaConfig, in_flight: InstancesInFlight) -> dict[str, Filter]:
    """The filters that read what is in flight, by name."""
    judged, devices_of = config.device_filters, in_flight.devices_of
    made: tuple[Filter, ...] = (
        NUMATopologyFilter(devices_of, pack=_packs(config)),
        PciPassthroughFilter(devices_of),
    )
    return {one.name: one for one in made if one.name in judged and config.api.cell_databases}


def _packs(config: NovaConfig) -> bool:
    return config.packing_host_numa_cells_allocation_strategy


def _selector(replica: Replica, table: HostTable, scheduler: SchedulerConfig, made: Mapping[str, Filter]) -> Selector:
    filters, weighings = plugins.filters(scheduler, made), plugins.weighings(scheduler)
    return Selector(replica, table, SelectorConfig(scheduler, flavors={}, filters=filters, weighings=weighings))


def _add_bus(service: WorkerRuntime, env: Environment, api: Bus, selector: Selector) -> None:
    """What comes and goes on the API bus beside the feed, claims and calls."""
    service.add_bus_check("bus api", lambda: api.unavailable_reason)
    add_host_metrics(service, api, selector)
    add_heartbeat(service, env, api, NAME)


def _add_server(service: WorkerRuntime, server: RpcServer, fallback: StockForwarder | None) -> None:
    """Calls are taken once all else is prepared."""
    started = asyncio.Event()
    service.add_resource(server.open, server.close)
    service.add_task("nova calls", partial(_serve, server, started))
    service.add_preparation(partial(_start, server, started))
    service.add_drain(server.drain)
    service.add_bus_check("bus nova", lambda: server.unavailable_reason)
    if fallback is not None:
        service.add_bus_check("bus fallback", lambda: fallback.unavailable_reason)


def _scheduler_settings(scheduler: SchedulerConfig, config: NovaConfig) -> tuple[SchedulerConfig, tuple[str, ...]]:
    """The scheduler's settings with what is Nova's: flavors and aggregates come with its calls and its facts. And the
    filters that berth does not have, or has nothing to run on, if another scheduler decides every call then: they are
    not run here. Raises SettingsError.
    """
    by_devices = (PCI_WEIGHER,) if config.api.cell_databases or PCIWeigher.name in scheduler.multipliers else ()
    known = replace(
        scheduler,
        flavors={},
        default_flavors=(),
        aggregates=(),
        available_filters=(*scheduler.available_filters, *HOST_FACT_FILTERS),
        enabled_filters=config.own_filters,
        enabled_weighers=tuple(dict.fromkeys((*scheduler.enabled_weighers, *NOVA_WEIGHERS, *by_devices))),
        default_availability_zone=config.default_availability_zone,
    )
    without_facts = () if config.api.cell_databases else config.fact_filters
    if not config.is_one_of_two:
        if without_facts:
            reason = f"{without_facts[0]} needs nova.api.cell_databases: Nova's API does not tell what it reads"
            raise SettingsError("nova.cell_databases_unset", reason)
        return known, ()
    lacking = (*plugins.lacking(known, made=config.device_filters), *without_facts)
    return replace(known, enabled_filters=tuple(one for one in known.enabled_filters if one not in lacking)), lacking


async def _no_records(_instances: Sequence[str]) -> Mapping[str, str]:
    """Of Nova's instances berth has no records."""
    return {}


async def _start(server: RpcServer, started: asyncio.Event) -> None:
    await server.start()
    started.set()


async def _serve(server: RpcServer, started: asyncio.Event) -> None:
    await started.wait()
    await server.run()


def _fallback(env: Environment, config: NovaConfig) -> StockForwarder | None:
    """The fallback, if there is one. Raises SettingsError."""
    if not config.fallback_url:
        if config.shadow:
            reason = "the shadow needs nova.fallback_url: where the stock nova-scheduler decides"
            raise SettingsError("nova.shadow_fallback", reason)
        if config.undecided_filters:
            log.warning("nova.no_fallback", filters=config.undecided_filters)
        return None
    if _is_one_place(config.fallback_url, config.transport_url):
        reason = "nova.fallback_url is where nova.transport_url is: calls would come back from there"
        raise SettingsError("nova.fallback_url", reason)
    return StockForwarder(
        transport_of(env.process, "fallback_url", config.fallback_url, config.rabbit),
        control_exchange=config.control_exchange,
        unique=f"{env.rng.getrandbits(128):032x}",
        clock=env.clock,
    )


def notifier_of(env: Environment, config: NovaConfig, transport: RabbitTransport) -> NovaNotifier:
    """What notifies of calls. Silent in the shadow: the stock nova-scheduler notifies."""
    return NovaNotifier(
        transport,
        NotificationSettings() if config.shadow else config.notifications,
        host=config.host or socket.gethostname(),
        options=config.rabbit,
        control_exchange=config.control_exchange,
        clock=env.clock,
        rng=random.Random(env.rng.getrandbits(64)),
    )


def _server(
    env: Environment,
    config: NovaConfig,
    transport: RabbitTransport,
    dispatcher: CallDispatcher,
    fallback: Fallback | None,
    *,
    recorder: CallRecorder | None = None,
) -> RpcServer:
    """The server on Nova's broker, which it opens. recorder: None: that each call is left to the stock scheduler is
    logged, no more.
    """
    return RpcServer(
        transport,
        dispatcher,
        host=config.host or socket.gethostname(),
        unique=f"{env.rng.getrandbits(128):032x}",
        options=config.rabbit,
        control_exchange=config.control_exchange,
        clock=env.clock,
        rng=random.Random(env.rng.getrandbits(64)),
        fallback=fallback,
        recorder=recorder,
    )


def _is_one_place(one: str, other: str) -> bool:
    """Whether two URLs name a virtual host of one broker, of whose nodes each may name others. False: one of them is no
    URL, as its transport says.
    """
    try:
        first, second = parse_bus_url(as_amqp(one)), parse_bus_url(as_amqp(other))
    except BadBusUrl:
        return False
    return first.vhost == second.vhost and not set(first.hosts).isdisjoint(second.hosts)


def transport_of(process: str, setting: str, url: str, options: RabbitOptions) -> RabbitTransport:
    """The connection to a broker of Nova's. Raises SettingsError."""
    if reason := options.refused():
        raise SettingsError("nova.rabbit_option", f"of nova.rabbit, {reason}")
    if not url:
        raise SettingsError("nova.transport_url", f"nova.{setting} is needed: where Nova's services meet")
    try:
        return RabbitTransport(as_amqp(url, options), name=f"nova.{setting}", connection_name=f"berth {process}")
    except BadBusUrl as error:
        raise SettingsError(error.code, f"nova.{setting}: {error}") from None
