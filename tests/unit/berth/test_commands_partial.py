"""Commands and pages: partial results lost, secrets shown, tokens cut, wrong findings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from msgspec.structs import replace

import berth.cli.fleet.hosts as hosts_commands
from berth.cli.common import Exit, Stop
from berth.cli.instance import several
from berth.cli.output import Form
from berth.cli.session.contexts import NO_CONTEXT, ContextFault
from berth.client import ApiTimeout
from berth.client.types import AdminStateRequest
from berth.config.settings import FencingSettings, Settings
from bus.contracts.build import BuildPage, BuildRecord, BuildState, HostRecord
from bus.contracts.operations import HostAdminState, ServiceRecord
from bus.faults import RequestRefused, RequestTimeout
from bus.service.settings import redact
from bus.transport import BusUnavailable
from tests.kit.api_client import CONTEXT, answered_by

TEMPLATES = Path(hosts_commands.__file__).parents[2] / "web" / "templates"


async def test_what_was_fenced_before_a_timeout_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`berth host fence h1 h2 h3`: h1 is fenced, no scheduler answers about h2. Nothing names h1 as fenced."""

    class Client:
        async def decide_about_host(self, host: str, body: AdminStateRequest) -> HostAdminState:
            if host == "h2":
                raise ApiTimeout("no answer")
            return HostAdminState(host_uuid="00000000-0000-4000-8000-000000000001", host=host, state=body.state)

    answered_by(monkeypatch, Client(), hosts_commands)
    fence = partial(hosts_commands.fence, CONTEXT, ["h1", "h2", "h3"], "r")
    with pytest.raises(Stop) as stop:
        await fence(decision=hosts_commands.FenceOptions(yes=True))
    assert stop.value.status == Exit.TIME
    printed = capsys.readouterr().out
    assert "h1: fenced" in printed and "h3: fenced" in printed
    assert await fence(decision=hosts_commands.FenceOptions(yes=True, form=Form.JSON)) == Exit.TIME
    found = json.loads(capsys.readouterr().out)
    assert [one["host"] for one in found["hosts"]] == ["h1", "h3"]
    assert [one["host"] for one in found["refused"]] == ["h2"]


async def test_where_nothing_answers_the_others_are_not_tried() -> None:
    asked: list[str] = []

    async def work(name: str) -> str:
        asked.append(name)
        raise RequestTimeout("no answer") if name == "h0" else BusUnavailable("cut")

    _, refused = await hosts_commands._each([f"h{n}" for n in range(9)], work)
    assert asked == ["h0", "h1"] and len(refused) == 9
    assert {fault.code for _, fault in refused[2:]} == {"command.not_commanded"}


async def test_what_was_done_before_an_interrupt_is_returned() -> None:
    """Ctrl-C while the second of three hosts is switched off: nothing said that the first one is fenced."""
    begun = asyncio.Event()

    async def work(name: str) -> str:
        if name == "h2":
            begun.set()
            await asyncio.get_running_loop().create_future()
        return name

    task = asyncio.ensure_future(hosts_commands._each(["h1", "h2", "h3"], work))
    await begun.wait()
    task.cancel()
    done, refused = await task
    codes = [("h2", "command.interrupted"), ("h3", "command.not_commanded")]
    assert (done, [(name, fault.code) for name, fault in refused]) == (["h1"], codes)


FLEET = tuple(
    HostRecord(uuid=f"00000000-0000-4000-8000-00000000000{n}", name=f"h{n}", cell=f"c{n % 2}") for n in (1, 2, 3)
)
ENDED = BuildRecord(
    instance_uuid="00000000-0000-4000-8000-0000000000aa",
    flavor="m1",
    project_id="p",
    state=BuildState.DELETED,
    created_at=1.0,
    updated_at=1.0,
)
SERVICES = (ServiceRecord(name="s", cell="c1", up=False), ServiceRecord(name="s", cell="c2", up=False))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (partial(hosts_commands.fence, CONTEXT, ["h1", "h2", "h3", "h9"], "r"), ("c1 2: h1, h3", "c0 1: h2", "h9")),
        (partial(hosts_commands.delete_hosts, CONTEXT, ["h1"], "r"), ("1 host", "c1")),
        (partial(hosts_commands.end_fences, CONTEXT, ["h1"], "r", force=True), ("1 host", "c1")),
        (partial(hosts_commands.delete_services, CONTEXT, ["s"], "r"), ("1 service", "c1 or c2")),
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
async def test_hosts_and_services_are_named_by_cell_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, command: Any, words: tuple[str, ...], terminal: bool
) -> None:
    class Client:
        async def list_hosts(self, **_: Any) -> Any:
            return FLEET

        async def list_services(self, **_: Any) -> Any:
            return SERVICES

    asked: list[str] = []
    answered_by(monkeypatch, Client(), hosts_commands)
    monkeypatch.setattr(typer, "confirm", lambda text, **_: asked.append(text))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: terminal))
    with pytest.raises(Stop) as stop:
        await command(decision=hosts_commands.FenceOptions())
    assert stop.value.code == ("command.declined" if terminal else "command.unconfirmed")
    assert all(word in (asked[0] if terminal else str(stop.value)) for word in words)


