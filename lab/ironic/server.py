"""A private OpenStack Ironic with fake hardware: the released one from PyPI, in a virtualenv of its own.

One process serves API and conductor (`ironic`), on SQLite, on a free port of 127.0.0.1. Power, boot and management of
its nodes are fake: nothing but files is touched. `deploy_interface = direct` is Ironic's real one, which
waits for an agent to call back (`lab.ironic.agent` plays it); `fake` is active at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import httpx

from berth.trial.embedded.process import Account, GuardedProcess, ServerMissing, clean_environment, free_port
from berth.trial.embedded.server import PrivateServer

START_TIMEOUT_S = 180.0
SYNC_TIMEOUT_S = 180.0
ASK_TIMEOUT_S = 5.0
EXCHANGE = "ironic"

_CONFIG = """\
[DEFAULT]
auth_strategy = {auth}
http_basic_auth_user_file = {home}/htpasswd
host = berth
my_ip = 127.0.0.1
state_path = {home}/state
tempdir = {home}/tmp
rpc_transport = none
{notifications}
enabled_hardware_types = fake-hardware
enabled_bios_interfaces = fake,no-bios
enabled_boot_interfaces = fake
enabled_console_interfaces = fake,no-console
enabled_deploy_interfaces = fake,direct
default_deploy_interface = fake
enabled_firmware_interfaces = fake,no-firmware
enabled_inspect_interfaces = fake,no-inspect
enabled_management_interfaces = fake,noop
enabled_network_interfaces = noop
default_network_interface = noop
enabled_power_interfaces = fake
enabled_raid_interfaces = fake,no-raid
enabled_rescue_interfaces = fake,no-rescue
enabled_storage_interfaces = noop,fake,external
enabled_vendor_interfaces = fake,no-vendor
[api]
host_ip = 127.0.0.1
port = {port}
api_workers = 1
[conductor]
automated_clean = true
deploy_callback_timeout = 600
check_provision_state_interval = 5
workers_pool_size = 100
[agent]
require_tls = false
command_wait_attempts = 3
command_wait_interval = 1
neutron_agent_poll_interval = 1
post_deploy_get_power_state_retries = 2
post_deploy_get_power_state_retry_interval = 1
[database]
connection = sqlite:///{home}/ironic.sqlite
[service_catalog]
endpoint_override = http://127.0.0.1:{port}
[deploy]
http_url = http://127.0.0.1:{port}
http_root = {home}/images
[pxe]
images_path = {home}/tmp
instance_master_path = {home}/tmp
[fake]
{delays}
[oslo_concurrency]
lock_path = {home}/tmp
{more}
"""
_NOTIFICATIONS = """\
transport_url = {url}
notification_level = info
[oslo_messaging_notifications]
driver = messagingv2
transport_url = {url}
[DEFAULT]
"""
# Ironic makes a config drive with genisoimage, mkisofs or xorrisofs, which a machine may not have; pycdlib it brings.
_ISO = """\
#!{python}
import os, sys
import pycdlib
given = sys.argv[1:]
root = given[-1]
iso = pycdlib.PyCdlib()
iso.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=given[given.index("-V") + 1])
count, paths = 0, {{}}
for place, folders, files in os.walk(root):
    inside = os.path.relpath(place, root)
    there = "" if inside == "." else "/" + inside
    for name in sorted(folders):
        count += 1
        paths[there + "/" + name] = short = paths.get(there, "") + "/D%05d" % count
        iso.add_directory(short, rr_name=name, joliet_path=there + "/" + name)
    for name in sorted(files):
        count += 1
        short = paths.get(there, "") + "/F%05d.;1" % count
        iso.add_file(os.path.join(place, name), short, rr_name=name, joliet_path=there + "/" + name)
