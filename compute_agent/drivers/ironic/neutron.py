"""`network = "neutron"`: ports are made in Neutron for the networks of a request, and removed with its machine."""

# berth's own login may use all networks and ports; a machine gets those that its project may use alone. A port that the
# request names is attached as it is and never changed here. A port of berth's is known by its name, which holds the
# instance, the node and its number, together with its `device_id`, network and project. Ironic binds it to the node
# when it is attached; the machine configures itself by DHCP.

from __future__ import annotations

import builtins
from typing import Any, TypeVar

import httpx
import msgspec
from msgspec import Struct

from bus.clock import Clock
from bus.contracts.base import reason_of
from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import NetworkRequest
from bus.faults import Fault
from bus.openstack import answers
from bus.openstack.keystone import KeystoneAuth, SignInUnavailable
from bus.openstack.rest import api_root, auth_of, error_text, tls_of
from compute_agent.driver import BuildAbort, DriverOutage, DriverUnavailable
from compute_agent.drivers.ironic.api import whole
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.network import OTHER_PROJECT, Attachments

T = TypeVar("T")

PORTS = "/v2.0/ports"
NETWORKS = "/v2.0/networks"
RBAC_POLICIES = "/v2.0/rbac-policies"
EVERY_PROJECT = "*"  # as the target of a policy
MAX_BODY = 2**20
# For a request that Neutron refuses because of an object that it names: an unknown network, no address left, a quota.
REFUSALS = frozenset({400, 404, 409, 413})


class Port(Struct, frozen=True):
    """A port as Neutron's REST API has it, as far as it is needed here."""

    id: str
    name: str = ""
    device_id: str = ""
    network_id: str = ""
    project_id: str = ""


class Ports(Struct, frozen=True):
    """Neutron's answer to a list of ports."""

    ports: list[Port] = []


class OnePort(Struct, frozen=True):
    """Neutron's answer about one port."""

    port: Port


class OwnedNetwork(Struct, frozen=True):
    """A network as Neutron's REST API has it, without `shared`, which holds for the project that asks, berth's."""

    project_id: str = ""


class OneNetwork(Struct, frozen=True):
    """Neutron's answer about one network."""

    network: OwnedNetwork


class RbacPolicy(Struct, frozen=True):
    """A project that an object is shared with."""

    target_tenant: str = ""


class RbacPolicies(Struct, frozen=True):
    """Neutron's answer to a list of them."""

    rbac_policies: list[RbacPolicy] = []


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
        """The request's ports, and one of berth's for each network. Raises BuildAbort, DriverUnavailable."""
        for wanted in spec.networks:
            await self._check(wanted, spec, node)
        made: dict[tuple[str, str, str], str] = {}
        if any(wanted.network is not None for wanted in spec.networks):
            owned = await self._owned_ports(node, spec.instance_uuid)
            made = {(port.name, port.network_id, port.project_id): port.id for port in owned}
        vifs: builtins.list[str] = []
        for number, wanted in enumerate(spec.networks):
            name = _name(node, spec.instance_uuid, str(number))
            if wanted.network is None:
                assert wanted.port is not None
                vifs.append(wanted.port)
            else:
                known = made.get((name, wanted.network, spec.project_id))
                vifs.append(known or await self._make(name, wanted.network, spec))
        return Attachments(tuple(vifs))

    async def release(self, node: str, instance: str) -> None:
        """Remove the ports that were made for this instance on this node. Raises DriverUnavailable."""
        for port in await self._owned_ports(node, instance):
            answer = await whole(self._call("DELETE", f"{PORTS}/{port.id}"))
            if answer.is_error and answer.status_code != httpx.codes.NOT_FOUND:
                raise DriverUnavailable(f"{_words(answer)} (to removing port {port.id})")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        if isinstance(self._auth, KeystoneAuth):
            await self._auth.aclose()

    async def _owned_ports(self, node: str, instance: str) -> builtins.list[Port]:
        prefix = _name(node, instance, "")
        found = (await self._one(PORTS, Ports, params={"device_id": instance})).ports
        return [port for port in found if port.device_id == instance and port.name.startswith(prefix)]

    async def _check(self, wanted: NetworkRequest, spec: InstanceSpec, node: str) -> None:
        """Raises BuildAbort: a login of the project could not use the port or network, or the port is in use."""
        # Ironic answers an unknown port as it does a failure of its own, for which every node would be tried. One that
        # is another machine's it would take away from that.
        project = spec.project_id
        if wanted.port is not None:
            what, port = f"port {wanted.port}", (await self._one(f"{PORTS}/{wanted.port}", OnePort)).port
            may_use = port.project_id == project
            if may_use and port.device_id not in ("", spec.instance_uuid, node):
                raise BuildAbort("network.refused", f"{what} is in use by {port.device_id}")
        else:
            what = f"network {wanted.network}"
            owner = (await self._one(f"{NETWORKS}/{wanted.network}", OneNetwork)).network.project_id
            may_use = owner == project or await self._is_shared(str(wanted.network), project)
        if not may_use:
            raise BuildAbort(OTHER_PROJECT, f"{what} is not of project {project}, and not shared with it")

    async def _is_shared(self, network: str, project: str) -> bool:
        """Whether a policy lets the project use the network; one that is shared with every project has one, too."""
        params = {"object_type": "network", "object_id": network, "action": "access_as_shared"}
        policies = (await self._one(RBAC_POLICIES, RbacPolicies, params=params)).rbac_policies
        return any(policy.target_tenant in (project, EVERY_PROJECT) for policy in policies)

    async def _one(self, path: str, kind: type[T], *, params: dict[str, str] | None = None) -> T:
        """What Neutron has there; params: of a list. Raises BuildAbort: there is no such thing; DriverUnavailable."""
        answer = await self._call("GET", path, params=params)
        if answer.status_code == httpx.codes.NOT_FOUND and params is None:
            raise BuildAbort("network.refused", f"{_words(answer)} (to {path})")
        if answer.is_error:
            raise DriverUnavailable(_words(answer))
        return _parse(answer, kind)

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
        """One request. A fault that time or an operator may heal is DriverUnavailable; other answers are returned."""
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
    """The name of a port of berth's."""
    return f"berth-{instance}-{node}-{number}"


def _words(answer: httpx.Response) -> str:
    text = error_text(answer.content)
    return f"Neutron answered {answer.status_code}{': ' if text else ''}{text}"


def _parse(answer: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DriverUnavailable(f"Neutron's answer is not understood: {reason_of(error)}") from error
