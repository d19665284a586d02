"""Traces of a live berth through collectors made by others, read back by their own API; see scripts/nightly collector.

Rotel is a collector: it takes OTLP in both encodings and passes it on. Arize Phoenix stores traces and takes protobuf
alone. So spans go through Rotel to Phoenix, from worker processes on a real RabbitMQ and PostgreSQL. Each build must be
one tree with the spans of all workers.

Run by the collectors' own interpreter, not by berth's: it imports nothing of berth's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
WAIT_S = 120.0
STOP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 300.0
LOOK_AGAIN_S = 0.2
PAGE = 1000  # spans of one answer, the most that Phoenix gives
BOOTS = 2
PROJECT = "default"  # Phoenix's name for what names none
# A span of each hop of a build, by its service.
HOPS = {
    "build": "cli",
    "scheduler.requests": "scheduler",
    "request placement.claim.v1": "scheduler",
    "placement.requests": "placement",
    "conductor.requests": "conductor",
    "compute.{service}": "compute",
    "conductor.results": "conductor",
    "scheduler.builds": "scheduler",
}


class Unexpected(Exception):
    """A collector does not have what it should."""


def until(what: str, condition: Callable[[], Any]) -> Any:
    """Wait until it holds; returns what it returned. Raises Unexpected."""
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise Unexpected(f"not within {WAIT_S:g} s: {what}")
        time.sleep(LOOK_AGAIN_S)
    return found


def free_port() -> int:
    """A port of loopback that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def foreign_environment(**more: str) -> dict[str, str]:
    """This environment without settings of berth or of a collector that the user has."""
    kept = {
        name: one for name, one in os.environ.items() if not name.startswith(("BERTH_", "PHOENIX_", "ROTEL_", "OTEL_"))
    }
    return kept | more


