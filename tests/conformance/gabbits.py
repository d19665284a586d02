"""Runs the gabbi tests of the installed openstack-placement against a live berth; see scripts/conformance.

Run by the suite's own interpreter, not by berth's: it imports nothing of berth's. A test file starts from the state
that its fixture makes in an in-process Placement on SQLite. That state is read back over that Placement's API, and made
again over HTTP in berth, generations included; then the file's tests run against berth.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from gabbi import handlers, suitemaker, utils
from placement import policies
from placement.tests import functional
from placement.tests.functional.fixtures import gabbits as fixtures

LATEST = "1.39"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
SUITE = Path(functional.__file__).parent / "gabbits"

# Values that cannot be sent over a real connection: gabbi's HTTP client refuses `content-length: hi mom`.
EXCLUDED = {("basic-http", "bad content length not int")}

OLD_DEFAULTS = {"oslo_policy": {"enforce_new_defaults": "False"}}
CORS = {"cors": {"allowed_origin": "http://valid.example.com", "allow_headers": "openstack-api-version"}}
# The fixture class that marks a group's files, the group's settings, and a check that opens every rule.
GROUPS: list[tuple[str, Any, dict[str, dict[str, str]], str | None]] = [
    ("cors", fixtures.CORSFixture, {**OLD_DEFAULTS, **CORS}, None),
    ("open-policy", fixtures.OpenPolicyFixture, OLD_DEFAULTS, "@"),
    ("secure-rbac", fixtures.SecureRBACPolicyFixture, {"oslo_policy": {"enforce_new_defaults": "True"}}, None),
    ("default", fixtures.APIFixture, OLD_DEFAULTS, None),
]


class Wrong(Exception):
    """The state that a file starts from cannot be made."""


class Placement:
    """A Placement API, as its administrator sees it."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def call(self, method: str, path: str, body: Any = None, version: str = LATEST) -> Any:
        """The answer's data. Raises Wrong."""
        headers = {"x-auth-token": "admin", "openstack-api-version": f"placement {version}"}
        answer = self._client.request(method, path, json=body, headers=headers)
        if not answer.is_success:
            raise Wrong(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.content else None

    def providers(self) -> list[dict[str, Any]]:
        """All providers, parents before children."""
        found: list[dict[str, Any]] = self.call("GET", "/resource_providers")["resource_providers"]
        ordered: list[dict[str, Any]] = []
        known: set[str | None] = {None}
        while len(ordered) < len(found):
            ready = [p for p in found if p["uuid"] not in known and p["parent_provider_uuid"] in known]
            if not ready:
                raise Wrong("a provider's parent is missing")
            known.update(p["uuid"] for p in ready)
            ordered += ready
        return ordered

    def state(self) -> dict[str, Any]:
        """Everything that the API shows, in a form that can be compared."""
        providers, consumers = {}, {}
        for provider in self.providers():
            path = f"/resource_providers/{provider['uuid']}"
            part = {kind: self.call("GET", f"{path}/{kind}") for kind in ("inventories", "traits", "aggregates")}
            providers[provider["uuid"]] = {
                "name": provider["name"],
                "parent": provider["parent_provider_uuid"],
                "generation": provider["generation"],
                "inventories": part["inventories"]["inventories"],
                "traits": sorted(part["traits"]["traits"]),
                "aggregates": sorted(part["aggregates"]["aggregates"]),
            }
            for consumer in self.call("GET", f"{path}/allocations")["allocations"]:
                held = consumers[consumer] = self.call("GET", f"/allocations/{consumer}")
                held["allocations"] = {p: {"resources": a["resources"]} for p, a in held["allocations"].items()}
        return {"providers": providers, "consumers": consumers, "traits": self.traits(), "classes": self.classes()}

    def traits(self) -> list[str]:
        """The custom ones, sorted."""
        return sorted(self.call("GET", "/traits?name=startswith:CUSTOM_")["traits"])

    def classes(self) -> list[str]:
        """The custom ones, sorted."""
        names = [row["name"] for row in self.call("GET", "/resource_classes")["resource_classes"]]
        return sorted(name for name in names if name.startswith("CUSTOM_"))

    def wipe(self) -> None:
        """Remove everything."""
        providers = self.providers()
        for consumer in {
            consumer
            for p in providers
            for consumer in self.call("GET", f"/resource_providers/{p['uuid']}/allocations")["allocations"]
        }:
            self.call("DELETE", f"/allocations/{consumer}")
        for provider in reversed(providers):
            self.call("DELETE", f"/resource_providers/{provider['uuid']}")
        for name in self.traits():
            self.call("DELETE", f"/traits/{name}")
        for name in self.classes():
            self.call("DELETE", f"/resource_classes/{name}")

    def make(self, state: dict[str, Any]) -> None:
        """Make a state in an empty placement. Raises Wrong when it does not come out equal."""
        for name in state["classes"]:
            self.call("PUT", f"/resource_classes/{name}")
        for name in state["traits"]:
            self.call("PUT", f"/traits/{name}")
        for uuid, provider in state["providers"].items():
            self._make_provider(uuid, provider)
        for consumer, held in state["consumers"].items():
            body, version = {**held, "consumer_generation": None}, LATEST
            if held["consumer_type"] == "unknown":  # as it was before there were types
                del body["consumer_type"]
                version = "1.37"
            self.call("PUT", f"/allocations/{consumer}", body, version)
        for uuid, provider in state["providers"].items():
            # A write of inventories moves the generation whether or not it changes anything.
            path = f"/resource_providers/{uuid}"
            for generation in range(self.call("GET", path)["generation"], provider["generation"]):
                self._put(path, "inventories", provider["inventories"], generation)
        made = self.state()
        if made != state:
            raise Wrong(f"want {json.dumps(state, sort_keys=True)}\nhave {json.dumps(made, sort_keys=True)}")

    def _make_provider(self, uuid: str, provider: dict[str, Any]) -> None:
        path = f"/resource_providers/{uuid}"
        body = {"uuid": uuid, "name": provider["name"]}
        if provider["parent"]:
            body["parent_provider_uuid"] = provider["parent"]
        self.call("POST", "/resource_providers", body)
        if provider["aggregates"]:  # at 1.18 this leaves the generation alone
            self.call("PUT", f"{path}/aggregates", provider["aggregates"], "1.18")
        for generation, kind in enumerate(kind for kind in ("traits", "inventories") if provider[kind]):
            self._put(path, kind, provider[kind], generation)

    def _put(self, path: str, kind: str, value: Any, generation: int) -> None:
        self.call("PUT", f"{path}/{kind}", {kind: value, "resource_provider_generation": generation})


def state_of(fixture: Any) -> dict[str, Any]:
    """The state that a fixture makes. It also sets the environment that its file's tests refer to."""
    fixture.start_fixture()
    try:
        transport = httpx.WSGITransport(app=fixtures.setup_app())
        with httpx.Client(base_url="http://fixture", transport=transport) as client:
            return Placement(client).state()
    finally:
        fixture.stop_fixture()


def run_file(name: str, suite: dict[str, Any], url: str) -> dict[str, Any]:
    """Counts of one file, and what went wrong with each test that failed."""
    host, port, _, _ = utils.host_info_from_target(url)
    state = state_of(getattr(fixtures, suite["fixtures"][0])())
    tests = list(
        suitemaker.test_suite_from_dict(
            unittest.TestLoader(),
            name,
            suite,
            str(SUITE),
            host,
            port,
            None,
            None,
            handlers=[handler() for handler in handlers.RESPONSE_HANDLERS],
        )
    )
    titles = {id(test): f"{number} {test.test_data['name']}" for number, test in enumerate(tests)}
    excluded = {titles[id(test)] for test in tests if (name, test.test_data["name"]) in EXCLUDED}
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            berth = Placement(client)
            berth.wipe()
            berth.make(state)
    except (Wrong, httpx.HTTPError) as error:
        failures = dict.fromkeys(titles.values(), f"the starting state: {error}")
    else:
        result = unittest.TestResult()
        unittest.TestSuite(tests).run(result)
        failures = {titles[id(test)]: text for test, text in (*result.failures, *result.errors)}
    failures = {title: text for title, text in failures.items() if title not in excluded}
    total = len(titles)
    return {
        "passed": total - len(failures) - len(excluded),
        "failed": len(failures),
        "total": total,
        "excluded": len(excluded),
        "failures": failures,
    }


@contextlib.contextmanager
def berth_with(command: list[str], settings: dict[str, dict[str, str]], check: str | None) -> Iterator[str]:
    """A berth with an empty placement of its own and these oslo settings, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="berth-conformance-") as folder:
        conf = configparser.ConfigParser()
        conf.read_dict({"api": {"auth_strategy": "noauth2"}, **settings})
        opened = [rule.name for rule in policies.list_rules() if rule.name != "admin_api"] if check else []
        Path(folder, "policy.yaml").write_text(json.dumps(dict.fromkeys(opened, check)))
        conf.set("oslo_policy", "policy_file", "policy.yaml")
        with Path(folder, "placement.conf").open("w") as file:
            conf.write(file)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
        env |= {"BERTH_PLACEMENT__REST__CONF_DIR": folder, "BERTH_TELEMETRY__LOG_LEVEL": "warning"}
        process = subprocess.Popen([*command, "--api", address], env=env, stdout=sys.stderr)
        try:
            wait_for(f"http://{address}/", process)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the API answers; ends this process when it never does."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    sys.exit("berth did not start")


def group_of(suite: dict[str, Any]) -> str:
    """The configuration that a file needs, by its fixture's class."""
    fixture = getattr(fixtures, suite["fixtures"][0])
    return next(name for name, marker, _, _ in GROUPS if issubclass(fixture, marker))


def notify(line: str) -> None:
    """Report it now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the files of every group; 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--json", type=Path, help="write passed, failed, total and files there")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="just these files, by name without .yaml")
    parser.add_argument("--memory", action="store_true", help="against a placement in memory instead of PostgreSQL")
    options = parser.parse_args()
    command = [options.berth, "placement", "serve", "--memory" if options.memory else "--scratch"]
    logging.disable()
    suites = {path.stem: utils.load_yaml(yaml_file=str(path)) for path in sorted(SUITE.glob("*.yaml"))}
    chosen = [name for name in suites if not options.only or name in options.only]
    files: dict[str, dict[str, Any]] = {}
    for group, _, settings, check in reversed(GROUPS):
        names = [name for name in chosen if group_of(suites[name]) == group]
        if not names:
            continue
        notify(f"# {group}")
        with berth_with(command, settings, check) as url:
            for name in names:
                got = files[name] = {"group": group, **run_file(name, suites[name], url)}
                notify(f"{name:44} passed {got['passed']:4}  failed {got['failed']:4}  of {got['total']:4}")
                for title, text in got["failures"].items():
                    notify(f"    {title}: {text.strip().splitlines()[-1][:160]}")
    counts = {key: sum(file[key] for file in files.values()) for key in ("passed", "failed", "total", "excluded")}
    notify("{passed} of {total} passed, {failed} failed, {excluded} cannot be sent over a connection".format(**counts))
    if options.json:
        options.json.write_text(json.dumps({**counts, "files": files}, indent=1))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
