"""`berth node`: Ironic's nodes, what serves and what does not."""

from __future__ import annotations

from typing import Annotated

import typer

from berth.cli.common import Exit, one_of
from berth.cli.http import connected
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
from berth.client.types import NodeMaintenance, NodeRecord
from berth.text import render_rows

NodeIdent = Annotated[str, typer.Argument(help="The node's UUID, its first letters, or its name.", metavar="NODE")]


async def list_nodes(context: typer.Context, *, listing: ListOutput) -> None:
    """List all nodes, with the fault of each."""
    async with connected(context) as berth:

        async def read() -> ListedItems[NodeRecord]:
            return ListedItems((await berth.show_nodes()).nodes)

        await print_list(read, NODES, listing)


async def problems(context: typer.Context, form: As = Form.TABLE) -> int:
    """List nodes that no build can go to, with reasons, and flavors that no node serves. Exit status 1 if there are."""
    async with connected(context) as berth:
        found = await berth.show_nodes()
    wrong, flavors = [node for node in found.nodes if node.problems], found.unserved_flavors
    if form.is_data:
        print_data({"nodes": wrong, "flavors": flavors}, form)
    else:
        for node in wrong:
            print_line(f"node {node.uuid}: {_row(node)[-1]}")
        for flavor in flavors:
            out.print(f"flavor {flavor}: no node has the class that it requests", soft_wrap=True, markup=False)
    return Exit.NO if wrong or flavors else 0


async def show(context: typer.Context, node: NodeIdent, form: As = Form.TABLE) -> None:
    """Show one node: what berth makes of it, and Ironic's own words."""
    async with connected(context) as berth:
        known = {one.uuid: one for one in (await berth.show_nodes()).nodes}
    record = known[one_of("node", "node.unknown", node, {uuid: one.name or "" for uuid, one in known.items()})]
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
    context: typer.Context,
    node: NodeIdent,
    reason: Annotated[str, typer.Option(help="The reason; Ironic shows it.")],
    form: As = Form.TABLE,
) -> None:
    """Put a node into maintenance in Ironic, with a reason: no build goes there. Instances on it continue to run."""
    async with connected(context) as berth:
        await berth.set_node_maintenance(node, NodeMaintenance(reason=reason))
    print_result({"node": node, "maintenance": True}, form, f"{node}: in maintenance")


async def release(context: typer.Context, node: NodeIdent, form: As = Form.TABLE) -> None:
    """Take a node out of the maintenance that `quarantine` set; another's maintenance is left alone."""
    async with connected(context) as berth:
        await berth.end_node_maintenance(node)
    print_result({"node": node, "maintenance": False}, form, f"{node}: out of maintenance")


def _row(node: NodeRecord) -> list[Cell]:
    reason = [f"Ironic: {node.ironic_reason}"] if node.problems and node.ironic_reason else []
    problem = "; ".join((*node.problems, *reason))
    place = [node.name or "", node.resource_class or "", node.state, node.power]
    return [Id(node.uuid), *place, Id(node.instance or ""), problem]


NODES = Table("node name class state power instance problem", _row)
