"""Copies a real Placement, while it is written, into berth's book with `berth placement import --from-url`.

Run by the conformance suite's own interpreter; see scripts/differential --move. The real one serves HTTP from a thread
here; a writer goes on changing it until the first passes are through, then stops. The command must then report that the
copy is equal, and both books must read the same through their APIs, generations included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
from compare import without_order
from generator import Generator
from servers import TOKEN, Server, berth, real_application

BEFORE, MEANWHILE_S = 400, 4.0
COMMAND_TIMEOUT_S = 240.0


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The URL of a real Placement over HTTP, one request at a time."""
    with (
        real_application() as (application, _),
        make_server("127.0.0.1", 0, application, handler_class=_Silent) as http,
    ):
        thread = threading.Thread(target=http.serve_forever, name="placement")
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


class Writer:
    """Changes the source: the requests of a differential story, whatever comes of each."""

    def __init__(self, source: Server, seed: int) -> None:
        self._source = source
        self._generator = Generator(random.Random(seed))
        self.sent = 0

    def send(self, requests: int) -> None:
        """So many requests."""
        for _ in range(requests):
            call = self._generator.next()
            answer = self._source.send(call, self._source.resolve(call.body))
            self._generator.note(call, answer.status_code, answer.json() if _is_json(answer) else None)
            self.sent += 1

    def go_on(self, seconds: float) -> None:
        """For so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.send(1)


def _is_json(answer: httpx.Response) -> bool:
    return bool(answer.content) and answer.headers.get("content-type", "").startswith("application/json")


def main() -> int:
    """0 when the copy was equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    env = {**os.environ, "BERTH_DATABASE__URL": os.environ["DATABASE_URL"]}
    with served() as url, httpx.Client(base_url=url, timeout=60) as client:
        source = Server(client)
        writer = Writer(source, options.seed)
        writer.send(BEFORE)
        command = [options.berth, "placement", "import", "--from-url", url, "--token", TOKEN]
        copying = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        writer.go_on(MEANWHILE_S)
        output, _ = copying.communicate(timeout=COMMAND_TIMEOUT_S)
        wanted = without_order(source.state())
    with berth(options.berth, DATABASE_URL=env["BERTH_DATABASE__URL"]) as copy:
        found = without_order(copy.state())
    equal = found == wanted and copying.returncode == 0
    report = {
        "equal": equal,
        "exit_status": copying.returncode,
        "output": output.splitlines(),
        "writes_and_reads_at_the_source": writer.sent,
        "providers": len(wanted["providers"]),
        "consumers": len(wanted["consumers"]),
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if found != wanted:
        sys.stdout.write(f"source {json.dumps(wanted, sort_keys=True)}\ncopy {json.dumps(found, sort_keys=True)}\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
