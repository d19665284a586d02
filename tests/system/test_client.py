"""The client of `/api/v1` before a whole running system: builds followed, tokens made, used and revoked, a login."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from berth.client import ApiProblem, AsyncClient, Client
from berth.client.types import AdminStateRequest, TokenBody
from bus.contracts.build import BuildEvent, BuildRecord, BuildRequest
from bus.contracts.objects import Flavor, ObjectKind, TokenRole
from bus.contracts.operations import AdminState
from tests.system.web_server import Web, running_web

pytestmark = [pytest.mark.system, pytest.mark.postgres]


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with running_web() as found:
        yield found


@pytest.fixture
def operator(web: Web) -> Iterator[Client]:
    with Client(web.tokens_url, "op") as client:
        yield client


def refusal(call: Any, *given: Any) -> tuple[int, str]:
    with pytest.raises(ApiProblem) as refused:
        call(*given)
    return refused.value.status, refused.value.code


def test_a_build_is_asked_for_followed_and_deleted(web: Web) -> None:
    with Client(web.tokens_url, "alice") as alice:
        taken = alice.create_build({"flavor": "m1.tiny"})
        *_, last = alice.follow_build(taken.instance_uuid)
        assert last.state == "active"
        assert [one.instance_uuid for one in alice.list_builds(limit=1).builds] == [taken.instance_uuid]
        assert {line.what for line in alice.show_build(taken.instance_uuid).timeline} >= {"requested", "active"}
        alice.delete_build(taken.instance_uuid)
        *_, last = alice.follow_build(taken.instance_uuid, until="deleted")
        assert last.state == "deleted"
        assert refusal(alice.list_hosts) == (403, "role.forbidden")
        assert refusal(alice.show_build, str(uuid.uuid4())) == (404, "build.unknown")


async def test_many_follow_at_once_without_a_thread_each(web: Web) -> None:
    async with AsyncClient(web.tokens_url, "bob") as bob:

        async def build() -> list[BuildRecord | BuildEvent]:
            request = BuildRequest(instance_uuid=str(uuid.uuid4()), project_id="p-bob", flavor="m1.tiny")
            first, second = await bob.create_build(request), await bob.create_build(request)
            assert first == second
            return [one async for one in bob.follow_build(request.instance_uuid)]

        ends = [items[-1].state for items in await asyncio.gather(*(build() for _ in range(5)))]
    assert set(ends) <= {"active", "failed"} and len(ends) == 5


def test_an_operator_reads_and_decides(operator: Client) -> None:
    host = operator.list_hosts(up=True, limit=1)[0]
    shown = operator.decide_about_host(host.name, AdminStateRequest(state=AdminState.DISABLED, reason="fan"))
    assert (shown.host_uuid, shown.by) == (host.uuid, "op")
    assert operator.show_host(host.uuid).host.enabled is False
    operator.decide_about_host(host.uuid, AdminStateRequest(state=AdminState.ENABLED))
    assert {one.heartbeat.role for one in operator.list_workers(role="scheduler")} == {"scheduler"}
    assert len(operator.list_cells()) == 2 and operator.list_services(up=True)


def test_objects_have_any_name(operator: Client) -> None:
    for name in ("c-flavor", "a/b", "..", "\u20ac ?#%"):
        operator.set_flavors(name, Flavor(vcpus=1, memory_mb=64, disk_gb=1))
        assert operator.show_flavors(name).name == name
        operator.patch_flavors(name, {"memory_mb": 128})
        assert operator.show_flavors(name).body["memory_mb"] == 128
        operator.delete_flavors(name)
        assert refusal(operator.show_flavors, name) == (404, "object.unknown")


def test_a_token_is_made_used_and_revoked(web: Web, operator: Client) -> None:
    made = operator.create_token(TokenBody(name="ci", role=TokenRole.PROJECT, project="p-ci", reason="pipeline"))
    assert (made.created_by, made.project) == ("op", "p-ci")
    assert refusal(operator.create_token, TokenBody(name="ci", role=TokenRole.READER)) == (409, "object.conflict")
    with Client(web.tokens_url, made.token) as ci:
        assert (ci.show_caller().name, ci.show_caller().project) == ("ci", "p-ci")
        assert ci.list_builds().builds == ()
        assert refusal(ci.list_tokens) == (403, "role.forbidden")
        assert refusal(ci.create_token, TokenBody(name="more", role=TokenRole.OPERATOR)) == (403, "role.forbidden")
        listed = [one for one in operator.list_tokens() if one.name == "ci"]
        assert [(one.name, one.role, one.project) for one in listed] == [("ci", "project", "p-ci")]
        assert operator.revoke_token("ci").name == "ci"
        assert refusal(ci.show_caller) == (401, "auth.required")
    assert refusal(operator.revoke_token, "ci") == (404, "object.unknown")
    log = operator.list_changes(kind=ObjectKind.TOKEN, name="ci")
    assert [(one.actor, one.reason, one.after is None) for one in log] == [("op", "", True), ("op", "pipeline", False)]
    assert made.token not in repr(log)


def test_a_person_logs_in_on_the_page_with_a_token_on_record_until_it_is_revoked(web: Web, operator: Client) -> None:
    made = operator.create_token(TokenBody(name="person", role=TokenRole.READER))
    with web.client("x") as browser:
        del browser.headers["authorization"]
        assert browser.post("/login", data={"token": made.token}).status_code == 303
        assert browser.get("/api/v1/caller").json()["name"] == "person"
        operator.revoke_token("person")
        assert browser.get("/api/v1/caller").status_code == 401


def test_a_token_without_its_project_is_refused(operator: Client) -> None:
    assert refusal(operator.create_token, TokenBody(name="x", role=TokenRole.PROJECT)) == (400, "request.invalid")
    assert refusal(operator.create_token, TokenBody(name="x", role=TokenRole.READER, project="p")) == (
        400,
        "request.invalid",
    )