iso.write(given[given.index("-o") + 1])
iso.close()
"""


class Ironic(PrivateServer):
    """A private Ironic. `with Ironic(programs) as ironic: ironic.url`.

    programs: the `bin` directory of the virtualenv that it is installed in (`scripts/nightly ironic install`).
    broker_url: where it publishes its notifications (`amqp://`); None: nowhere. delays: seconds of `[fake]`, as
    `{"deploy_delay": 2}`. user, password_hash: HTTP basic sign-in; empty: none. more: further lines of ironic.conf.
    plugins: a directory with further hardware types, as Python packages with entry points.
    """

    stop_timeout_s = 30.0

    def __init__(
        self,
        programs: Path,
        directory: Path | None = None,
        *,
        broker_url: str | None = None,
        delays: Mapping[str, int] | None = None,
        user: str = "",
        password_hash: str = "",
        more: str = "",
        plugins: Path | None = None,
        port: int | None = None,
    ) -> None:
        if not (programs / "ironic").exists():
            raise ServerMissing(f"no Ironic in {programs}: run scripts/nightly ironic install")
        self._programs = programs.absolute()
        super().__init__(directory, "berth-ironic-")
        self.port = port if port is not None else free_port()
        self._basic = f"{user}:{password_hash}\n" if user else ""
        self._broker_url = broker_url
        self._delays = dict(delays or {})
        self._more = more
        self._plugins = plugins

    @property
    def url(self) -> str:
        """The API's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> Path:
        """Its SQLite file."""
        return self._work.path / "ironic.sqlite"

    def kill(self) -> None:
        """End Ironic as a power cut would: it leads a session of its own, which the guard's group does not hold."""
        if pid := self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        super().kill()

    def _start(self) -> None:
        home = self._work.path
        for name in ("state", "tmp", "images"):
            (home / name).mkdir(exist_ok=True)
        tool = home / "bin" / "xorrisofs"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(_ISO.format(python=self._programs / "python"))
        tool.chmod(0o755)
        passwords = home / "htpasswd"
        passwords.touch(mode=0o600)
        passwords.write_text(self._basic)
        config = home / "ironic.conf"
        config.touch(mode=0o600)  # it holds the broker's password
        config.write_text(self._configuration())
        fresh = not self.database.exists()
        self._run("ironic-dbsync", "--config-file", str(config), "create_schema" if fresh else "upgrade")
        self._process = GuardedProcess(
            [str(self._programs / "ironic"), "--config-file", str(config)],
            env=self._environment(),
            cwd=home,
            log=home / "ironic.log",
            account=Account(),
            temporary=home if self._work.temporary else None,
        )
        self._process.wait_until("Ironic", self._ready, timeout_s=START_TIMEOUT_S)

    def _configuration(self) -> str:
        rabbit = (self._broker_url or "").replace("amqp://", "rabbit://", 1)  # as oslo.messaging calls it
        return _CONFIG.format(
            home=self._work.path,
            port=self.port,
            auth="http_basic" if self._basic else "noauth",
            notifications=_NOTIFICATIONS.format(url=rabbit) if rabbit else "",
            delays="\n".join(f"{name} = {seconds}" for name, seconds in sorted(self._delays.items())),
            more=self._more,
        )

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            env=self._environment(),
            cwd=self._work.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SYNC_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise ServerMissing(f"{program} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _ready(self) -> bool:
        """Whether the API answers and a conductor of it has registered: before, no node can be made."""
        try:
            answer = httpx.get(f"{self.url}/v1", timeout=ASK_TIMEOUT_S, trust_env=False)
            return answer.status_code in {httpx.codes.OK, httpx.codes.UNAUTHORIZED}
        except httpx.HTTPError:
            return False

    def _environment(self) -> dict[str, str]:
        env = clean_environment()
        if self._plugins is not None:
            env["PYTHONPATH"] = str(self._plugins.absolute())
        places = (self._work.path / "bin", self._programs, env["PATH"])
        return {**env, "PATH": os.pathsep.join(map(str, places)), "HOME": str(self._work.path)}
