"""Commands with a token and an address, and nothing else: no broker, no database, no settings."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.forks import run_berth
from tests.system.web_server import Web, running_web

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

TIMEOUT_S = 120.0
NO, USAGE = 1, 2


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with running_web() as found:
        yield found


class Commands:
    """`berth` of one who has a token."""

    def __init__(self, web: Web, token: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        self.env = {**kept, "BERTH_URL": web.tokens_url, "BERTH_TOKEN": token, "BERTH_STATE_DIR": "/nonexistent"}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_berth(*words, env=self.env, timeout_s=TIMEOUT_S)

    def data(self, *words: str) -> Any:
        done = self(*words, "-o", "json")
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        data = json.loads(done.stdout)
        return data["items"] if isinstance(data, dict) and data.keys() == {"items", "next"} else data

    def refused(self, *words: str) -> tuple[int, str]:
        """The exit status, and the code on standard error."""
        done = self(*words)
        return done.returncode, done.stderr.rpartition("(")[2].rstrip(")\n")


def test_a_project_does_all_that_it_may_with_a_token(web: Web) -> None:
    alice = Commands(web, "alice")
    assert {one["name"] for one in alice.data("flavor", "list")} >= {"m1.tiny", "m1.small"}
    assert alice.data("zone", "list") == []
    alice.data("group", "create", "p-alice/pair", "--policy", "anti-affinity")
    (one,) = alice.data("boot", "--flavor", "m1.tiny", "--name", "web", "--group", "pair", "--wait")
    assert one["state"] == "active"
    instance = one["instance_uuid"]
    assert [found["instance_uuid"] for found in alice.data("list")] == [instance]
    assert alice.data("show", "web")["project_id"] == alice.data("show", instance[:8])["project_id"] == "p-alice"
    assert instance in alice.data("group", "show", "p-alice/pair")["members"]
    assert [found["project"] for found in alice.data("quota", "list")] == ["p-alice"]
    for words in (("stop", instance), ("start", "web"), ("resize", "web", "--flavor", "m1.small"), ("revert", "web")):
        found = alice.data("instance", *words, "--wait")
        assert (found[0] if isinstance(found, list) else found)["state"] == "done", words
    assert {found["kind"] for found in alice.data("action", "list")} == {"stop", "start", "resize", "revert"}
    assert alice.data("why", "web")["instance_uuid"] == instance
    assert alice("logs", "web", "--no-follow").returncode == 0
    assert alice.data("delete", "web", "--yes", "--wait")[0]["state"] == "deleted"
    alice.data("group", "delete", "p-alice/pair")


def test_what_is_anothers_is_not_there_and_what_is_an_operators_is_refused(web: Web) -> None:
    alice, bob, unknown = Commands(web, "alice"), Commands(web, "bob"), str(uuid.uuid4())
    (one,) = bob.data("boot", "--flavor", "m1.tiny", "--name", "bobs", "--wait")
    for name in ("bobs", one["instance_uuid"], unknown):
        assert alice.refused("show", name) == (NO, "instance.unknown")
        assert alice.refused("delete", name, "--yes") == (NO, "instance.unknown")
        assert alice.refused("instance", "stop", name) == (NO, "instance.unknown")
    assert alice.refused("list", "--project", "p-bob") == (USAGE, "project.forbidden")
    assert alice.refused("boot", "--flavor", "m1.tiny", "--project", "p-bob") == (USAGE, "project.forbidden")
    for words in (
        ("host", "list"), ("service", "list"), ("worker", "list"), ("cell", "list"), ("event", "list"),
        ("aggregate", "list"), ("drain", "list"), ("quarantine", "list"), ("dead-letter", "list"), ("fence", "list"),
        ("host", "disable", "x", "--reason", "r"), ("flavor", "delete", "m1.tiny"),
        ("quota", "set", "p-alice", "VCPU=1"),
        ("group", "create", "p-bob/x", "--policy", "affinity"), ("token", "list"),
    ):  # fmt: skip
        assert alice.refused(*words) == (USAGE, "role.forbidden"), words
    assert bob.data("delete", "bobs", "--yes", "--wait")[0]["state"] == "deleted"


def test_a_reader_sees_everything_and_changes_nothing(web: Web) -> None:
    reader = Commands(web, "see")
    for noun in ("host", "service", "worker", "cell", "event", "aggregate", "drain", "dead-letter", "fence", "action"):
        reader.data(noun, "list")
    assert reader("status").returncode in (0, 1, 2, 3)
    for words in (("boot", "--flavor", "m1.tiny"), ("host", "disable", "x", "--reason", "r")):
        assert reader.refused(*words) == (USAGE, "role.forbidden"), words


def test_a_wrong_token_is_refused_and_shown_nowhere(web: Web) -> None:
    done = Commands(web, "no-such-token")("list")
    assert (done.returncode, "auth.required" in done.stderr) == (USAGE, True), done.stderr
    assert "no-such-token" not in done.stdout + done.stderr
