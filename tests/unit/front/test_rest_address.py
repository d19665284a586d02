"""Where the REST API is served when only `--http`, or nothing, is given, and that no door is open by accident."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from berth.cli import app
from berth.commands import placement
from berth.rest_address import LOOPBACK, at_http, for_up
from berth.settings import Settings, UpSettings
from berth.trial.embedded.process import free_port
from bus.service.environment import Environment
from placement_worker.rest.auth import TokenFile
from placement_worker.rest.config import KeystoneConfig, RestConfig

TOKENS = RestConfig(auth="tokens", token_file="/etc/berth/tokens.toml")
KEYSTONE = RestConfig(auth="keystone", keystone=KeystoneConfig(auth_url="http://keystone:5000"))


def having(rest: RestConfig, **fields: str) -> Settings:
    settings = Settings(**fields)
    return replace(settings, placement=replace(settings.placement, rest=rest))


@pytest.mark.parametrize(
    ("rest", "host", "printed"),
    [
        (RestConfig(), "127.0.0.1", "http://127.0.0.1:8778; auth: noauth2"),
        (RestConfig(), "::1", "http://[::1]:8778; auth: noauth2"),
        (RestConfig(auth="noauth2", noauth2_anywhere=True), "0.0.0.0", "auth: noauth2"),
        (TOKENS, "0.0.0.0", "auth: the tokens of /etc/berth/tokens.toml"),
        (KEYSTONE, "192.0.2.1", "auth: Keystone at http://keystone:5000"),
    ],
)
def test_http_of_placement_serves_the_api_and_prints_who_may_call(rest: RestConfig, host: str, printed: str) -> None:
    at = at_http(having(rest), host, 8778)
    assert at.with_rest and printed in at.sentence
    assert at.settings.placement.rest.listen == (f"{host}:8778" if host != "::1" else "[::1]:8778")


@pytest.mark.parametrize("rest", [RestConfig(), RestConfig(auth="noauth2")])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "placement.example.com"])
def test_without_a_setting_of_who_may_call_elsewhere_there_is_health_only(rest: RestConfig, host: str) -> None:
    at = at_http(having(rest), host, 8778)
    assert not at.with_rest and not at.settings.placement.rest.listen
    assert "only health and metrics" in at.sentence and "auth to tokens or keystone" in at.sentence


def test_an_address_of_its_own_keeps_the_api_off_the_health_port() -> None:
    apart = at_http(having(RestConfig(listen="127.0.0.1:8779")), "127.0.0.1", 8778)
    assert (apart.with_rest, apart.settings.placement.rest.listen) == (False, "127.0.0.1:8779")
    assert at_http(having(RestConfig(listen="127.0.0.1:8778")), "127.0.0.1", 8778).with_rest


async def test_up_serves_it_on_loopback_for_a_token_of_its_own_that_lasts(tmp_path: Path) -> None:
    port, settings = free_port(), Settings(state_dir=str(tmp_path))
    found = []
    for _ in range(2):
        with for_up(settings, port) as at:
            rest = at.settings.placement.rest
            assert (rest.listen, rest.auth, at.taken) == (f"{LOOPBACK}:{port}", "tokens", "")
            assert at.token is not None
            found.append(at.token.read_text())
    assert found[0] == found[1]
    assert {os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)} == {0o600}
    auth = TokenFile(Path(rest.token_file))
    caller = await auth.identify({b"x-auth-token": found[0].strip().encode()})
    assert caller is not None and set(caller.roles) == {"admin", "service"}
    assert await auth.identify({b"x-auth-token": b"admin"}) is None


def test_a_token_that_others_could_read_or_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    settings, kept = Settings(state_dir=str(tmp_path)), []
    with for_up(settings, free_port()) as at:
        assert at.token is not None
        kept.append(at.token.read_text())
    at.token.chmod(0o644)
    with for_up(settings, free_port()):
        kept.append(at.token.read_text())
    assert at.token.stat().st_mode & 0o777 == 0o600
    elsewhere = tmp_path / "elsewhere"
    at.token.rename(elsewhere)
    at.token.symlink_to(elsewhere)
    with for_up(settings, free_port()):
        kept.append(at.token.read_text())
    assert not at.token.is_symlink() and len(set(kept)) == 3
    digest = hashlib.sha256(kept[2].strip().encode()).hexdigest()
    assert digest in Path(at.settings.placement.rest.token_file).read_text()


def test_a_busy_port_is_left_to_its_holder(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    with socket.create_server((LOOPBACK, 0)) as busy:
        port = busy.getsockname()[1]
        with for_up(settings, port) as at:
            assert at.taken == f"{LOOPBACK}:{port}" != at.settings.placement.rest.listen


def test_two_that_start_at_once_do_not_take_the_same_port(tmp_path: Path) -> None:
    """Neither listens yet."""
    port, settings = free_port(), Settings(state_dir=str(tmp_path))
    with for_up(settings, port) as first, for_up(settings, port) as second:
        assert second.taken and second.settings.placement.rest.listen != first.settings.placement.rest.listen
    with for_up(settings, port) as third:
        assert not third.taken


def test_what_the_settings_hold_is_left_as_it_is(tmp_path: Path) -> None:
    named = having(RestConfig(listen="127.0.0.1:1"), state_dir=str(tmp_path))
    for settings in (named, Settings(state_dir=str(tmp_path), up=UpSettings(rest=False))):
        with for_up(settings, free_port()) as at:
            assert (at.settings, at.token) == (settings, None)
    for rest in (KEYSTONE, RestConfig(auth="noauth2")):
        with for_up(having(rest, state_dir=str(tmp_path)), free_port()) as at:
            assert (at.settings.placement.rest.auth, at.token) == (rest.auth, None)
    assert not list(tmp_path.iterdir())


def test_placement_alone_queries_no_schedulers_for_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is none on the bus inside the process: it queried for ever, 100 lines a minute in the log."""
    environments: list[Environment] = []

    def run(_app: object, environment: Callable[[], Environment], **_names: object) -> int:
        environments.append(environment())
        return 0

    monkeypatch.setattr(placement, "run_process", run)
    monkeypatch.setenv("BERTH_STATE_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["placement", "serve", "--memory"])
    assert result.exit_code == 0 and [one.takes_cells for one in environments] == [False]
