"""`berth delete` and `berth instance stop`: of instances that are named, or chosen by project, state and name."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from msgspec import Struct

from berth.cli.common import (
    MAX_LIMIT,
    QUERY_TIMEOUT_S,
    Exit,
    InProject,
    Stop,
    Timeout,
    Yes,
    ask_first,
    by_cell,
    client,
    open_in_time,
    settings_of,
)
from berth.cli.http import MAX_PAGES, connected, each, instance_of, other_site, place_of
from berth.cli.instance.actions import RequestOptions, request_all
from berth.cli.instance.instances import INSTANCES, RequestOutcome, report_requests, wait_for
from berth.cli.output import (
    As,
    Form,
    ListedItems,
    ListOutput,
    out,
    print_list,
)
from berth.client import AsyncClient
from bus.contracts.actions import ActionKind, Condition
from bus.contracts.build import DELETE_REQUESTED, ENDED_WITHOUT_MACHINE, BuildQuery, BuildRecord, BuildState
from bus.faults import Fault

MAX_CHOSEN = 1000  # of one command

Instances = Annotated[
    list[str] | None,
    typer.Argument(help="Names or UUIDs of instances, or their first letters.", metavar="[INSTANCE]..."),
]

CommandedCell = Annotated[
    str | None,
    typer.Option(
        help="Command this cell itself, as operator: for an instance that it has active though the request has ended "
        "(`unrequested` in `berth audit`)."
    ),
]


class InstanceChoice(Struct, frozen=True, kw_only=True):
    """Instances that are not named one by one."""

    state: Annotated[
        str | None, typer.Option("--state", help="Instead of names: all in this state, as `berth list` shows it.")
    ] = None
    name: Annotated[
        str | None, typer.Option("--name", metavar="PATTERN", help="Instead of names: all of such a name (web-*).")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the instances, and do nothing.")] = False


async def delete(
    context: typer.Context,
    instances: Instances = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are destroyed.")] = False,
    cell: CommandedCell = None,
    project: InProject = None,
    timeout_s: Timeout = 120.0,
    form: As = Form.TABLE,
    yes: Yes = False,
    *,
    choice: InstanceChoice,
) -> int:
    """Delete machines, or stop their builds wherever they stand.

    By name, or all of a --project, --state and --name; those are printed before the question.
    """
    if cell is not None and (wait or form.is_data):
        raise typer.BadParameter("the cell does not answer: leave --wait and -o away", param_hint="--cell")
    async with connected(context) as berth:
        records = await _chosen(berth, instances or (), project, choice)
        if not instances:
            records = [one for one in records if one.state not in DELETE_REQUESTED]
        if cell is not None:
            _check_ended(records)
        if not await _agreed("Delete", instances or (), records, choice, cell, form, yes=yes):
            return 0
        if cell is not None:
            await _delete_in_cell(context, cell, records)
            return 0
        return await _delete_all(berth, records, wait=wait, timeout_s=timeout_s, form=form)


async def _delete_all(
    berth: AsyncClient, records: Sequence[BuildRecord], *, wait: bool, timeout_s: float, form: Form
) -> int:
    """Delete them, print what became of each, and return the exit status. Raises Stop, Fault."""
    answers = await each(records, lambda one: berth.delete_build(one.instance_uuid), retry_for_s=timeout_s)
    outcomes, in_time = [], True
    for one, answer in zip(records, answers, strict=True):
        if not isinstance(answer, Fault):
            outcomes.append(RequestOutcome(one.instance_uuid, one.name))
    if wait:
        try:
            outcomes, in_time = await wait_for(berth, outcomes, {BuildState.DELETED}, timeout_s)
        except Fault:
            report_requests(outcomes, form=form)  # they are on record, whatever is away now
            raise
    report_requests(outcomes, form=form)
    for answer in answers:
        if isinstance(answer, Fault):
            raise answer
    if not in_time:
        left = sum(one.state != BuildState.DELETED for one in outcomes)
        raise Stop(Exit.TIME, "timeout", f"{left} were not destroyed in time")
    return 0


async def stop(
    context: typer.Context,
    instances: Instances = None,
    yes: Yes = False,
    *,
    choice: InstanceChoice,
    request: RequestOptions,
) -> int:
    """Stop instances; they keep their allocations.

    By name, or all of a --project, --state and --name; those are printed before the question.
    """
    async with connected(context) as berth:
        records = await _chosen(berth, instances or (), request.project, choice)
        if not instances:
            running = {BuildState.ACTIVE.value, Condition.ACTIVE.value}
            records = [one for one in records if one.state is BuildState.ACTIVE and one.shown_state in running]
            if not await _agreed("Stop", (), records, choice, None, request.form, yes=yes):
                return 0
        return await request_all(berth, ActionKind.STOP, records, request)


async def _chosen(
    berth: AsyncClient, named: Sequence[str], project: str | None, choice: InstanceChoice
) -> list[BuildRecord]:
    """The instances that are named, or all of a choice. Raises Stop, BadParameter."""
    if named:
        if choice.state is not None or choice.name is not None:
            raise typer.BadParameter("name instances, or choose them", param_hint="[INSTANCE]...")
        found = [await instance_of(berth, one, project) for one in named]
        return [*{one.instance_uuid: one for one in found}.values()]
    if (project, choice.state, choice.name) == (None, None, None):
        raise typer.BadParameter("name instances, or give --project, --state or --name", param_hint="[INSTANCE]...")
    state = BuildState(choice.state) if choice.state in {one.value for one in BuildState} else None
    if state is None and choice.state is not None:
        state = BuildState.ACTIVE  # the conditions of an instance are what became of an active one
    chosen = list[BuildRecord]()
    place: dict[str, Any] | None = None
    for _ in range(MAX_PAGES):
        page = await berth.list_builds(project=project, state=state, limit=MAX_LIMIT, **(place or {}))
        chosen += [one for one in page.builds if _is_chosen(one, choice)]
        if len(chosen) > MAX_CHOSEN:
            raise Stop(Exit.USAGE, "choice.too_many", f"more than {MAX_CHOSEN} instances are chosen: choose fewer")
        place = place_of(page)
        if place is None:
            break
    return chosen


def _is_chosen(one: BuildRecord, choice: InstanceChoice) -> bool:
    if choice.state not in (None, one.shown_state):
        return False
    return choice.name is None or fnmatch.fnmatchcase(one.name, choice.name)


async def _agreed(
    verb: str,
    named: Sequence[str],
    records: Sequence[BuildRecord],
    choice: InstanceChoice,
    cell: str | None,
    form: Form,
    *,
    yes: bool,
) -> bool:
    """Print those that were chosen, and ask; whether there is something to do. Raises Stop."""
    if choice.dry_run or not (named or form.is_data):  # else the form is that of the result

        async def plan() -> ListedItems[BuildRecord]:
            return ListedItems(records)

        await print_list(plan, INSTANCES, ListOutput(form=form))
    if choice.dry_run or not records:
        return False
    of_cells: dict[str, list[str]] = defaultdict(list)
    for one in records:
        of_cells[cell or one.cell or "in no cell"].append(one.instance_uuid)
    ask_first(f"{verb} {by_cell(of_cells, 'instance')}", yes=yes)
    return True


def _check_ended(records: Sequence[BuildRecord]) -> None:
    """Raises Stop: a client can delete one."""
    for record in records:
        if record.state not in ENDED_WITHOUT_MACHINE:
            reason = f"{record.instance_uuid} is {record.state}: delete it without --cell"
            raise Stop(Exit.NO, "instance.requested", reason)


async def _delete_in_cell(context: typer.Context, cell: str, records: Sequence[BuildRecord]) -> None:
    """Command the cell, on its bus, to delete instances whose requests have ended: no delete of a client reaches it.
    By the settings in force, and not by a token. Raises Stop where they are of another site than the records.
    """
    from berth.config.site import Site, process_name, with_added_cells  # noqa: PLC0415  (of a site's own machine)
    from bus.contracts.cell import CellDelete  # noqa: PLC0415

    settings = settings_of(context)
    async with client(settings) as berth:
        for one in records:
            query = BuildQuery(instance_uuid=one.instance_uuid)
            found = (await berth.query(query, timeout_s=QUERY_TIMEOUT_S)).builds
            if [(of.created_at, of.project_id) for of in found] != [(one.created_at, one.project_id)]:
                raise other_site(f"instance {one.instance_uuid}")
            _check_ended(found)
    site = Site(settings)
    if cell not in site.settings.cells:
        site = await with_added_cells(site)
    site.check_cell(cell)
    bus = site.bus(process_name("operator"), cell)
    await open_in_time(bus.open())
    try:
        commands = [CellDelete(instance_uuid=one.instance_uuid, project_id=one.project_id) for one in records]
        await bus.publish_all([(command, command.instance_uuid) for command in commands])
    finally:
        await bus.close()
    for one in records:
        out.print(f"{one.instance_uuid}: {cell} is commanded to delete it; `berth audit` lists what is left")
