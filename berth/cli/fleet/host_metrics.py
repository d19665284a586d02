"""`berth host metrics`: the numbers that are known of a host, or a further one."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from berth.cli.common import Exit, Stop
from berth.cli.http import connected
from berth.cli.output import As, Form, out, print_data
from berth.client import AsyncClient
from berth.client.types import MetricsBody
from berth.text import printable, render_rows
from bus.contracts.host_metrics import MAX_NAMES, HostMetricsRecord, MetricName, MetricSource, MetricValue

SEEN_WITHIN_S = 10.0
LOOK_AGAIN_S = 0.1


async def host_metrics(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="Name or UUID of a host.")],
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Publish a number about it, as of now."),
    ] = None,
    source: Annotated[str, typer.Option(help="The program that has measured it, with --set.")] = "operator",
    form: As = Form.TABLE,
) -> None:
    """Show or publish numbers about a host (power, temperature).

    With time and source; one that is too old to count is stale. Exit status 1 when no host is called so.
    """
    values = dict(_parsed(text) for text in given or ())
    if len(values) > MAX_NAMES:
        raise typer.BadParameter(f"at most {MAX_NAMES} at a time", param_hint="--set")
    name = _checked(source, MetricSource, "--source: letters, digits, - and _")

    async with connected(context) as berth:
        if values:
            found = await _publish(berth, host, MetricsBody(values=values, source=name))
        else:
            found = await berth.show_metrics(host)
    if form.is_data:
        print_data(found, form)
        return
    headers = ["host", "metric", "value", "at", "source", ""]
    render_rows(out, headers, [row for record in found for row in _metric_rows(record)])


async def _publish(berth: AsyncClient, host: str, body: MetricsBody) -> tuple[HostMetricsRecord, ...]:
    """Publish, and wait until the scheduler that answers knows it. Events go unconfirmed by their readers."""
    sent = await berth.publish_metrics(host, body)
    for _ in range(int(SEEN_WITHIN_S / LOOK_AGAIN_S)):
        found = await berth.show_metrics(sent.host_uuid)
        newest = {one.name: one.at for one in found[0].metrics}
        if all(newest.get(name, 0.0) >= sent.at for name in body.values):
            return found
        await asyncio.sleep(LOOK_AGAIN_S)
    raise Stop(Exit.TIME, "metrics.not_taken", f"no scheduler has accepted it within {SEEN_WITHIN_S:g} s")


def _metric_rows(record: HostMetricsRecord) -> list[list[str]]:
    return [
        [
            record.host,
            one.name,
            f"{one.value:g}",
            datetime.fromtimestamp(one.at, UTC).isoformat(timespec="seconds"),
            one.source,
            "" if one.fresh else "stale",
        ]
        for one in record.metrics
    ]


def _parsed(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        equals = ""
    if not equals:
        raise typer.BadParameter(f"{printable(text)} is not NAME=VALUE", param_hint="--set")
    wrong = "--set: a name as power.watts, and a number up to 1e15"
    return str(_checked(name, MetricName, wrong)), float(_checked(number, MetricValue, wrong))


def _checked(given: str | float, kind: Any, wrong: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        raise typer.BadParameter(wrong) from None