def test_a_plugins_password_is_hidden_by_berth_config() -> None:
    settings = Settings(fencing=FencingSettings(plugin="ipmi", options={"user": "root", "password": "s3cret-pw"}))
    assert "s3cret-pw" not in str(redact(settings))


def test_the_login_page_takes_a_token_of_keystone() -> None:
    """The server takes 8 KiB; the page cuts a pasted JWS token at 512 characters."""
    found = re.search(r'name="token"[^>]*maxlength="(\d+)"', (TEMPLATES / "login.html").read_text())
    assert found is None or int(found[1]) >= 8192


def test_baremetal_goes_by_the_flavors_on_record() -> None:
    """`berth node check` reads flavors of the settings file; those of `berth flavor set` do not count."""
    text = (Path(hosts_commands.__file__).parent / "baremetal.py").read_text()
    assert "settings.scheduler.flavors" not in text


async def test_a_uuid_names_the_host_that_has_it() -> None:
    """The web and the scheduler prefer the uuid. `hosts fence UUID --switch-off` takes a host of another cell that
    calls itself by that uuid for an equal: `host.ambiguous`, "name a UUID", and the host cannot be switched off.
    """

    ours = HostRecord(uuid="00000000-0000-4000-8000-000000000001", name="h1", cell="c1")
    liar = HostRecord(uuid="00000000-0000-4000-8000-000000000002", name=ours.uuid, cell="c2")

    class Client:
        async def list_hosts(self, **_: Any) -> Any:
            return ours, liar

    assert await hosts_commands.named_host(Client(), ours.uuid, None) == ours  # type: ignore[arg-type]


@pytest.mark.parametrize(("known", "code"), [((0, 1, 2), ""), ((0, 2), "context.other_site"), (None, "")])
async def test_what_is_done_by_the_settings_is_done_to_the_site_of_the_context_alone(
    monkeypatch: pytest.MonkeyPatch, known: tuple[int, ...] | None, code: str
) -> None:
    """`berth host fence h2 --switch-off` with the address of one site and the settings of another, or with none."""

    class Client:
        async def list_hosts(self, **_: Any) -> Any:
            if known is None:
                raise ContextFault("no address", code=NO_CONTEXT)
            return [FLEET[at] for at in known]

    answered_by(monkeypatch, Client(), hosts_commands)
    with pytest.raises(Stop) if code else contextlib.nullcontext() as stop:
        await hosts_commands._check_site(CONTEXT, FLEET[:2])
    assert stop is None or (stop.value.status, stop.value.code) == (Exit.USAGE, code)


@pytest.mark.parametrize("of_settings", [None, replace(ENDED, created_at=2.0), replace(ENDED, state=BuildState.ACTIVE)])
async def test_a_cell_deletes_nothing_that_its_own_site_does_not_have_as_ended(
    monkeypatch: pytest.MonkeyPatch, of_settings: BuildRecord | None
) -> None:
    """`berth delete X --cell c1` read the record by the address in force, and commanded the cell of the settings."""

    class BusClient:
        async def query(self, *_: Any, **__: Any) -> BuildPage:
            return BuildPage(builds=() if of_settings is None else (of_settings,))

    @contextlib.asynccontextmanager
    async def client(_: Settings) -> AsyncIterator[BusClient]:
        yield BusClient()

    monkeypatch.setattr(several, "client", client)
    monkeypatch.setattr(several, "settings_of", lambda _: Settings())
    with pytest.raises(Stop) as stop:
        await several._delete_in_cell(CONTEXT, "c1", [ENDED])
    is_same = of_settings is not None and of_settings.created_at == ENDED.created_at
    assert stop.value.code == ("instance.requested" if is_same else "context.other_site")


def test_every_refused_host_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """`3 refused; h2: ...`: which the two others are is told by JSON alone."""

    refused = [(name, RequestRefused("no", code="host.unknown")) for name in ("h2", "h3", "h4")]
    with pytest.raises(Stop) as stop:
        hosts_commands.finish("host", [], refused, lambda _: None, form=Form.TABLE)
    said = str(stop.value) + capsys.readouterr().out + capsys.readouterr().err
    assert all(name in said for name in ("h2", "h3", "h4"))
