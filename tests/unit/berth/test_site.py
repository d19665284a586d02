"""Where workers and buses are: addresses, state, the workers of one process, the version."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs
from typer.testing import CliRunner

import compute_agent.app
from berth import version as module
from berth.cli.claims import placement
from berth.cli.fleet import status as processes
from berth.cli.main import app
from berth.cli.output import Form
from berth.cli.site import serving
from berth.config.ports import free_port
from berth.config.rest_address import LOOPBACK, AtUp, at_http, for_up
from berth.config.settings import ComputeSettings, Settings, UpSettings
from berth.config.site import Brokers, Runtime, Site, url_of, write_runtime
from berth.up.local_workers import InProcessWorkers, WorkerEnded
from berth.version import commit, version
from bus.clock import SystemClock
from bus.contracts.objects import CellBus
from bus.faults import Fault
from bus.service.environment import CellAddressInvalid, Environment
from bus.service.main import GC_THRESHOLD, STOP_SIGNALS
from bus.service.service import WorkerRuntime
from compute_agent.records.records import Records
from compute_sim.config import SimulatedConfig
from compute_sim.fleet import Fleet
from placement_worker.rest.auth import TokenFile
from placement_worker.rest.config import KeystoneConfig, RestConfig

# --- where the REST API is served when only `--http`, or nothing, is given, and that no door is open by accident


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
    assert at.with_rest and printed in at.message
    assert at.settings.placement.rest.listen == (f"{host}:8778" if host != "::1" else "[::1]:8778")


@pytest.mark.parametrize("rest", [RestConfig(), RestConfig(auth="noauth2")])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "placement.example.com"])
def test_without_a_setting_of_who_may_call_elsewhere_there_is_health_only(rest: RestConfig, host: str) -> None:
    at = at_http(having(rest), host, 8778)
    assert not at.with_rest and not at.settings.placement.rest.listen
    assert "only health and metrics" in at.message and "auth to tokens or keystone" in at.message


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
    caller = await auth.identify(found[0].strip().encode(), {})
    assert caller is not None and set(caller.roles) == {"admin", "service"}
    assert await auth.identify(b"admin", {}) is None


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


async def test_placement_alone_tells_its_health_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(f'[[tokens]]\nsha256 = "{"0" * 64}"\nuser_id = "u"\n')
    settings = tmp_path / "berth.toml"
    settings.write_text(f'[placement.rest]\nauth = "tokens"\ntoken_file = "{tmp_path}/tokens.toml"\n')
    at = f"127.0.0.1:{free_port()}"
    serve = (sys.executable, "-m", "berth", "placement", "serve", "--memory", "--api", at)
    env = {**os.environ, "BERTH_CONFIG": str(settings), "BERTH_STATE_DIR": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(*serve, env=env, stderr=asyncio.subprocess.DEVNULL)
    async with httpx.AsyncClient(base_url=f"http://{at}") as http:

        async def status_of(path: str) -> int:
            with contextlib.suppress(httpx.TransportError):
                return (await http.get(path)).status_code
            return 0

        try:
            while await status_of("/readyz") in {0, 503}:  # ends: with the process
                assert process.returncode is None
            found = [await status_of(path) for path in ("/readyz", "/healthz", "/metrics", "/resource_providers")]
        finally:
            process.terminate()
            await process.wait()
    assert found == [200, 200, 200, 401]


# --- `berth bus url`: what a program of the user's own connects to


URL = "amqp://berth:hunter2@127.0.0.1:5672/berth"


def address(state: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    env = {"BERTH_STATE_DIR": str(state), **more}
    done = CliRunner().invoke(app, ["bus", "url", *arguments], env=env)
    return done.exit_code, done.stdout, done.stderr


def test_the_address_of_the_settings_is_printed_whole(tmp_path: Path) -> None:
    assert address(tmp_path, BERTH_BUS__URL=URL) == (0, URL + "\n", "")
    assert address(tmp_path, "--bus", "cell1", BERTH_BUS__URL=URL) == (0, URL + "\n", "")
    status, _, error = address(tmp_path, "--bus", "cell9", BERTH_BUS__URL=URL)
    assert status == 2 and "bus.unknown" in error


def test_the_broker_that_runs_here_has_the_address(tmp_path: Path) -> None:
    remove = write_runtime(tmp_path, Runtime(pid=os.getpid(), database_url="", buses={"api": URL}))
    assert address(tmp_path) == (0, URL + "\n", "")
    remove()
    status, printed, error = address(tmp_path)
    assert (status, printed) == (1, "") and "bus.in_memory" in error and "--processes" in error


# --- where the bus of a cell that an operator adds is found, and that its URL is shown nowhere


CELLS_URL = "amqp://user:secret@host:5672/cell3"


def test_the_url_is_in_a_file_in_a_variable_or_that_of_the_api_bus(tmp_path: Path) -> None:
    (tmp_path / "cell3").write_text(f"{CELLS_URL}\n")
    assert url_of(CellBus(url_file="cell3"), str(tmp_path), {}) == CELLS_URL
    assert url_of(CellBus(url_variable="CELL_3"), "", {"CELL_3": CELLS_URL}) == CELLS_URL
    assert url_of(CellBus(prefix="c."), str(tmp_path), {}) == ""


@pytest.mark.parametrize(
    ("where", "text", "reason"),
    [
        (CellBus(url_file="cell3"), None, "No such file"),
        (CellBus(url_file="cell3"), b"", "a bus is at"),
        (CellBus(url_file="cell3"), b"http://user:secret@host/", "a bus is at"),
        (CellBus(url_file="cell3"), b"amqp://user:secret@host:99999/", "a bus is at"),
        (CellBus(url_file="cell3"), b"\xffsecret", "it is not UTF-8"),
        (CellBus(url_file="cell3"), CELLS_URL.encode() * 200, "a bus is at"),
        (CellBus(url_variable="CELL_3"), None, "a bus is at"),
    ],
)
def test_what_is_no_url_is_refused_and_not_shown(
    tmp_path: Path, where: CellBus, text: bytes | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / "cell3").write_bytes(text)
    with pytest.raises(CellAddressInvalid, match=reason) as wrong:
        url_of(where, str(tmp_path), {})
    assert "secret" not in str(wrong.value)


def test_without_a_directory_no_file_is_read() -> None:
    with pytest.raises(CellAddressInvalid, match="cells_dir is empty"):
        url_of(CellBus(url_file="cell3"), "", {})


# --- where a compute service keeps its machines and records


@pytest.mark.parametrize("driver", ["ironic", "simulated"])
@pytest.mark.parametrize(("given", "expected"), [(None, "machines"), ("elsewhere", "elsewhere"), ("", "")])
def test_a_service_keeps_its_machines_and_records_by_default(
    tmp_path: Path, driver: str, given: str | None, expected: str
) -> None:
    """After a restart of one without them its instances were lost. Empty: in memory."""
    directory = str(tmp_path / given) if given else given
    compute = ComputeSettings(driver=driver, state_dir=directory)
    kept = Settings(state_dir=str(tmp_path), compute=compute).kept_compute.state_dir
    assert kept == (str(tmp_path / expected) if expected else "")


@pytest.mark.parametrize(
    ("state_dir", "is_given", "warned"), [("", False, True), (None, False, True), ("", True, False)]
)
async def test_a_service_in_memory_warns(state_dir: str | None, is_given: bool, warned: bool) -> None:
    """Not one whose machines another keeps for it, as `berth up` and the simulation do."""
    clock = SystemClock()
    here = Site(Settings(), brokers=Brokers(clock), database_url="", clock=clock, seed=1)
    config = ComputeSettings(simulated=SimulatedConfig(hosts=1), state_dir=state_dir)
    records = Records() if is_given else None
    with capture_logs() as logs:
        compute_agent.app.build(here.environment("c1", "compute"), config, "cell1", "c1", records=records)
    assert [one["log_level"] for one in logs if one["event"] == "compute.in_memory"] == ["warning"] * warned


def test_no_file_is_made_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = Records.of_service("", "cell1", "c1", synced=True)
    records.open()
    Fleet.planned(SimulatedConfig(hosts=1), "cell1", "c1", records, "").open()
    assert list(tmp_path.iterdir()) == []


def test_two_services_of_one_machine_share_no_journal(tmp_path: Path) -> None:
    config = Settings(state_dir=str(tmp_path)).kept_compute
    fleets = [
        Fleet.planned(
            config.simulated,
            cell,
            name,
            Records.of_service(config.state_dir, cell, name, synced=False),
            config.state_dir,
        )
        for cell, name in (("a", "c1"), ("b", "c1"), ("a", "c2"))
    ]
    for one in fleets:
        one.records.open()
        one.open()
    for kind in ("machines", "records"):
        assert len(list((tmp_path / "machines").glob(f"*.{kind}"))) == len(fleets)
    for one in fleets:
        one.close()
        one.records.close()


# --- the process of `berth serve web`


class Server:
    """A web server that records what the garbage collector has to do while it serves."""

    url = "http://127.0.0.1:1"
    serving: tuple[int, ...] = ()

    def __init__(self, *_: object, **__: object) -> None: ...

    async def open(self) -> None: ...

    async def serve_until(self, stop: asyncio.Event) -> None:
        Server.serving = gc.get_threshold()
        stop.set()

    async def close(self) -> None: ...


def test_the_garbage_collector_does_not_traverse_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 2,000 hosts is 10,000 objects: with the thresholds of Python each triggers whole collections."""
    monkeypatch.setattr(serving, "WebServer", Server)
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = gc.get_threshold()
    try:
        result = CliRunner().invoke(app, ["serve", "web", "--listen", "127.0.0.1:0"])
    finally:
        gc.set_threshold(*before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert result.exit_code == 0, result.output
    assert frozen == [True]
    assert Server.serving == GC_THRESHOLD


# --- workers side by side in one process: one that dies is reported with its reason, and at once


PATIENCE_S = 30.0  # less than a start waits for workers that are not ready


class Broken(Fault):
    """The fault of the worker that dies."""

    code = "side.gone"


def lasting() -> WorkerRuntime:
    """A worker that runs until it is stopped."""
    service = WorkerRuntime("lasting", clock=SystemClock())
    service.add_task("side", asyncio.Event().wait)
    return service


def dying(when: asyncio.Event) -> WorkerRuntime:
    """A worker that runs until the event."""
    service = WorkerRuntime("dying", clock=SystemClock())

    async def side() -> None:
        await when.wait()
        raise Broken("its side is gone")

    service.add_task("side", side)
    return service


def never_opened() -> WorkerRuntime:
    """A worker whose database refuses it."""
    service = WorkerRuntime("refused", clock=SystemClock())

    async def refuse() -> None:
        raise Broken("no such schema")

    async def close() -> None: ...

    service.add_resource(refuse, close)
    return service


@pytest.fixture
async def workers() -> AsyncIterator[InProcessWorkers]:
    made = InProcessWorkers()
    yield made
    await made.stop()


async def test_item_29_a_worker_that_ends_before_it_is_ready_ends_the_start(workers: InProcessWorkers) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkerEnded, match="worker b ended: no such schema") as ended:
            await workers.start(("a", lasting()), ("b", never_opened()))
    assert isinstance(ended.value.__cause__, Broken)
    workers.members.pop("b")


