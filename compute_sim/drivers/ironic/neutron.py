"""`network = "neutron"`: ports are made in Neutron for the networks that a request names, and removed with its machine.

A port that the request names is attached as it is and never changed here. A port of ours is known by its name, which
holds the instance, the node and its number, together with its `device_id`. Ironic binds it to the node when it is
attached; the machine configures itself by DHCP.
"""

from __future__ import annotations

import builtins
from typing import Any, TypeVar

import httpx
import msgspec
from msgspec import Struct

from bus.clock import Clock
from bus.contracts.base import reason_of
from bus.contracts.cell import InstanceSpec
from bus.faults import Fault
from bus.openstack import answers
from bus.openstack.keystone import KeystoneAuth, SignInUnavailable
from bus.openstack.rest import api_root, auth_of, error_text, tls_of
from compute_sim.config import IronicConfig
from compute_sim.driver import BuildAbort, DriverOutage, DriverUnavailable
from compute_sim.drivers.ironic.api import whole
from compute_sim.drivers.ironic.network import Attachments

T = TypeVar("T")

PORTS = "/v2.0/ports"
MAX_BODY = 2**20
# For a request that Neutron refuses because of an object that it names: an unknown network, no address left, a quota.
REFUSALS = frozenset({400, 404, 409, 413})


class Port(Struct, frozen=True):
    """A port as Neutron's REST API has it, as far as it is needed here."""

    id: str
    name: str = ""
    device_id: str = ""


class Ports(Struct, frozen=True):
    """Neutron's answer to a list of ports."""

    ports: list[Port] = []


class OnePort(Struct, frozen=True):
    """Neutron's answer to a port that was made."""

    port: Port


class NeutronNetwork:
    """The network port's adapter for Neutron's REST API."""

    def __init__(
        self, config: IronicConfig, *, clock: Clock, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Raises SettingsError: the login or the certificates cannot be used."""
        neutron = config.neutron
        verify = tls_of(verify=neutron.verify_tls, ca_file=neutron.ca_file, setting="compute.ironic.neutron.ca_file")
        self._auth = auth_of(
            neutron.keystone,
            username=neutron.username,
            password=neutron.password,
            clock=clock,
            timeout_s=config.request_timeout_s,
            verify=verify,
            setting="compute.ironic.neutron.keystone",
        )
        self._client = httpx.AsyncClient(
            base_url=api_root(neutron.url),
            auth=self._auth,
            timeout=config.request_timeout_s,
            transport=transport,
            verify=verify,
            trust_env=False,
        )

    async def prepare(self, node: str, spec: InstanceSpec) -> Attachments:
        """The ports that the request names, and one of ours for each network. Raises BuildAbort, DriverUnavailable."""
        made: dict[str, str] = {}
        if any(wanted.network is not None for wanted in spec.networks):
            made = {port.name: port.id for port in await self._ours(node, spec.instance_uuid)}
        vifs: builtins.list[str] = []
        for number, wanted in enumerate(spec.networks):
            name = _name(node, spec.instance_uuid, str(number))
            if wanted.port is not None:
                await self._look_at(wanted.port)
                vifs.append(wanted.port)
            elif name in made:
                vifs.append(made[name])
            else:
                assert wanted.network is not None
                vifs.append(await self._make(name, wanted.network, spec))
        return Attachments(tuple(vifs))

    async def release(self, node: str, instance: str) -> None:
        """Remove the ports that were made for this instance on this node. Raises DriverUnavailable."""
        for port in await self._ours(node, instance):
            answer = await whole(self._call("DELETE", f"{PORTS}/{port.id}"))
            if answer.is_error and answer.status_code != httpx.codes.NOT_FOUND:
                raise DriverUnavailable(f"{_words(answer)} (to removing port {port.id})")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        if isinstance(self._auth, KeystoneAuth):
            await self._auth.aclose()

    async def _ours(self, node: str, instance: str) -> builtins.list[Port]:
        answer = await self._call("GET", PORTS, params={"device_id": instance})
        if answer.is_error:
            raise DriverUnavailable(_words(answer))
        prefix = _name(node, instance, "")
        found = _parse(answer, Ports).ports
        return [port for port in found if port.device_id == instance and port.name.startswith(prefix)]

    async def _look_at(self, port: str) -> None:
        """Ironic answers an unknown port as it does a failure of its own, for which every node would be tried."""
        answer = await self._call("GET", f"{PORTS}/{port}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise BuildAbort("network.refused", f"{_words(answer)} (to port {port})")
        if answer.is_error:
            raise DriverUnavailable(_words(answer))

    async def _make(self, name: str, network: str, spec: InstanceSpec) -> str:
        port = {
            "name": name,
            "network_id": network,
            "device_id": spec.instance_uuid,
            "project_id": spec.project_id,
            "admin_state_up": True,
            "binding:vnic_type": "baremetal",
        }
        answer = await whole(self._call("POST", PORTS, {"port": port}))
        if answer.status_code in REFUSALS:
            raise BuildAbort("network.refused", f"{_words(answer)} (to a port on network {network})")
        if answer.is_error:
            raise DriverUnavailable(_words(answer))
        return _parse(answer, OnePort).port.id

    async def _call(
        self, method: str, path: str, body: Any = None, *, params: dict[str, str] | None = None
    ) -> httpx.Response:
        """One request.

        A fault that time or an operator may heal is DriverUnavailable; other answers are the caller's.
        """
        try:
            answer = await answers.request(
                self._client,
                method,
                path,
                max_bytes=MAX_BODY,
                json=body,
                params=params,
            )
        except answers.AnswerTooLarge as error:
            raise DriverUnavailable(f"Neutron: {error}") from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise DriverOutage(f"Neutron: {type(error).__name__}") from error
        except SignInUnavailable as fault:
            raise DriverOutage(fault.reason) from fault
        except Fault as fault:  # our credentials: waiting does not help
            raise DriverUnavailable(fault.reason) from fault
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise DriverOutage(_words(answer))
        return answer


def _name(node: str, instance: str, number: str) -> str:
    """The name of a port of ours."""
    return f"berth-{instance}-{node}-{number}"


def _words(answer: httpx.Response) -> str:
    text = error_text(answer.content)
    return f"Neutron answered {answer.status_code}{': ' if text else ''}{text}"


def _parse(answer: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DriverUnavailable(f"Neutron's answer is not understood: {reason_of(error)}") from error
