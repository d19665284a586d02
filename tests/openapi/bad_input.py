"""Inputs that a machine makes from our OpenAPI document, sent to a live berth: no answer may be a 500. See
scripts/nightly bad-input.

Run by the interpreter of schemathesis, which reads a document and invents requests from it, valid ones and broken ones,
from a seed: that of Placement's API, which `berth placement openapi` prints (door `placement`), or that of `/api/v1`,
which `berth serve web` serves (door `web`; there each answer is held to the document, too). Schemathesis prints into
files; here one line of JSON holds what came of it, read from schemathesis's own report: one that cannot be read, or
holds no request, has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
# The routes that are tested. Placement's own document describes less of its answers than berth's of its own.
CHECKS = {
    "placement": "not_a_server_error",
    "web": "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
}
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


@contextlib.contextmanager
def whole_berth(command: str) -> Iterator[str]:
    """The URL of the HTTP API of a whole berth with a few simulated hosts and one node."""
    with tempfile.TemporaryDirectory(prefix="berth-openapi-") as folder:
        os.chmod(folder, 0o755)  # as root the database runs as another user
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        env = {**os.environ, "BERTH_TELEMETRY__LOG_LEVEL": "error", "BERTH_STATE_DIR": f"{folder}/state"}
        env |= {
            "BERTH_UP__REST": "false",
            "BERTH_UP__WEB": "false",
            "BERTH_UP__NODES": "1",
            "BERTH_COMPUTE__SIMULATED__HOSTS": "2",
        }
        with contextlib.ExitStack() as stack:
            up = stack.enter_context(_process([command, "up"], env))
            assert up.stdout is not None
            if not any(b"Ctrl-C" in line for line in up.stdout):
                sys.exit("berth did not start")
            web = stack.enter_context(_process([command, "serve", "web", "--listen", address], env))
            until = time.monotonic() + START_TIMEOUT_S
            while not _answers(f"http://{address}/healthz"):
                if time.monotonic() > until or web.poll() is not None:
                    sys.exit("berth serve web did not start")
                time.sleep(0.1)
            yield f"http://{address}/api/v1"


@contextlib.contextmanager
def _process(words: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=sys.stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def finite(document: dict[str, Any]) -> dict[str, Any]:
    """The document without streams, which no tool waits for the end of."""
    paths = {path: known for path, known in document["paths"].items() if not path.endswith("/events")}
    return {**document, "paths": paths}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def judged(status: int, report: Path) -> dict[str, Any]:
    """The work of schemathesis by its report; `passed` when all of it was done and nothing was wrong."""
    try:
        parsed = json.loads(report.read_text())
        cases, operations = parsed["test_cases"], parsed["operations"]
        summary = {
            "seed": parsed["seed"],
            "operations": operations["tested"],
            "requests": cases["generated"],
            "failures": cases["with_failures"],
            "errors": cases["errored"] + len(parsed["errors"]),
            "seconds": round(parsed["running_time"], 1),
        }
        whole = parsed["complete"] is True and operations["tested"] == operations["total"] > 0
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        return {"passed": False, "requests": 0, "unreadable": f"{report.name}: {type(wrong).__name__}: {wrong}"}
    passed = status == 0 and whole and summary["requests"] > 0 and summary["failures"] == summary["errors"] == 0
    return {"passed": passed, **summary}


def invent(options: argparse.Namespace, output: Path, report: Path) -> int:
    """Schemathesis's exit status; its output is in the files."""
    door = whole_berth if options.door == "web" else berth
    with tempfile.TemporaryDirectory(prefix="berth-openapi-") as folder, door(options.berth) as url:
        document = Path(folder, "openapi.json")
        document.write_bytes(_described(options, url))
        headers = [word for header in HEADERS for word in ("--header", header)]
        bounds = ["--max-examples", str(options.examples), "--seed", str(options.seed)]
        checks = ["--mode", "all", "--checks", CHECKS[options.door], "--phases", "examples,coverage,fuzzing"]
        reports = ["--report", "json", "--report-json-path", str(report)]
        command = [options.schemathesis, "run", str(document), "--url", url, *headers, *bounds, *checks, *reports]
        with output.open("wb") as file:
            return subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def _described(options: argparse.Namespace, url: str) -> bytes:
    if options.door == "web":
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=START_TIMEOUT_S) as answer:
            return json.dumps(finite(json.load(answer))).encode()
    return subprocess.run([options.berth, "placement", "openapi"], stdout=subprocess.PIPE, check=True).stdout


def main() -> int:
    """0 when requests were made and nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--schemathesis", required=True, help="the schemathesis command")
    parser.add_argument("--door", choices=sorted(CHECKS), default="placement")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, default=8, help="at most so many requests an operation and phase")
    parser.add_argument("--json", type=Path, help="write what was done there")
    parser.add_argument("--kept", type=Path, default=Path(".berth"), help="where schemathesis's own words go")
    options = parser.parse_args()
    options.kept.mkdir(parents=True, exist_ok=True)
    output, report = (options.kept.resolve() / f"schemathesis-{options.door}.{ending}" for ending in ("txt", "json"))
    report.unlink(missing_ok=True)  # that of an earlier run shows nothing of this one
    summary = {**judged(invent(options, output, report), report), "output": str(options.kept / output.name)}
    if not summary["passed"]:
        with output.open() as file:
            shutil.copyfileobj(file, sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