async def test_item_29_a_worker_that_dies_later_is_reported(workers: InProcessWorkers) -> None:
    dies = asyncio.Event()
    await workers.start(("a", lasting()), ("b", dying(dies)))
    assert not workers.failed.done()
    dies.set()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkerEnded, match="worker b ended: its side is gone"):
            await workers.failed
    workers.members.pop("b")


class TwoWorkers:
    """A system of two workers, started one after the other."""

    def __init__(self, first: WorkerRuntime, second: WorkerRuntime) -> None:
        self.pair = (("a", first), ("b", second))
        self.in_process = InProcessWorkers()
        self.computes, self.services = (), dict[str, list[str]]()
        self.site: Site

    def __call__(self, here: Site) -> TwoWorkers:
        self.site = here
        return self

    async def start(self, *, ironic_url: str | None = None) -> None:
        for one in self.pair:
            await self.in_process.start(one)


Up = Callable[[TwoWorkers, asyncio.Event], Awaitable[int]]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    """`berth up` of these workers, without database and Ironic, until the event."""
    settings = Settings(state_dir=str(tmp_path), up=UpSettings(web=False))

    @contextlib.asynccontextmanager
    async def here(*_: object, **options: object) -> AsyncIterator[Site]:
        yield Site(settings, brokers=Brokers(SystemClock()), database_url="")

    @contextlib.asynccontextmanager
    async def no_ironic(_: Site) -> AsyncIterator[str]:
        yield ""

    def up_here(system: TwoWorkers, stop: asyncio.Event) -> Awaitable[int]:
        monkeypatch.setattr(processes, "LocalSystem", system)
        return processes._up_here(AtUp(settings=settings), stop, form=Form.JSON)

    monkeypatch.setattr(processes, "site", here)
    monkeypatch.setattr(processes, "ironic_of", no_ironic)
    return up_here


