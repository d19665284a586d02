"""A real Nova API on loopback, inside Nova's own functional test fixtures; run by the Python of Nova's virtualenv.

    PYTHON api_server.py PORT_FILE HOST...

Compute services with these names, conductor, scheduler and Placement run in the same process, without a broker. A
token of `admin:PROJECT` or `service-...` is an administrator's, other requests are 401. It ends with its input.
"""

from __future__ import annotations

import json
import os
import posix
import sys
import unittest
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import webob.dec
import webob.exc  # noqa: F401  (nova.api.wsgi reaches for both)
from nova import context, objects
from nova.api import wsgi
from nova.objects.base import NovaObjectSerializer
from nova.tests.functional import integrated_helpers

# Where a wheel has it; the fixtures look for it in a source tree.
PASTE = Path(sys.prefix) / "etc" / "nova" / "api-paste.ini"
PORT_FILE, HOSTS = Path(sys.argv[1]), sys.argv[2:]


def _has_ended() -> bool:
    try:
        return posix.read(0, 1) == b""  # the one of `os` is eventlet's, and waits
    except BlockingIOError:
        return False


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Not on standard error."""


class Cloud(integrated_helpers.ProviderUsageBaseTestCase):
    """All of it is made by the fixtures of the base class; the one test serves until its input ends."""

    compute_driver = "fake.SmallFakeDriver"
    REQUIRES_LOCKING = False

    def setUp(self) -> None:
        """Every loader of this process takes the file of the wheel."""
        made = wsgi.Loader.__init__
        self.patch(wsgi.Loader, "__init__", lambda loader, config_path=None: made(loader, str(PASTE)))
        super().setUp()

    def primitives(self) -> dict[str, Any]:
        """All aggregates and all instances as Nova's computes and API cast them to schedulers."""
        admin = context.get_admin_context()
        serializer = NovaObjectSerializer()
        with context.target_cell(admin, self.cell_mappings["cell1"]) as cell:
            instances = objects.InstanceList.get_all(cell)
        aggregates = objects.AggregateList.get_all(admin)
        return {
            "aggregates": serializer.serialize_entity(admin, aggregates),
            "instance_info": serializer.serialize_entity(admin, instances),
        }

    def test_serve(self) -> None:
        for host in HOSTS:
            self._start_compute(host)
        app = wsgi.Loader().load_app("osapi_compute")

        def guarded(environ: dict[str, Any], start_response: Any) -> Any:
            token = environ.get("HTTP_X_AUTH_TOKEN", "")
            path = environ.get("PATH_INFO", "")
            if path == "/control/cells":
                found = objects.HostMappingList.get_all(context.get_admin_context())
                start_response("200 OK", [("Content-Type", "text/plain")])
                return ["".join(f"{one.host} {one.cell_mapping.uuid}\n" for one in found).encode()]
            if path == "/control/casts":
                start_response("200 OK", [("Content-Type", "application/json")])
                return [json.dumps(self.primitives()).encode()]
            if not token.startswith(("admin:", "service-")) and path.strip("/") not in ("", "v2.1"):
                start_response("401 Unauthorized", [("Content-Type", "application/json")])
                return [b"{}"]
            project = token.partition(":")[2] or "6f70656e737461636b20342065766572"
            environ |= {
                "HTTP_X_AUTH_USER": "admin",
                "HTTP_X_AUTH_PROJECT_ID": project,
                "HTTP_X_ROLES": "admin,member,reader",
            }
            return app(environ, start_response)

        with make_server("127.0.0.1", 0, guarded, handler_class=_Quiet) as server:
            server.timeout = 0.2
            os.set_blocking(0, False)  # a thread of its own would be eventlet's, and block this one
            PORT_FILE.write_text(str(server.server_port))
            while not _has_ended():
                server.handle_request()


if __name__ == "__main__":
    os.environ.setdefault("OS_TEST_TIMEOUT", "0")
    del sys.argv[1:]
    unittest.main(argv=[sys.argv[0]], verbosity=0)
