"""A stock nova-scheduler in a process of its own, on the broker, databases and placement of a functional test.

Made by fork, see `forks`. Run by Nova's own interpreter.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = "true"

from nova import monkey_patch  # isort: skip

monkey_patch.patch(backend="threading")  # before anything else of Nova

# ruff: noqa: E402
import fixtures
from forks import serve, wait_for_locks
from neutronclient.common import exceptions as neutron_exceptions
from nova import config, exception, objects, rpc, service
from nova.conf import CONF
from nova.db.api import api as api_db_api
from nova.db.main import api as main_db_api
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional import fixtures as functional_fixtures
from oslo_config import cfg
from oslo_log import log
from oslo_messaging import conffixture
from placement_options import name_a_database

# They are of the test's process, or are set here by themselves.
OTHERS = {("api_database", "connection"), ("database", "connection"), (None, "host"), (None, "log_file")}


class BerthFixture(functional_fixtures.PlacementFixture):  # type: ignore[misc]
    """Nova's client of placement, without Keystone, to a given URL."""

    def __init__(self, url: str) -> None:
        super().__init__(db=False, use_intercept=False)
        self.endpoint = url


class NeutronFixture(nova_fixtures.NeutronFixture):  # type: ignore[misc]
    """A Neutron whose state is the test's process's: a port that is not known here is a plain one."""

    def show_port(self, port_id: str, **named: Any) -> dict[str, Any]:
        try:
            return dict(super().show_port(port_id, **named))
        except (exception.PortNotFound, neutron_exceptions.PortNotFoundClient):
            return {"port": {**self.port_1, "id": port_id}}


class Stand(fixtures.Fixture):  # type: ignore[misc]
    """What Nova's fixtures of other services ask of the test that they are given."""

    def flags(self, group: str | None = None, **values: Any) -> None:
        """Set settings."""
        for name, value in values.items():
            CONF.set_override(name, value, group)

    def stub_out(self, name: str, replacement: Any) -> None:
        """Replace something by its dotted name."""
        self.useFixture(fixtures.MonkeyPatch(name, replacement))


def settle(cloud: dict[str, Any]) -> None:
    """The settings of the test's process."""
    conffixture.ConfFixture(CONF)  # knows the settings of oslo.messaging
    config.parse_args([], default_config_files=[], configure_db=False, init_rpc=False)
    for group, name, value in cloud["settings"]:
        if (group, name) in OTHERS:
            continue
        try:
            CONF.set_override(name, value, group)
        except (cfg.NoSuchOptError, cfg.NoSuchGroupError, ValueError):
            continue  # one that only the test's process knows
    CONF.set_override("connection", cloud["api_database"], "api_database")
    CONF.set_override("transport_url", cloud["amqp"].replace("amqp://", "rabbit://"))
    CONF.set_override("use_stderr", True)
    CONF.set_override("debug", False)
    CONF.set_override("report_interval", 86_400)  # each report would lock the test's database


def connect(cloud: dict[str, Any]) -> None:
    """The test's databases: those of cells have names instead of addresses."""
    api_db_api.configure(CONF)
    contexts = {name: main_db_api.create_context_manager(connection=url) for name, url in cloud["cells"].items()}
    main_db_api.create_context_manager = lambda connection=None: contexts[connection]
    real = main_db_api.get_context_manager
    main_db_api.get_context_manager = lambda context: real(context) if targeted(context) else contexts[default]
    default = list(contexts)[-1] if len(contexts) == 1 else list(contexts)[1]  # cell0 comes first


def targeted(context: Any) -> bool:
    """Whether a context names a cell's database."""
    return getattr(context, "db_connection", None) is not None


def run(given: dict[str, Any]) -> None:
    """{"cloud": a file, see `outside.cloud`; "ready": the file that is made when it serves}. Until SIGTERM."""
    wait_for_locks()
    cloud = json.loads(Path(given["cloud"]).read_text())
    log.register_options(CONF)
    settle(cloud)
    log.setup(CONF, "nova")
    connect(cloud)
    if cloud["weights"]:
        nova_fixtures.HostNameWeigher.get_weights = lambda weigher: cloud["weights"]
    objects.register_all()
    nova_fixtures.OpenStackSDKFixture().setUp()
    stand = Stand()
    stand.setUp()
    for other in (NeutronFixture, nova_fixtures.GlanceFixture):
        stand.useFixture(other(stand))
    name_a_database()
    BerthFixture(cloud["placement"]).setUp()
    rpc.add_extra_exmods("nova.test")
    rpc.set_defaults(control_exchange="nova")
    rpc.init(CONF)
    served = service.Service.create(host="scheduler", binary="nova-scheduler", topic="scheduler")
    served.start()
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    Path(given["ready"]).touch()
    signal.pause()
    # The calls in hand are answered first: `served.stop` shuts the pools down which they need.
    served.rpcserver.stop()
    served.rpcserver.wait()


if __name__ == "__main__":
    serve(run)