async def test_item_29_a_signal_while_a_worker_is_waited_for_stops_all_and_ends_up(up: Up) -> None:
    """The start would go on until the worker is ready, or a minute has passed."""
    stop, first, second = asyncio.Event(), lasting(), WorkerRuntime("late", clock=SystemClock())

    async def wait() -> None:
        stop.set()
        await asyncio.Event().wait()

    async def close() -> None: ...

    second.add_resource(wait, close)
    async with asyncio.timeout(PATIENCE_S):
        assert await up(TwoWorkers(first, second), stop) == 0
    assert (first.phase, second.phase) == ("closed", "closed")


async def test_item_29_a_worker_that_dies_later_ends_up_with_its_reason(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies, first = asyncio.Event(), lasting()
    monkeypatch.setattr(processes, "_print_summary", lambda *_: dies.set())  # everything is up
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkerEnded, match="worker b ended: its side is gone"):
            await up(TwoWorkers(first, dying(dies)), asyncio.Event())
    assert first.phase == "closed"


# --- the commit that `berth --version` states: of our checkout alone, or as pip recorded it


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The file that pip wrote when it installed berth."""
    found: dict[str, str | None] = {"direct_url.json": None}

    class Installed:
        version = "7.8"

        def read_text(self, name: str) -> str | None:
            return found[name]

    monkeypatch.setattr(metadata, "distribution", lambda _: Installed())
    return found


def test_what_pip_has_installed_from_a_repository_is_known(recorded: dict[str, str | None]) -> None:
    recorded["direct_url.json"] = f'{{"url": "https://x", "vcs_info": {{"vcs": "git", "commit_id": "{COMMIT}"}}}}'
    assert version().startswith(f"7.8 ({COMMIT[:8]}, Python 3.")


@pytest.mark.usefixtures("recorded")
def test_the_commit_of_our_checkout_is_known_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        settings = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    monkeypatch.setattr(module, "HERE", tmp_path)
    assert commit() == git("rev-parse", "HEAD")[:8]
    packages = tmp_path / "venv" / "lib"
    packages.mkdir(parents=True)
    monkeypatch.setattr(module, "HERE", packages)
    assert commit() == "", "a virtualenv in a clone"


@pytest.mark.usefixtures("recorded")
def test_without_git_the_version_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module, "HERE", tmp_path)
    assert version().startswith("7.8 (Python 3."), "no commit there"
    monkeypatch.setenv("PATH", "")
    assert version().startswith("7.8 (Python 3."), "no git"
