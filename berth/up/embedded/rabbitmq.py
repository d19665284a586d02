"""A private RabbitMQ from the distribution's rabbitmq-server: own ports, own node name, own epmd, own cookie."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from berth.config.ports import ServerFailed, free_port
from berth.up.embedded.process import POLL_S, Account, GuardedProcess, ServerMissing, listening
from berth.up.embedded.server import PrivateServer

ADMIN = "berth"
COMMAND_TIMEOUT_S = 180.0  # as START_TIMEOUT_S: a broker that is starved for a minute is not gone
STARTED_TIMEOUT_S = 60.0
# %s: the path of a file with definitions. Fails in a node whose broker has not started.
IMPORT = "true = rabbit:is_running(), {ok, Raw} = file:read_file(%s), ok = rabbit_definitions:import_raw(Raw)."
# The listener takes connections a moment before the broker has started.
STARTED = "rabbit:is_booted()."
# %s: a node of the cluster to join, which then has all that this broker has. 4.0 and later have another module.
# `rabbit:start()` answers `ok` and starts nothing while the start before it has not returned, though its broker runs by
# then: so it is called until the broker runs.
JOIN = """
    rabbit:stop(),
    ok = rabbit_mnesia:join_cluster('%s', disc),
    Starts = fun(_) -> ok = rabbit:start(), rabbit:is_running() orelse timer:sleep(100) =/= ok end,
    true = lists:any(Starts, lists:seq(1, 300)).
