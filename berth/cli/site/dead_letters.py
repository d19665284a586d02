"""`berth dead-letter`: the messages that were dead-lettered, and the reasons; show, replay or purge them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, TypeVar

import typer
from msgspec import Struct

from berth.cli.common import (
    Exit,
    Stop,
    Yes,
    ask_first,
    open_in_time,
)
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    Time,
    err,
    out,
    print_data,
    print_list,
    print_result,
)
from berth.config.settings import Settings
from berth.config.site import Site, bus_transports
from berth.dead_letters import send_back
from berth.text import counted, printable
from bus.bus import API
from bus.consuming import dead_letters as bus_dead_letters
from bus.consuming.dead_letters import Counts, DeadLetter
from bus.service.settings import SettingsError
from bus.transport import QueueMissing, Transport

MAX_SHOWN = 10_000
MAX_NAMED = 10  # dead letters in one message

# Why dead letters are never replayed, by the code.
BLOCKED = {
    bus_dead_letters.TRUNCATED: "with only the first bytes of its message: not replayed",
}

T = TypeVar("T")


Queue = Annotated[
    str,
    typer.Argument(help="The queue that dead-lettered them, e.g. scheduler.requests; `list` names them."),
]
BusName = Annotated[str, typer.Option("--bus", help="`api`, or a cell's name.")]
Limit = Annotated[int, typer.Option(min=1, max=MAX_SHOWN, help="The most to list, oldest first.")]


class QueueCount(Struct, frozen=True, kw_only=True):
    """How many dead letters a queue has."""

    bus: str
    queue: str
    dead: int


QUEUES = Table[QueueCount]("queue bus dead", lambda one: [one.queue, one.bus, one.dead])


def _dead_row(one: DeadLetter) -> list[Cell]:
    return [one.id, one.code, Time(one.died_at or 0.0), one.type, one.reason, one.routing_key]


DEAD_LETTERS = Table("id code died type reason | routing-key", _dead_row)


async def list_dead_letters(
    settings: Settings,
    queue: Annotated[str | None, typer.Argument(help="One queue; without it, all are counted.")] = None,
    bus: Annotated[
        str | None,
        typer.Option("--bus", help="`api`, or a cell's name; without it, all, or `api` for one queue."),
    ] = None,
    limit: Limit = 100,
    *,
    listing: ListOutput,
) -> None:
    """Count dead letters by bus and by queue, or list those of one queue."""
    site = Site(settings)

    async def count() -> ListedItems[QueueCount]:
        counts = await _counts(site, bus)
        _name_uncounted(counts)
        return ListedItems(
            [
                QueueCount(bus=name, queue=of, dead=dead)
                for name, found in counts.items()
                for of, dead in found.by_queue.items()
            ]
        )

    async def read() -> ListedItems[DeadLetter]:
        found = await _on(site, bus or API, lambda of: bus_dead_letters.list_dead(of, queue or "", limit))
        more = len(found) == limit and limit < MAX_SHOWN
        return ListedItems(found, {"--limit": str(min(limit * 10, MAX_SHOWN))} if more else None)

    if queue is None:
        await print_list(count, QUEUES, listing)
    else:
        await print_list(read, DEAD_LETTERS, listing, _plain)


async def show(
    settings: Settings,
    queue: Queue,
    dead_letter_id: Annotated[str, typer.Argument(help="Its id, as `list QUEUE` prints it.")],
    bus: BusName = API,
    form: As = Form.TABLE,
) -> None:
    """Show one dead letter whole. Its body may contain secrets."""
    found = await _on(Site(settings), bus, lambda transport: bus_dead_letters.list_dead(transport, queue, MAX_SHOWN))
    dead_letter = next((dead_letter for dead_letter in found if dead_letter.id == dead_letter_id), None)
    if dead_letter is None:
        raise Stop(Exit.NO, "dead_letter.unknown", f"{queue} has no dead letter {dead_letter_id}")
    plain = {**_plain(dead_letter), "headers": {name: str(value) for name, value in dead_letter.headers.items()}}
    if form.is_data:
        print_data(plain, form)
        return
    for name, value in plain.items():
        out.print(f"{name:12} {printable(str(value))}", soft_wrap=True, markup=False)


async def replay(
    settings: Settings,
    queue: Queue,
    ids: Annotated[list[str] | None, typer.Argument(help="Which; none with --all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    old: Annotated[
        bool, typer.Option("--old", help="Also those that are too old: they may build a deleted instance again.")
    ] = False,
    bus: BusName = API,
    form: As = Form.TABLE,
    yes: Yes = False,
) -> None:
    """Replay dead letters: send them back to their queue.

    Not a dead letter so old that the record of its delete may be purged.
    """
    if bool(ids) == every:
        raise typer.BadParameter("name the dead letters, or give --all")
    if old:
        which = "all dead letters" if every else counted(len(ids or ()), "dead letter")
        ask_first(f"Replay {which} of {queue} of bus {bus}, those that are too old among them", yes=yes)
    site, wanted = Site(settings), None if every else ids
    back = await _on(
        site,
        bus,
        lambda transport: send_back(transport, queue, wanted, site.settings, now=site.clock.time(), old=old),
    )
    found = {"replayed": back.sent, "too_old": back.too_old, "blocked": back.blocked}
    stopped = f": {', '.join(back.sent)}" if back.fault is not None else ""
    print_result(found, form, f"{len(back.sent)} sent back to {queue}{stopped}")
    if back.fault is not None:
        raise back.fault
    if unknown := sorted(set(ids or ()) - {*back.sent, *back.too_old, *back.blocked}):
        raise Stop(Exit.NO, "dead_letter.unknown", f"not found: {', '.join(unknown)}")
    for code, reason in BLOCKED.items():
        if blocked := [ident for ident, found in back.blocked.items() if found == code]:
            raise Stop(Exit.NO, code, f"{len(blocked)} {reason}: {_named(blocked)}")
    if back.too_old:
        reason = "expired, or older than the records of deletes and releases: not replayed (--old replays them, too)"
        raise Stop(Exit.NO, "dead_letter.too_old", f"{len(back.too_old)} {reason}: {_named(back.too_old)}")


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:MAX_NAMED]) + (", ..." if len(ids) > MAX_NAMED else "")


async def purge(
    settings: Settings,
    queue: Queue,
    yes: Yes = False,
    bus: BusName = API,
    form: As = Form.TABLE,
) -> None:
    """Purge the dead letters of a queue, for good.

    Those that are there when their number is shown; with --yes all.
    """
    site, ids = Site(settings), None
    if not yes:
        ids = [
            dead_letter.id
            for dead_letter in await _on(site, bus, lambda of: bus_dead_letters.list_dead(of, queue, MAX_SHOWN))
        ]
        ask_first(f"Purge the oldest {counted(len(ids), 'dead letter')} of {queue} of bus {bus}", yes=yes)
    purged = await _on(site, bus, lambda transport: bus_dead_letters.purge(transport, queue, ids))
    print_result({"purged": purged}, form, f"{purged} purged")


async def _on(site: Site, bus: str, work: Callable[[Transport], Awaitable[T]]) -> T:
    return await _on_transport((await _buses(site, bus))[bus](), work)


async def _on_transport(transport: Transport, work: Callable[[Transport], Awaitable[T]]) -> T:
    await open_in_time(transport.open())
    try:
        return await work(transport)
    except QueueMissing as fault:
        raise Stop(Exit.USAGE, fault.code, f"there is no such queue: {fault}") from fault
    finally:
        await transport.close()


async def _counts(site: Site, bus: str | None) -> dict[str, Counts]:
    """The dead letters of each bus, or of one; of one that no worker has been on yet, none."""
    return {name: await _on_transport(make(), _counted) for name, make in (await _buses(site, bus)).items()}


async def _buses(site: Site, bus: str | None) -> Mapping[str, Callable[[], Transport]]:
    """All, or the one that is named."""
    buses = await bus_transports(site.environment("dead-letters"))
    if bus is None:
        return buses
    if bus not in buses:
        raise SettingsError("bus.unknown", f"there is no bus {bus!r}; there are {', '.join(buses)}")
    return {bus: buses[bus]}


async def _counted(transport: Transport) -> Counts:
    try:
        return await bus_dead_letters.count(transport)
    except QueueMissing:
        return Counts({}, 0)


def _name_uncounted(counts: Mapping[str, Counts]) -> None:
    for bus, found_on in counts.items():
        if found_on.more:
            err.print(f"{bus}: {found_on.more} more behind the oldest {bus_dead_letters.MAX_COUNTED}", soft_wrap=True)


def _plain(dead_letter: DeadLetter) -> dict[str, object]:
    return {
        "queue": dead_letter.queue,
        "id": dead_letter.id,
        "code": dead_letter.code,
        "reason": dead_letter.reason,
        "type": dead_letter.type,
        "exchange": dead_letter.exchange,
        "routing_key": dead_letter.routing_key,
        "cause": dead_letter.cause,
        "sent_at": dead_letter.sent_at,
        "died_at": dead_letter.died_at,
        "body": dead_letter.body.decode(errors="replace"),
        "truncated_from_bytes": dead_letter.truncated_from,
        "blocks_replay": dead_letter.blocks_replay,
    }
