"""`berth node`: Ironic's nodes, what serves and what does not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer

from berth.bus_client.baremetal import QUARANTINE, flavor_classes, node_record, unserved
from berth.bus_client.object_edits import stored_objects
from berth.cli.common import (
    QUERY_TIMEOUT_S,
    Exit,
    Stop,
    client,
)
from berth.cli.output import (
    As,
    Cell,
    Form,
    Id,
    ListedItems,
    ListOutput,
    Table,
    out,
    print_data,
    print_line,
    print_list,
    print_result,
)
from berth.client.types import NodeRecord
from berth.config.settings import Settings
from berth.config.site import ironic_of
from berth.text import render_rows
from bus.clock import SystemClock
from bus.contracts.objects import ObjectKind
from bus.service.settings import hide_password
from compute_agent.driver import DriverUnavailable
from compute_agent.drivers.ironic.api import IronicApi, Refused

NodeIdent = Annotated[str, typer.Argument(help="The node's UUID or name.", metavar="NODE")]


async def list_nodes(settings: Settings, *, listing: ListOutput) -> None:
    """List all nodes, with the fault of each."""

    async def read() -> ListedItems[NodeRecord]:
        return ListedItems(await records(settings, await _classes(settings)))

    await print_list(read, NODES, listing)


async def problems(settings: Settings, form: As = Form.TABLE) -> int:
    """List nodes that no build can go to, with reasons, and flavors that no node serves. Exit status 1 if there are."""
    classes = await _classes(settings)
    found = await records(settings, classes)
    wrong = [node for node in found if node.problems]
    flavors = unserved(classes, found)
    if form.is_data:
        print_data({"nodes": wrong, "flavors": flavors}, form)
    else:
        for node in wrong:
            print_line(f"node {node.uuid}: {_row(node)[-1]}")
        for flavor in flavors:
            out.print(f"flavor {flavor}: no node has the class that it requests", soft_wrap=True, markup=False)
    return Exit.NO if wrong or flavors else 0


async def show(settings: Settings, node: NodeIdent, form: As = Form.TABLE) -> None:
    """Show one node: what berth makes of it, and Ironic's own words."""
    async with _ironic(settings) as api:
        raw = await api.raw_node(node)
    if raw is None:
        raise Stop(Exit.NO, "node.unknown", f"Ironic has no node {node}")
    record = node_record(raw, await _classes(settings))
    if form.is_data:
        print_data(record, form)
        return
    rows = [
        ("uuid", record.uuid),
        ("name", record.name),
        ("class", record.resource_class),
        ("flavors", ", ".join(record.serves)),
        ("state", record.state),
        ("power", record.power),
        ("instance", f"{record.instance} ({'ours' if record.own else 'foreign'})" if record.instance else ""),
        *(("problem", problem) for problem in record.problems),
        ("Ironic's reason", record.ironic_reason),
    ]
    render_rows(out, ("what", "value"), [row for row in rows if row[1]])


async def quarantine(
    settings: Settings,
    node: NodeIdent,
    reason: Annotated[str, typer.Option(help="The reason; Ironic shows it.")],
    form: As = Form.TABLE,
) -> None:
    """Put a node into maintenance in Ironic, with a reason: no build goes there. Instances on it continue to run."""
    async with _ironic(settings) as api:
        await _known(api, node)
        _check_accepted(await api.set_maintenance(node, on=True, reason=f"{QUARANTINE}{reason}"))
    print_result({"node": node, "maintenance": True}, form, f"{node}: in maintenance")


async def release(settings: Settings, node: NodeIdent, form: As = Form.TABLE) -> None:
    """Take a node out of the maintenance that `quarantine` set; another's maintenance is left alone."""
    async with _ironic(settings) as api:
        raw = await _known(api, node)
        reason = str(raw.get("maintenance_reason") or "")
        if not raw.get("maintenance") or not reason.startswith(QUARANTINE):
            raise Stop(Exit.NO, "node.not_quarantined", f"node {node} is not in quarantine by berth: {reason or '-'}")
        _check_accepted(await api.set_maintenance(node, on=False))
    print_result({"node": node, "maintenance": False}, form, f"{node}: out of maintenance")


@asynccontextmanager
async def _ironic(settings: Settings) -> AsyncIterator[IronicApi]:
    """Ironic as the compute service's settings have it, or as a running `berth up` has one."""
    config = ironic_of(settings) or settings.compute.ironic
    api = IronicApi(config, clock=SystemClock())
    api.open()
    try:
        yield api
    except DriverUnavailable as fault:
        raise Stop(Exit.UNAVAILABLE, "ironic.unavailable", f"{hide_password(config.url)}: {fault}") from fault
    finally:
        await api.close()


async def _classes(settings: Settings) -> dict[str, tuple[str, ...]]:
    """By the flavors on record: an operator changes them while everything runs."""
    async with client(settings) as berth:
        stored = stored_objects(berth.bus, ObjectKind.FLAVOR, timeout_s=QUERY_TIMEOUT_S)
        return flavor_classes([one async for one in stored])


async def records(settings: Settings, classes: Mapping[str, tuple[str, ...]]) -> list[NodeRecord]:
    """Ironic's nodes by uuid. classes: which flavors request each class. Raises Stop."""
    async with _ironic(settings) as api:
        return sorted((node_record(raw, classes) for raw in await api.raw_nodes()), key=lambda node: node.uuid)


async def _known(api: IronicApi, node: str) -> dict[str, Any]:
    raw = await api.raw_node(node)
    if raw is None:
        raise Stop(Exit.NO, "node.unknown", f"Ironic has no node {node}")
    return raw


def _check_accepted(refused: Refused | None) -> None:
    if refused is not None:
        raise Stop(Exit.NO, "ironic.refused", str(refused))


def _row(node: NodeRecord) -> list[Cell]:
    reason = [f"Ironic: {node.ironic_reason}"] if node.problems and node.ironic_reason else []
    problem = "; ".join((*node.problems, *reason))
    place = [node.name or "", node.resource_class or "", node.state, node.power]
    return [Id(node.uuid), *place, Id(node.instance or ""), problem]


NODES = Table("node name class state power instance problem", _row)