"""
NOT_STARTED = "requires the 'rabbit' app to be running"
REGISTER_TIMEOUT_S = 60.0
# A broker that is killed because it takes long to stop, as on a busy machine, forgets its youngest queues.
STOP_TIMEOUT_S = 60.0
# A message for which its queue has no room when its retry is due is offered to it again this often; RabbitMQ's own is
# three minutes.
DEAD_LETTER_AGAIN_MS = 2_000
# RabbitMQ's own is 10 s, for connections from anywhere. Ours are local, and a starved machine takes longer to sign in.
HANDSHAKE_TIMEOUT_MS = 120_000
# The log of the quorum queues is opened with O_SYNC: a batch is on disk when its write returns, and needs no fdatasync
# after it, which would be a second job of another thread.
FLUSH_AS_WRITTEN = "{ra, [{wal_write_strategy, o_sync}]}"
# It runs beside the workers: no scheduler thread of Erlang spins. They wake as usual: `+swt very_high` spares wake-ups,
# and on a busy machine doubles the time that a message alone takes.
SELDOM_AWAKE = "+sbwt none +sbwtdcpu none"
# Erlang loads a module when it is first called, and looks for it in up to ninety directories; RabbitMQ boots with a
# thousand. To load them all at once, before it boots, halves what a start takes of the processor. Where that fails,
# the broker starts all the same, and loads each by itself.
LOADED_AT_ONCE = """
    os:unsetenv("ERL_AFLAGS"),
    Read = fun(Name) ->
        Directory = filename:join(code:lib_dir(Name), "ebin"),
        {ok, [{application, _, Keys}]} = file:consult(filename:join(Directory, atom_to_list(Name) ++ ".app")),
        [Modules, Needed] = [proplists:get_value(Key, Keys, []) || Key <- [modules, applications]],
        {Needed, Modules, Directory}
    end,
    All = fun All([], Found) -> maps:values(Found);
              All([Name | Rest], Found) when is_map_key(Name, Found) -> All(Rest, Found);
              All([Name | Rest], Found) ->
                  {Needed, Modules, Directory} = Read(Name),
                  All(Needed ++ Rest, Found#{Name => {length(Modules), Modules, Directory}})
    end,
    catch begin
        Ascending = lists:sort(All([rabbit], #{})),
        code:add_pathsa([Directory || {_, _, Directory} <- Ascending]),
        code:ensure_modules_loaded(lists:append([Modules || {_, Modules, _} <- Ascending]))
    end.
"""
LOCAL_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"
SCRIPTS = ("/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin", "/usr/local/sbin")

# The distribution's /usr/sbin wrappers change to the machine's rabbitmq user and home; these scripts do not.


class RabbitMQ(PrivateServer):
    """A private broker. `with RabbitMQ() as broker: broker.url()`.

    Another one made on its directory later goes on with the same node, password and messages. The administrator's user
    name is `berth`, its password random; vhost `/` exists. Only listens on 127.0.0.1. config: lines for rabbitmq.conf,
    beside ours. peer: another one, with which it can `join` a cluster; that one is started first and stopped last.
    schedulers: threads that run Erlang's processes (None: one for each processor).
    """

    stop_timeout_s = STOP_TIMEOUT_S

    def __init__(
        self,
        directory: Path | None = None,
        *,
        config: str = "",
        peer: RabbitMQ | None = None,
        schedulers: int | None = None,
    ) -> None:
        self._scripts = find_scripts()
        super().__init__(directory, "berth-mq-")
        self._config = config
        self._peer = peer
        self._schedulers = "" if schedulers is None else f" +S {schedulers}:{schedulers}"
        self._epmd: GuardedProcess | None = None
        self.port = free_port()
        self._distribution_port = free_port()
        self._epmd_port: int = free_port() if peer is None else peer._epmd_port
        self._cookie = self._work.path / ".erlang.cookie"
        self._identity = self._work.path / "identity.json"
        self.node: str
        self.password: str
        self.node, self.password = self._known() or (
            f"berth-{uuid.uuid4().hex[:10]}@localhost",
            secrets.token_urlsafe(18) if peer is None else peer.password,
        )

    def _start(self) -> None:
        if not (self._work.path / "definitions.json").exists():
            self._initialise()
        self._configure()
        if self._peer is None and (self._epmd is None or not self._epmd.running):
            self._start_epmd()
        self._process = GuardedProcess(
            [str(self._scripts / "rabbitmq-server")],
            env={**self._environment(), "ERL_AFLAGS": f"-eval '{LOADED_AT_ONCE}'"},
            cwd=self._work.path,
            log=self._work.path / "server.log",
            account=Account(),
            temporary=self._work.path if self._work.temporary else None,
        )
        self._process.wait_until("RabbitMQ", self._ready)

    def join(self) -> None:
        """Become a node of the cluster of the broker beside which this one runs; its messages are gone."""
        assert self._peer is not None, "made with peer="
        try:
            self.evaluate(JOIN % self._peer.node)
        except ServerFailed:  # another version
            for command in (("stop_app",), ("join_cluster", self._peer.node), ("start_app",)):
                self.control(*command)

    def _clear(self) -> None:
        if self._epmd is not None:
            self._epmd.stop()
        self._epmd = None

    def url(self, vhost: str = "/", *, user: str = ADMIN, password: str | None = None) -> str:
        """The AMQP URL of a vhost, as the administrator or as the given user."""
        secret = self.password if password is None else password
        return f"amqp://{quote(user, safe='')}:{quote(secret, safe='')}@127.0.0.1:{self.port}/{quote(vhost, safe='')}"

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl against this broker; returns its output. Raises ServerFailed."""
        done = subprocess.run(
            [str(self._scripts / "rabbitmqctl"), "--quiet", *arguments],
            env=self._environment(),
            cwd=self._work.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise ServerFailed(f"rabbitmqctl {arguments[0]} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def evaluate(self, expressions: str) -> str:
        """Evaluate Erlang expressions in the broker's node; returns the output. Raises ServerFailed.

        By `erl_call` where it is installed (Debian's erlang-base has it): rabbitmqctl starts an Erlang of its own, half
        a second of processor.
        """
        program = shutil.which("erl_call")
        if program is None:
            return self.control("eval", expressions)
        done = subprocess.run(
            [program, "-sname", self.node, "-r", "-e"],  # the cookie is in $HOME, and not among the arguments
            env=self._environment(),
            cwd=self._work.path,
            input=expressions.strip() + "\n",
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if not done.stdout.startswith("{ok"):
            raise ServerFailed(f"erl_call failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def add_vhost(self, name: str) -> str:
        """Make a vhost that the administrator may use, unless there is one; returns its URL."""
        return self.add_vhosts([name])[name]

    def add_vhosts(self, names: Iterable[str]) -> dict[str, str]:
        """Make vhosts, as `add_vhost` does, all at once: {name: URL}."""
        urls = {name: self.url(name) for name in names}
        self.define(vhosts=[{"name": name} for name in urls], permissions=[_permission(ADMIN, name) for name in urls])
        return urls

    def add_user(self, name: str, password: str, vhosts: Iterable[str] = ()) -> None:
        """Make a user who may do everything in these vhosts, and nothing elsewhere."""
        user = {"name": name, "password": password, "tags": ""}
        self.define(users=[user], permissions=[_permission(name, vhost) for vhost in vhosts])

    def set_permissions(
        self, user: str, vhost: str, configure: str = ".*", write: str = ".*", read: str = ".*"
    ) -> None:
        """The permissions of a user in a vhost: regular expressions over names, as RabbitMQ has them."""
        permission = {"user": user, "vhost": vhost, "configure": configure, "write": write, "read": read}
        self.define(permissions=[permission])

    def define(self, **definitions: list[dict[str, str]]) -> None:
        """Users, virtual hosts and permissions, as `rabbitmqctl import_definitions` takes them, all at once."""
        with tempfile.NamedTemporaryFile("w", dir=self._work.path, suffix=".json") as file:
            json.dump(definitions, file)
            file.flush()
            try:
                self.evaluate(IMPORT % json.dumps(file.name))  # which Erlang reads as it is
            except ServerFailed:  # it has not started, or is another version
                self._control_once_started("import_definitions", file.name)

    def _control_once_started(self, *arguments: str) -> None:
        """rabbitmqctl, again while the broker answers that it has not started: it takes connections a moment before."""
        until = time.monotonic() + STARTED_TIMEOUT_S
        while True:
            try:
                self.control(*arguments)
            except ServerFailed as error:
                if NOT_STARTED not in str(error) or time.monotonic() > until:
                    raise
            else:
                return

    def wait_registered(self, vhost: str, *queues: str) -> None:
        """Return when these quorum queues would survive a kill.

        RabbitMQ (3.10 at least) keeps the registration of a new quorum queue in memory for about a second. A broker
        that is killed before it is on disk forgets the queue's log, confirmed messages included. Raises ServerFailed:
        they are not registered in REGISTER_TIMEOUT_S.
        """
        prefix = "%2F" if vhost == "/" else vhost
        names = [f"{prefix}_{queue}".encode() for queue in queues]
        until = time.monotonic() + REGISTER_TIMEOUT_S
        while missing := [name for name in names if name not in self._registered()]:
            if time.monotonic() > until:
                raise ServerFailed(f"not registered after {REGISTER_TIMEOUT_S:.0f} s: {missing}")
            time.sleep(POLL_S)

    def _registered(self) -> bytes:
        return b"".join(path.read_bytes() for path in self._work.path.glob("data/*/quorum/*/names.dets"))

    def _known(self) -> tuple[str, str] | None:
        """Node name and password of the broker that was here before."""
        try:
            node, password = json.loads(self._identity.read_text())
        except FileNotFoundError:
            return None
        return str(node), str(password)

    def _initialise(self) -> None:
        home = self._work.path
        cookie = self._cookie
        cookie.touch(mode=0o600)
        shared = self._peer._cookie if self._peer is not None else None
        cookie.write_text(shared.read_text() if shared is not None else secrets.token_hex(16).upper())
        cookie.chmod(0o400)
        (home / "enabled_plugins").write_text("[].\n")
        definitions = {
            "users": [{"name": ADMIN, "password": self.password, "tags": "administrator"}],
            "vhosts": [{"name": "/"}],
            "permissions": [_permission(ADMIN, "/")],
        }
        secret = home / "definitions.json"
        secret.touch(mode=0o600)
        secret.write_text(json.dumps(definitions))
        self._identity.touch(mode=0o600)
        self._identity.write_text(json.dumps([self.node, self.password]))

    def _configure(self) -> None:
        home = self._work.path
        secret = home / "definitions.json"
        (home / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"load_definitions = {secret}\n"
            "loopback_users = none\n"
            f"handshake_timeout = {HANDSHAKE_TIMEOUT_MS}\n"
            "log.file.level = warning\n"
            "vm_memory_high_watermark.absolute = 2GB\n"
            "disk_free_limit.absolute = 50MB\n"
            f"{self._config}"
        )
        (home / "advanced.config").write_text(
            f"[{{rabbit, [{{dead_letter_worker_publisher_confirm_timeout, {DEAD_LETTER_AGAIN_MS}}}]}},\n"
            f" {FLUSH_AS_WRITTEN}].\n"
        )

    def _start_epmd(self) -> None:
        # Started here and not by Erlang, which would leave it behind as a daemon without an owner.
        self._epmd = GuardedProcess(
            [_epmd(), "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            env=self._environment(),
            cwd=self._work.path,
            log=self._work.path / "epmd.log",
            account=Account(),
        )
        self._epmd.wait_until("epmd", lambda: listening(self._epmd_port))

    def _ready(self) -> bool:
        """Whether it takes connections and, where `erl_call` reaches it, definitions."""
        if not listening(self.port):
            return False
        if shutil.which("erl_call") is None:
            return True
        try:
            return "true" in self.evaluate(STARTED)
        except ServerFailed:  # not reached by erl_call: `define` uses rabbitmqctl
            return True

    def _environment(self) -> dict[str, str]:
        home = self._work.path
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CTL_ERL_ARGS": LOCAL_ONLY,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{LOCAL_ONLY} {SELDOM_AWAKE}{self._schedulers}",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_PID_FILE": str(home / "server.pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
        }


def _permission(user: str, vhost: str) -> dict[str, str]:
    """To do everything there."""
    return {"user": user, "vhost": vhost, "configure": ".*", "write": ".*", "read": ".*"}


def find_scripts() -> Path:
    """The directory of RabbitMQ's scripts; RABBITMQ_PROGRAMS names another. Raises ServerMissing."""
    named = os.environ.get("RABBITMQ_PROGRAMS")
    for place in (named,) if named else SCRIPTS:
        if (Path(place) / "rabbitmq-server").exists() and (Path(place) / "rabbitmqctl").exists():
            return Path(place)
    raise ServerMissing("no rabbitmq-server here: apt-get install rabbitmq-server, or give AMQP_URL")


def _epmd() -> str:
    found = shutil.which("epmd")
    if found is None:
        raise ServerMissing("no epmd here: it comes with erlang-base")
    return found