@contextmanager
def running(command: list[str], env: Mapping[str, str], directory: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A server in that directory; its output is in `<name>.log` there."""
    with (directory / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, env=env, cwd=directory, stdout=log, stderr=log, text=True)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until_it_answers(url: str, process: subprocess.Popen[str], name: str) -> None:
    """Wait until the server has an answer of any kind. Raises Unexpected."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(LOOK_AGAIN_S)
    raise Unexpected(f"{name} did not start; see {name}.log")


class Phoenix:
    """Arize Phoenix, by its REST API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def spans(self, **filters: str) -> list[dict[str, Any]]:
        """All spans that match, page after page."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            query = urllib.parse.urlencode({"limit": PAGE, **filters, **({"cursor": cursor} if cursor else {})})
            url = f"{self.url}/v1/projects/{PROJECT}/spans/otlpv1?{query}"
            with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                page = json.load(answer)
            found += page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    def trace_of(self, instance: str) -> list[dict[str, Any]]:
        """The spans of the trace whose first span names this instance; none as long as there is none."""
        for root in self.spans(parent_id="null", name="build"):
            if attributes(root).get("berth.instance") == instance:
                return self.spans(trace_id=root["trace_id"])
        return []


@contextmanager
def phoenix(directory: Path) -> Iterator[Phoenix]:
    """A Phoenix with an empty database of its own, on loopback."""
    port = free_port()
    env = foreign_environment(
        PHOENIX_WORKING_DIR=str(directory),
        PHOENIX_HOST="127.0.0.1",
        PHOENIX_PORT=str(port),
        PHOENIX_GRPC_PORT=str(free_port()),
        PHOENIX_TELEMETRY_ENABLED="false",
        PHOENIX_ALLOW_EXTERNAL_RESOURCES="false",
        PHOENIX_DISABLE_AGENT_ASSISTANT="true",
    )
    command = [str(Path(sys.executable).parent / "phoenix"), "serve"]
    with running(command, env, directory, "phoenix") as process:
        url = f"http://127.0.0.1:{port}"
        until_it_answers(f"{url}/v1/projects", process, "phoenix")
        yield Phoenix(url)


@contextmanager
def rotel(to: Phoenix, directory: Path) -> Iterator[str]:
    """A Rotel that passes all traces on, and writes what it has taken to rotel.log; its address."""
    found = find_spec("rotel")
    assert found is not None and found.origin is not None
    port = free_port()
    options = {
        "--pid-file": str(directory / "rotel.pid"),
        "--otlp-http-endpoint": f"127.0.0.1:{port}",
        "--otlp-grpc-endpoint": f"127.0.0.1:{free_port()}",
        "--exporter": "otlp",
        "--otlp-exporter-endpoint": to.url,
        "--otlp-exporter-protocol": "http",
        "--debug-log": "traces",
        "--debug-log-verbosity": "detailed",
    }
    command = [str(Path(found.origin).parent / "rotel-agent"), "start"]
    for option in options.items():
        command += option
    with running(command, foreign_environment(), directory, "rotel") as process:
        until_it_answers(f"http://127.0.0.1:{port}/", process, "rotel")
        yield f"http://127.0.0.1:{port}"


def services_of(log: Path) -> dict[str, str]:
    """{span: the service that it is of}, as Rotel has taken them."""
    service, found = "", dict[str, str]()
    for line in log.read_text(errors="replace").splitlines():
        if named := re.search(r"-> service\.name: Str\((.*)\)", line):
            service = named[1]
        elif named := re.match(r"\s+ID\s+: ([0-9a-f]{16})$", line):
            found[named[1]] = service
    return found


def attributes(span: Mapping[str, Any]) -> dict[str, str]:
    """A span's attributes with text."""
    return {one["key"]: one["value"].get("string_value") or "" for one in span["attributes"] or ()}


@contextmanager
def berth(command: str, directory: Path, **traces: str) -> Iterator[dict[str, str]]:
    """A berth with a few hosts that traces every request; the environment of its commands."""
    env = foreign_environment(
        BERTH_STATE_DIR=str(directory / "state"),
        BERTH_UP__NODES="0",
        BERTH_UP__REST="false",
        BERTH_UP__WEB="false",
        BERTH_COMPUTE__SIMULATED__HOSTS="4",
        BERTH_TRACES__RATIO="1.0",
        BERTH_TRACES__MOST_PER_S="1000",
        **traces,
    )
    with running([command, "up", "--processes"], env, directory, "berth") as process:
        log, end = directory / "berth.log", time.monotonic() + START_TIMEOUT_S
        while "\nCtrl-C" not in log.read_text():
            if time.monotonic() > end or process.poll() is not None:
                raise Unexpected(f"berth did not start; see {log}: {log.read_text()[-1000:]}")
            time.sleep(LOOK_AGAIN_S)
        yield env


def boot(command: str, env: Mapping[str, str], directory: Path) -> list[str]:
    """Boot machines and wait for them; their uuids. Raises Unexpected."""
    words = [command, "boot", "--flavor", "m1.small", "--count", str(BOOTS), "--wait", "-o", "json"]
    done = subprocess.run(
        words, env=env, cwd=directory, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise Unexpected(f"berth boot: {done.returncode}: {done.stdout} {done.stderr}")
    return [one["instance_uuid"] for one in json.loads(done.stdout)["items"]]


def one_tree(store: Phoenix, instance: str) -> list[dict[str, Any]]:
    """The spans of a build, once the store has all: one root, each other below another, and every hop."""

    def complete() -> list[dict[str, Any]]:
        spans = store.trace_of(instance)
        ids = {one["span_id"] for one in spans}
        roots = [one for one in spans if not one["parent_span_id"]]
        apart = [one for one in spans if one["parent_span_id"] and one["parent_span_id"] not in ids]
        is_whole = len(roots) == 1 and not apart and HOPS.keys() <= {one["name"] for one in spans}
        return spans if is_whole else []

    try:
        return list(until(f"the whole trace of {instance}", complete))
    except Unexpected as late:
        spans = store.trace_of(instance)
        ids = {one["span_id"] for one in spans}
        apart = [one["name"] for one in spans if one["parent_span_id"] and one["parent_span_id"] not in ids]
        missing = sorted(HOPS.keys() - {one["name"] for one in spans})
        roots = [one["name"] for one in spans if not one["parent_span_id"]]
        found = f"{len(spans)} spans, roots: {roots}, without their parent: {apart}, missing: {missing}"
        raise Unexpected(f"{late}; {found}") from None


def through_both(command: str, store: Phoenix, directory: Path) -> dict[str, Any]:
    """From worker processes, through Rotel to Phoenix."""
    with rotel(store, directory) as url, berth(command, directory, BERTH_TRACES__ENDPOINT=url) as env:
        trees = [one_tree(store, uuid) for uuid in boot(command, env, directory)]
    service_of = services_of(directory / "rotel.log")
    for tree in trees:
        found = {one["name"]: service_of.get(one["span_id"]) for one in tree}
        wrong = {name: found[name] for name, service in HOPS.items() if found[name] != service}
        if wrong:
            raise Unexpected(f"spans of another service than they should be: {wrong}")
    services = {service_of.get(one["span_id"], "") for tree in trees for one in tree}
    return {"spans": [len(tree) for tree in trees], "services": sorted(services)}


def main() -> int:
    """0 when every build was one tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("-o", "json", type=Path, help="write what was done there")
    options = parser.parse_args()
    report: dict[str, Any] = {"passed": True, **{name: version(name) for name in ("arize-phoenix", "rotel")}}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-collector-")))
        scratch.chmod(0o755)  # root's PostgreSQL runs as another user
        store = stack.enter_context(phoenix(scratch))
        began = time.monotonic()
        try:
            report |= through_both(options.berth, store, scratch)
        except Unexpected as wrong:
            report |= {"passed": False, "wrong": str(wrong)}
        report["seconds"] = round(time.monotonic() - began, 1)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
