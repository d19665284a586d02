"""What a machine makes of our OpenAPI document, sent to a live berth: no answer may be a 500. See scripts/bad-input.

Run by the interpreter of schemathesis, which reads the document that `berth placement openapi` prints and invents
requests from it, valid ones and broken ones, from a seed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
HEADERS = ("X-Auth-Token: admin", "X-Roles: admin,service")


@contextlib.contextmanager
def berth(command: str) -> Iterator[str]:
    """The URL of a berth with an empty book of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "BERTH_TELEMETRY__LOG_LEVEL": "error"}
    process = subprocess.Popen(
        [command, "placement", "serve", "--scratch", "--api", address], env=env, stdout=sys.stderr
    )
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"http://{address}/"):
            if time.monotonic() > until or process.poll() is not None:
                sys.exit("berth did not start")
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    """Schemathesis's exit status: 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--schemathesis", required=True, help="the schemathesis command")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, default=8, help="at most so many requests an operation and phase")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="berth-openapi-") as folder, berth(options.berth) as url:
        document = Path(folder, "openapi.json")
        document.write_bytes(
            subprocess.run([options.berth, "placement", "openapi"], stdout=subprocess.PIPE, check=True).stdout
        )
        headers = [word for header in HEADERS for word in ("--header", header)]
        bounds = ["--max-examples", str(options.examples), "--seed", str(options.seed)]
        command = [options.schemathesis, "run", str(document), "--url", url, *headers, *bounds]
        return subprocess.run(
            [*command, "--mode", "all", "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"],
            cwd=folder,
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
