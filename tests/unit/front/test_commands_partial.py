"""Commands and pages: partial results lost, secrets shown, tokens cut, wrong findings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import berth.commands.hosts as hosts_commands
from berth.commands.common import Stop
from berth.settings import FencingSettings, Settings
from bus.contracts.build import HostRecord
from bus.contracts.operations import AdminState, HostAdminState, SetAdminState
from bus.faults import RequestRefused, RequestTimeout
from bus.service.settings import redact

TEMPLATES = Path(hosts_commands.__file__).parents[1] / "web" / "templates"


@pytest.mark.xfail(strict=True, reason="Found A3")
async def test_what_was_fenced_before_a_timeout_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`berth hosts fence h1 h2 h3`: h1 is fenced, no scheduler answers about h2. Nothing names h1 as fenced."""
    asked: list[str] = []

    class Client:
        async def set_admin_state(self, decision: SetAdminState, **_: Any) -> HostAdminState:
            asked.append(decision.host)
            if decision.host == "h2":
                raise RequestTimeout("no answer")
            return HostAdminState(
                host_uuid="00000000-0000-4000-8000-000000000001", host=decision.host, state=decision.state
            )

    @contextlib.asynccontextmanager
    async def client(_: Settings) -> AsyncIterator[Client]:
        yield Client()

    monkeypatch.setattr(hosts_commands, "client", client)
    commands = [SetAdminState(host=name, state=AdminState.FENCED, reason="r", by="me") for name in ("h1", "h2", "h3")]
    decided, refused = await hosts_commands._set_states(Settings(), commands, 1.0, switch_off=False)
    assert [one.host for one in decided] == ["h1", "h3"] and [name for name, _ in refused] == ["h2"]


@pytest.mark.xfail(strict=True, reason="Found B24")
def test_a_plugins_password_is_hidden_by_berth_config() -> None:
    settings = Settings(fencing=FencingSettings(plugin="ipmi", options={"user": "root", "password": "s3cret-pw"}))
    assert "s3cret-pw" not in str(redact(settings))


@pytest.mark.xfail(strict=True, reason="Found B24")
def test_the_login_page_takes_a_token_of_keystone() -> None:
    """The server takes 8 KiB; the page cuts a pasted JWS token at 512 characters."""
    found = re.search(r'name="token"[^>]*maxlength="(\d+)"', (TEMPLATES / "login.html").read_text())
    assert found is None or int(found[1]) >= 8192


@pytest.mark.xfail(strict=True, reason="Found B24")
def test_baremetal_goes_by_the_flavors_on_record() -> None:
    """`berth baremetal problems` reads flavors of the settings file; those of `berth flavors set` do not count."""
    text = (Path(hosts_commands.__file__).parent / "baremetal.py").read_text()
    assert "settings.scheduler.flavors" not in text


@pytest.mark.xfail(strict=True, reason="Found B24")
async def test_a_uuid_names_the_host_that_has_it() -> None:
    """The web and the scheduler prefer the uuid. `hosts fence UUID --switch-off` takes a host of another cell that
    calls itself by that uuid for an equal: `host.ambiguous`, "name a UUID", and the host cannot be switched off.
    """

    ours = HostRecord(uuid="00000000-0000-4000-8000-000000000001", name="h1", cell="c1")
    liar = HostRecord(uuid="00000000-0000-4000-8000-000000000002", name=ours.uuid, cell="c2")

    class Client:
        async def hosts(self, **_: Any) -> Any:
            return SimpleNamespace(hosts=[ours, liar])

    assert await hosts_commands.named_host(Client(), ours.uuid, None) == ours  # type: ignore[arg-type]


@pytest.mark.xfail(strict=True, reason="Found A3")
def test_every_refused_host_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """`3 refused; h2: ...`: which the two others are is told with --json alone."""

    refused = [(name, RequestRefused("no", code="host.unknown")) for name in ("h2", "h3", "h4")]
    with pytest.raises(Stop) as stop:
        hosts_commands.finish("host", [], refused, lambda _: None, as_json=False)
    said = str(stop.value) + capsys.readouterr().out + capsys.readouterr().err
    assert all(name in said for name in ("h2", "h3", "h4"))
