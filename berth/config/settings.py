"""All of berth's settings as one frozen struct: defaults, then a TOML file, then `BERTH_...` variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct, field
from msgspec.structs import replace

from berth.config.at_up import default_state
from berth.config.oidc import WebConfig
from bus.bus import API
from bus.contracts.base import CellName, Label, Uuid, Word, matching
from bus.faults import DatabaseForbidden
from bus.persistence.address import parse_database_url
from bus.rabbitmq.address import BadBusUrl, parse_bus_url
from bus.service.settings import Secret, SettingsError, load
from cell_conductor.config import ConductorConfig
from compute_agent.config import ComputeConfig
from compute_agent.drivers.ironic.config import IronicConfig
from compute_sim.config import SimulatedConfig
from gateway.config import GatewayConfig
from ironic_sync.config import IronicSyncConfig
from nova_scheduler.config import NovaConfig
from placement_worker.config import PlacementConfig
from scheduler_worker.config import SchedulerConfig

MEMORY = "memory://"
EMBEDDED = "embedded"
FILE_NAME = "berth.toml"
# Variables that are read elsewhere: by the scripts, the command line's log, and commands that call the HTTP API.
NO_SETTINGS = ("BERTH_PYTHON", "BERTH_CLI_LOG", "BERTH_URL", "BERTH_TOKEN", "BERTH_CA_FILE")


class BusSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message bus."""

    url: str = MEMORY
    """`memory://` (in one process; see `berth up`) or `amqp://user:password@host:port/vhost`; the nodes of one
    cluster are separated by commas: `host:port,host:port`. `amqps://` uses TLS (`?cacertfile=...`).
    """
    prefix: Annotated[str, Bound(max_length=64)] = ""
    """Put before every exchange and queue name, so that several systems can share one virtual host."""


class CellSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bus of one cell."""

    url: str = ""
    """As `bus.url`. Empty: the API bus's broker, with the cell's name before every exchange and queue name."""
    prefix: Annotated[str, Bound(max_length=64)] = ""
    """As `bus.prefix`, on this cell's bus."""


class DatabaseSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PostgreSQL."""

    url: str = EMBEDDED
    """`embedded` (a private server below `state_dir`) or `postgresql://user:password@host:port/name`; a primary and
    its stand-bys are separated by commas: `host:port,host:port`. TLS: `?sslmode=...&sslrootcert=...`.
    """
    pool_size: Annotated[int, Bound(ge=2, le=200)] = 8
    """Most connections of one process. 8: two batches of each of a worker's consumers and its side tasks run at once;
    all processes together must stay below PostgreSQL's `max_connections`.
    """


class TelemetrySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs, and the HTTP port of /healthz, /readyz and /metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is logged."""
    log_format: Literal["auto", "json", "pretty"] = "auto"
    """`json`: one object a line; `pretty`: for a terminal; `auto`: pretty on a terminal, otherwise json."""
    http_host: str = "127.0.0.1"
    """The address that the HTTP port listens on. Loopback, because the port has no authentication."""
    http_port: Annotated[int, Bound(ge=0, le=65_535)] | None = None
    """Not set: nothing is served. 0: any free port. `berth up` in one process serves none, whatever this is."""


class TraceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces: one a build, from its request to its last event."""

    endpoint: Annotated[
        str, matching(r"^(https?://[!-~]+)?$(?!\n)", "a URL of http:// or https://", max_length=1_000)
    ] = ""
    """The address of a collector that takes OTLP over HTTP as JSON, such as `http://127.0.0.1:4318`. Empty: no
    traces.
    """
    ratio: Annotated[float, Bound(ge=0.0, le=1.0)] = 0.05
    """The share of requests that are traced, where a request has no trace of its own. 0.05: a busy system still shows
    some builds each second, and one build in twenty pays for it.
    """
    most_per_s: Annotated[float, Bound(ge=1.0, le=100_000.0)] = 100.0
    """Most traces that one process begins in a second, those included that clients request by their header. 100: one
    build in twenty at the highest rate that was measured; no client can have more of them made.
    """


class ComputeSettings(ComputeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compute service."""

    simulated: SimulatedConfig = SimulatedConfig()
    """For `driver` = `simulated`."""


class UpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes that `berth up` starts."""

    schedulers: Annotated[int, Bound(ge=1, le=16)] = 2
    """Scheduler processes. 2: one goes on when the other ends."""
    placements: Annotated[int, Bound(ge=1, le=16)] = 1
    """Placement processes. They share one database, which bounds what more of them add."""
    computes_per_cell: Annotated[int, Bound(ge=0, le=64)] = 2
    """Compute services of each cell; the simulated hosts are `compute.simulated.hosts` of each service."""
    nodes: Annotated[int, Bound(ge=0, le=10_000)] = 10
    """Bare-metal nodes of the simulated Ironic."""
    ironic_url: str = ""
    """The API of an existing Ironic, used instead of a simulated one."""
    rest: bool = True
    """Whether Placement's REST API is served on a free port when `placement.rest.listen` is empty."""
    web: bool = True
    """Whether the web pages are served, at port 8780 of this computer or, if that is taken, at a free one."""


class FencingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are switched off: by `berth host fence --switch-off`, and by `berth serve fencer` on its own."""

    plugin: Annotated[str, Bound(max_length=255)] = ""
    """`ironic`, or the name of an entry point in group `berth.fencing`. Empty: none."""
    after_s: Annotated[float, Bound(ge=5.0, le=86_400.0)] = 60.0
    """Seconds that `berth serve fencer` has seen a host's compute service silent before it switches the host off. 60:
    longer than a restart of the service or of the host's network takes.
    """
    max_hosts: Annotated[int, Bound(ge=1, le=1_000)] = 3
    """Most hosts that may be silent at a time: with more of them the cause is rather the network, and `berth serve
    fencer` switches off none until fewer are, or a person has fenced them.
    """
    max_per_hour: Annotated[int, Bound(ge=1, le=100)] = 3
    """Most hosts of a cell that `berth serve fencer` fences within an hour. Then it fences none there until a person
    has decided about one of these: enabled it, or fenced it once more.
    """
    timeout_s: Annotated[float, Bound(gt=0.0, le=3_600.0)] = 120.0
    """Seconds for switching one host off, with the proof."""
    nodes: dict[Word, dict[Uuid, Label]] = {}
    """{cell: {host uuid: name or uuid of its node in Ironic}}, of hosts that no node names as its `berth_host`."""
    ironic: IronicConfig = IronicConfig()
    """The Ironic of the plug-in `ironic`: its address, login and certificates, as in `compute.ironic`."""
    options: dict[Label, Secret] = {}
    """For other plug-ins, which may need a password: none is shown."""


class AuditSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The findings that `berth audit --watch` repairs by itself: only those whose repair is proved to be safe."""

    orphaned: Literal["propose", "repair"] = "propose"
    """`repair`: release the allocation of an instance that is deleted by the record of the schedulers and of every
    cell, and that no host runs, when two looks in a row have found it so. All others are proposed
    (docs/operate/audit.md).
    """


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. `berth config` prints those in force."""

    state_dir: str = ""
    """The directory of the socket, the embedded database and simulated machines. Empty: `~/.local/state/berth`
    (below `$XDG_STATE_HOME` where that is set), for root `/var/lib/berth`.
    """
    bus: BusSettings = BusSettings()
    """The API bus."""
    cells: dict[CellName, CellSettings] = field(
        default_factory=lambda: {"cell1": CellSettings(), "cell2": CellSettings()}
    )
    """The cells by name. A host belongs to one cell."""
    cells_dir: Annotated[str, Bound(max_length=4_000)] = ""
    """The directory of files that each hold the URL of a cell's bus, for cells that are added at run time (`berth cell
    create --url-file`). Empty: none is read.
    """
    database: DatabaseSettings = DatabaseSettings()
    """The database of all workers."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Logs and health of every worker."""
    traces: TraceSettings = TraceSettings()
    """Traces of every worker and client."""
    up: UpSettings = UpSettings()
    """The processes that `berth up` starts."""
    placement: PlacementConfig = PlacementConfig()
    """Of each placement process."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Of each scheduler process."""
    nova: NovaConfig = NovaConfig()
    """Of each process in front of a Nova."""
    conductor: ConductorConfig = ConductorConfig()
    """Of each cell conductor process."""
    compute: ComputeSettings = ComputeSettings()
    """Of each compute service."""
    ironic_sync: IronicSyncConfig = IronicSyncConfig()
    """Of each ironic_sync process."""
    gateway: GatewayConfig = GatewayConfig()
    """Of each gateway process."""
    fencing: FencingSettings = FencingSettings()
    """How hosts are switched off."""
    audit: AuditSettings = AuditSettings()
    """The repairs that an audit carries out by itself."""
    web: WebConfig = WebConfig()
    """The pages and the HTTP API."""

    @property
    def state(self) -> Path:
        """Where berth keeps its socket and embedded database: `state_dir`, or the user's state directory."""
        if self.state_dir:
            return Path(self.state_dir)
        return default_state(os.environ)

    @property
    def kept_compute(self) -> ComputeSettings:
        """The settings of compute services with the directory of their machines, which outlive the process as placement
        does: else each would be lost at the next start. The files there are named after the cell and the service. An
        empty directory stays empty: in memory.
        """
        if self.compute.state_dir is not None:
            return self.compute
        return replace(self.compute, state_dir=str(self.state / "machines"))

    @property
    def socket(self) -> Path:
        """The socket at which `berth up` serves its memory bus."""
        return self.state / "bus.sock"


def check_urls(settings: Settings) -> None:
    """Parse what names a server: waiting for one at an address that can be none would never end.

    Raises SettingsError (`bus.url`, `database.url`) with the setting's name, and no part of the URL.
    """
    gateway = [("gateway.url", settings.gateway.url)] if settings.gateway.url else []
    for name, url in (("bus.url", settings.bus.url), *_cell_urls(settings), *gateway):
        try:
            if url != MEMORY:
                parse_bus_url(url)
        except BadBusUrl as error:
            raise SettingsError(error.code, f"{name}, unless `{MEMORY}`: {error}") from None
    try:
        if settings.database.url != EMBEDDED:
            parse_database_url(settings.database.url)
    except DatabaseForbidden as error:
        raise SettingsError(error.code, f"database.url, unless `{EMBEDDED}`: {error}") from None


def _cell_urls(settings: Settings) -> list[tuple[str, str]]:
    return [(f"cells.{name}.url", cell.url) for name, cell in settings.cells.items() if cell.url]


def read_settings(path: Path | None, env: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. The file is `path`, else $BERTH_CONFIG, else ./berth.toml if there is one.

    Raises SettingsError with a code and a sentence: a named file that is missing, an unknown or mistyped key.
    """
    env = dict(os.environ if env is None else env)
    named = path or (Path(env["BERTH_CONFIG"]) if env.get("BERTH_CONFIG") else None)
    for name in NO_SETTINGS:
        env.pop(name, None)
    if named is not None and not named.is_file():
        raise SettingsError("settings.missing", f"there is no settings file {named}")
    if named is None and Path(FILE_NAME).is_file():
        named = Path(FILE_NAME)
    settings = load(Settings, toml=named, env=env)
    if not settings.cells:
        raise SettingsError("settings.invalid", "at least one cell is needed under [cells]")
    if API in settings.cells:
        raise SettingsError("settings.invalid", f"cells.{API}: {API!r} is the bus of clients, and no cell's name")
    if "\x00" in settings.state_dir + settings.cells_dir:
        raise SettingsError("settings.invalid", "state_dir, cells_dir: no directory's name has the character NUL")
    return settings
