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
from jinja2 import Environment, PackageLoader

from berth.config.ports import free_port
from berth.up.embedded.process import Account, GuardedProcess, ServerMissing, clean_environment
from berth.up.embedded.server import PrivateServer

START_TIMEOUT_S = 180.0
SYNC_TIMEOUT_S = 180.0
ASK_TIMEOUT_S = 5.0
EXCHANGE = "ironic"

TEMPLATES = Environment(loader=PackageLoader("lab.ironic"), autoescape=False, trim_blocks=True)


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
        # Ironic makes a config drive with it, genisoimage or mkisofs, which a machine may not have; pycdlib it brings.
        tool.write_text(TEMPLATES.get_template("xorrisofs").render(python=self._programs / "python"))
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
        return TEMPLATES.get_template("ironic.conf").render(
            home=self._work.path,
            port=self.port,
            auth="http_basic" if self._basic else "noauth",
            url=rabbit,
            delays=self._delays,
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
