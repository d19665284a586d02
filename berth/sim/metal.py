"""Ironic in the simulated world: a process of its own with nodes, a REST API, and notifications that get lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from berth.ironic_stand_in import Behaviour, IronicStandIn
from berth.ironic_stand_in.farm import Farm, RequestError
from berth.sim.loop import Process
from berth.sim.network import Broker, Weather
from berth.sim.story import Story
from bus.clock import Clock, new_uuid
from bus.port import Outgoing, PublishRefused, QueueMissing

EXCHANGE = "ironic"
URL = "http://ironic"
CLASSES = ("baremetal-gold", "baremetal-silver")
# A notification that was sent twice comes again within this.
DOUBLE_S = 5.0
# An operator who meets a node that is on its way, or an Ironic that is away, tries again after this; and gives up then.
RETRY_S = 0.7
TRIES = 40
BLINKS, BLINK_S = 8, 0.003


class Notices:
    """Ironic's way to its exchange: fire and forget, so what the weather takes is gone."""

    def __init__(self, broker: Broker, weather: Weather) -> None:
        self._broker = broker
        self._weather = weather

    async def open(self) -> None:
        """Declare the exchange as Ironic does."""
        self._broker.declare_exchange(EXCHANGE)

    async def say(self, routing_key: str, body: bytes) -> None:
        """Publish one notification, or not."""
        weather = self._weather
        message = Outgoing(exchange=EXCHANGE, routing_key=routing_key, body=body, mandatory=False)
        if weather.strikes(weather.rates.notice_lost):
            return
        self._send(weather.latency(), message)
        if weather.strikes(weather.rates.duplicate):
            self._send(weather.between(0.0, DOUBLE_S), message)

    async def close(self) -> None:
        """Nothing to close."""

    def _send(self, later_s: float, message: Outgoing) -> None:
        asyncio.get_running_loop().call_later(later_s, self._arrive, message, context=self._broker.context)

    def _arrive(self, message: Outgoing) -> None:
        if not self._broker.up:
            return
        try:
            self._broker.route(message)
        except (PublishRefused, QueueMissing):
            return


class WatchedFarm(Farm):
    """A farm that tells when a machine has come to be on a node."""

    deployed: Callable[[str, str], None]

    def _change(self, node: dict[str, Any], **changes: Any) -> None:
        super()._change(node, **changes)
        if changes.get("provision_state") == "active" and node["instance_uuid"]:
            self.deployed(node["uuid"], node["instance_uuid"])


class SimIronic:
    """The process: it never dies, but it can be away."""

    def __init__(
        self, broker: Broker, weather: Weather, story: Story, clock: Clock, *, seed: int, behaviour: Behaviour
    ) -> None:
        rng = random.Random(f"berth.sim.ironic {seed}")
        self.process = Process("ironic")
        self.away = 0
        self._story = story
        self._notices = Notices(broker, weather)
        self._stand_in = IronicStandIn(self._notices, clock=clock, rng=rng, behaviour=behaviour)
        self._stand_in.farm = self.farm = WatchedFarm(self._notices, clock=clock, rng=rng, behaviour=behaviour)
        self._app = httpx.ASGITransport(self._stand_in.app(), raise_app_exceptions=False)
        self._rng = rng
        broker.declare_exchange(EXCHANGE)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """One request, carried out in Ironic's own process whatever becomes of its client."""
        return await asyncio.shield(self.process.spawn(self._answer(request), "ironic answers"))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        response = await self._app.handle_async_request(request)
        content = await response.aread()
        self._story.tell("ironic", f"{request.method} {request.url.raw_path.decode()} {response.status_code}")
        return httpx.Response(response.status_code, headers=response.headers, content=content)

    # --- what its operators do

    def flip(self, verb: str, number: int) -> asyncio.Task[None]:
        """An operator's act on one of the nodes, in Ironic's own process."""
        return self.process.spawn(self._flip(verb, number), f"order ironic {verb}")

    async def _flip(self, verb: str, number: int) -> None:
        request_id = f"req-{new_uuid(self._rng)}"
        if verb == "add":
            grade = CLASSES[number % len(CLASSES)]
            node = await self.farm.create({"resource_class": grade, "name": f"late-{number}"}, request_id)
            await self._go_through(node, ("manage", "provide"), request_id)
            return
        nodes = list(self.farm.nodes.values())
        if not nodes:
            return
        node = nodes[number % len(nodes)]
        self._story.tell("order", f"ironic {verb} {node['uuid']} {node['provision_state']}")
        try:
            await self._act(verb, node, number, request_id)
        except RequestError as refused:
            self._story.tell("refused", f"ironic {verb} {node['uuid']} {refused.status}")

    async def _act(self, verb: str, node: dict[str, Any], number: int, request_id: str) -> None:
        farm = self.farm
        match verb:
            case "maintain" | "return":
                await farm.set_maintenance(node, verb == "maintain", "by its operator", request_id)
            case "blink":  # faster than anybody can read it
                for turn in range(BLINKS):
                    await farm.set_maintenance(node, turn % 2 == 0, "by its operator", request_id)
                    await asyncio.sleep(self._rng.uniform(0.0, BLINK_S))
            case "power":
                await farm.set_power(node, ("power off", "power on")[number % 2], request_id)
            case "traits":
                await farm.patch(node, {"traits": [f"CUSTOM_T{number % 3}"]}, request_id)
            case "class":
                await farm.patch(node, {"resource_class": CLASSES[number % 2]}, request_id)
            case "remove":
                await farm.delete(node, request_id)
            case _:  # taken out of use, and cleaned before it is put back
                await self._go_through(node, ("manage", "provide"), request_id)

    async def _go_through(self, node: dict[str, Any], verbs: tuple[str, ...], request_id: str) -> None:
        for verb in verbs:
            for _ in range(TRIES):
                try:
                    self.farm.provision(node, verb, request_id)
                    break
                except RequestError as refused:
                    if refused.status != httpx.codes.CONFLICT:
                        raise
                    await asyncio.sleep(RETRY_S)


class IronicTransport(httpx.AsyncBaseTransport):
    """One client's way to Ironic: slow, lost before or after Ironic has the request, or answered with an error."""

    def __init__(self, ironic: SimIronic, process: Process, weather: Weather) -> None:
        self._ironic = ironic
        self._process = process
        self._weather = weather
        self.answered: Callable[[float, bytes], None] = lambda _at, _body: None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, wait, and answer."""
        weather, rates = self._weather, self._weather.rates
        await weather.fate(self._process.name)
        await asyncio.sleep(weather.latency())
        if self._ironic.away or weather.strikes(rates.ironic_lost):
            raise httpx.ConnectError("Ironic is away")
        if weather.strikes(rates.ironic_busy):
            return httpx.Response(503, json={"error_message": "busy"})
        response = await self._ironic.answer(request)
        at = asyncio.get_running_loop().time()
        await weather.fate(self._process.name)
        await asyncio.sleep(weather.latency())
        if weather.strikes(rates.ironic_lost):
            raise httpx.ReadTimeout("the answer was lost")
        if request.method == "GET" and response.is_success:
            self.answered(at, response.content)
        return response


def free(node: Mapping[str, Any]) -> bool:
    """Whether Ironic shows the node as one that may be placed on (FEATURES I-3, I-4, written anew)."""
    return (
        node["provision_state"] == "available"
        and not node["maintenance"]
        and node["instance_uuid"] is None
        and node["power_state"] != "error"
    )
