"""`berth dead-letter`: the messages that were dead-lettered, and the reasons; show, replay or purge them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from msgspec.structs import asdict

from berth.cli.common import Exit, Stop, Yes, ask_first, further
from berth.cli.http import check_cell, connected
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    Time,
    out,
    print_data,
    print_list,
    print_result,
)
from berth.client.types import DeadLetterCount, DeadLetterView, ReplayBody
from berth.text import counted, printable

API = "api"
MAX_SHOWN = 10_000
MAX_NAMED = 10  # dead letters in one message

# Why dead letters are never replayed, by the code.
BLOCKED = {
    "dead_letter.truncated": "with only the first bytes of its message: not replayed",
}


Queue = Annotated[
    str,
    typer.Argument(help="The queue that dead-lettered them, e.g. scheduler.requests; `list` names them."),
]
BusName = Annotated[str, typer.Option("--bus", help="`api`, or a cell's name.")]
Limit = Annotated[int, typer.Option(min=1, max=MAX_SHOWN, help="The most to list, oldest first.")]


QUEUES = Table[DeadLetterCount]("queue bus dead", lambda one: [one.queue, one.bus, one.dead])


def _dead_row(one: DeadLetterView) -> list[Cell]:
    return [one.id, one.code, Time(one.died_at or 0.0), one.type, one.reason, one.routing_key]


DEAD_LETTERS = Table("id code died type reason | routing-key", _dead_row)


async def list_dead_letters(
    context: typer.Context,
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
    async with connected(context) as berth:
        await check_cell(berth, None if queue is not None or bus == API else bus)

        async def count() -> ListedItems[DeadLetterCount]:
            return ListedItems([one for one in await berth.count_dead_letters() if bus in (None, one.bus)])

        async def read() -> ListedItems[DeadLetterView]:
            found = await berth.list_dead_letters(bus or API, queue or "", limit=limit)
            return ListedItems(found, further(found, limit, MAX_SHOWN))

        if queue is None:
            await print_list(count, QUEUES, listing)
        else:
            await print_list(read, DEAD_LETTERS, listing)


async def show(
    context: typer.Context,
    queue: Queue,
    dead_letter_id: Annotated[str, typer.Argument(help="Its id, as `list QUEUE` prints it.")],
    bus: BusName = API,
    form: As = Form.TABLE,
) -> None:
    """Show one dead letter whole. Its body may contain secrets."""
    async with connected(context) as berth:
        found = await berth.show_dead_letter(bus, queue, dead_letter_id)
    if form.is_data:
        print_data(found, form)
        return
    for name, value in asdict(found).items():
        out.print(f"{name:12} {printable(str(value))}", soft_wrap=True, markup=False)


async def replay(
    context: typer.Context,
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
    async with connected(context) as berth:
        body = ReplayBody(ids=None if every else tuple(ids or ()), old=old)
        back = await berth.replay_dead_letters(bus, queue, body)
    sent, too_old = list(back.replayed), list(back.too_old)
    found = {"replayed": sent, "too_old": too_old, "blocked": back.blocked}
    stopped = f": {', '.join(sent)}" if back.fault else ""
    print_result(found, form, f"{len(sent)} sent back to {queue}{stopped}")
    if back.fault:
        raise Stop(Exit.UNAVAILABLE, "bus.unavailable", back.fault)
    if unknown := sorted(set(ids or ()) - {*sent, *too_old, *back.blocked}):
        raise Stop(Exit.NO, "dead_letter.unknown", f"not found: {', '.join(unknown)}")
    for code, reason in BLOCKED.items():
        if blocked := [ident for ident, found_code in back.blocked.items() if found_code == code]:
            raise Stop(Exit.NO, code, f"{len(blocked)} {reason}: {_named(blocked)}")
    if too_old:
        reason = "expired, or older than the records of deletes and releases: not replayed (--old replays them, too)"
        raise Stop(Exit.NO, "dead_letter.too_old", f"{len(too_old)} {reason}: {_named(too_old)}")


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:MAX_NAMED]) + (", ..." if len(ids) > MAX_NAMED else "")


async def purge(
    context: typer.Context,
    queue: Queue,
    yes: Yes = False,
    bus: BusName = API,
    form: As = Form.TABLE,
) -> None:
    """Purge the dead letters of a queue, for good.

    Those that are there when their number is shown; with --yes all.
    """
    async with connected(context) as berth:
        until = None
        if not yes:
            there = await berth.list_dead_letters(bus, queue, limit=MAX_SHOWN)
            ask_first(f"Purge the oldest {counted(len(there), 'dead letter')} of {queue} of bus {bus}", yes=yes)
            until = there[-1].id if there else ""
        purged = 0 if until == "" else (await berth.purge_dead_letters(bus, queue, until=until)).purged
    print_result({"purged": purged}, form, f"{purged} purged")
