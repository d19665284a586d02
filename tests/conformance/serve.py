"""OpenStack's Placement on loopback, over an empty database (an SQLAlchemy URL); run by the Python of its virtualenv
(`.berth/conformance`).

    PYTHON serve.py PORT_FILE DATABASE

Each token is taken as the user of its name, `admin` as an administrator. It ends with its input.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from oslo_config import cfg
from placement import conf as placement_conf
from placement import deploy


class Threading(ThreadingMixIn, WSGIServer):
    """A thread for each connection."""

    daemon_threads = True


class Quiet(WSGIRequestHandler):
    """Without a line for each request."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def main() -> None:
    """Serve until the input ends."""
    port_file, database = Path(sys.argv[1]), sys.argv[2]
    logging.disable(logging.CRITICAL)
    config = cfg.ConfigOpts()
    placement_conf.register_opts(config)
    config.set_override("auth_strategy", "noauth2", group="api")
    config.set_override("connection", database, group="placement_database")
    config.set_override("sync_on_startup", True, group="placement_database")
    config([], default_config_files=[])
    with make_server("127.0.0.1", 0, deploy.loadapp(config), Threading, Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        partial = port_file.with_suffix(".new")
        partial.write_text(str(server.server_port))
        partial.rename(port_file)
        sys.stdin.read()


if __name__ == "__main__":
    main()
