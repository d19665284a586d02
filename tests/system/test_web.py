"""The pages and `/api/v1` over HTTP, before a whole running system; hostile names and other sites included."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from berth.config.settings import Settings
from berth.config.site import Site
from berth.up.in_one_process import site
from berth.up.worker_processes import NO_TLS
from berth.web import server
from berth.web.api import MAX_BODY_BYTES
from berth.web.server import WebCannotListen, WebServer
from berth.web.sign_in_sessions import MAX_SESSIONS, MAX_SESSIONS_OF_TOKEN, Access, WebRole, check_listen, read_tokens
from bus.clock import SystemClock
from bus.service.settings import SettingsError
from bus.transport import BusUnavailable
from tests.contract.rig import LocalRig
from tests.system.web_server import JSON, TIMEOUT_S, Web, boot, code_of, ended, follow, running_web, token_file
from tests.system.web_server import server as web_of

pytestmark = [pytest.mark.system, pytest.mark.postgres]

BROWSER = {"accept": "text/html"}
UNKNOWN = "00000000-0000-4000-8000-00000000dead"
HOSTILE = "<script>alert(1)</script>\n\u202eevil"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with running_web() as found:
        yield found


# --- builds


def test_a_build_is_requested_followed_shown_and_deleted(web: Web) -> None:
    with web.client() as client:
        instance = boot(client, name="first")
        name, last = follow(client, instance)[-1]
        assert last["state"] == "active" and (name == "build" or last["terminal"])
        shown = client.get(f"/api/v1/builds/{instance}").json()
        assert (shown["state"], shown["name"], shown["project_id"]) == ("active", "first", "p")
        assert {line["what"] for line in shown["timeline"]} >= {"requested", "chosen", "claimed", "active"}
        assert client.delete(f"/api/v1/builds/{instance}").status_code == 202
        assert follow(client, instance, "deleted")[-1][1]["state"] == "deleted"
        assert client.get(f"/api/v1/builds/{instance}").json()["state"] == "deleted"


def test_who_asked_is_on_record_whomever_the_body_names(web: Web) -> None:
    """Of a build, its actions and its delete: the token's name, and no caller asks in another's."""
    with web.client("alice") as client:
        instance = boot(client, project_id="p-alice", by="root")
        follow(client, instance)
        stop = client.post(f"/api/v1/builds/{instance}/actions", json={"kind": "stop", "by": "root"})
        assert ended(client, stop)["state"] == "done"
    with web.client("op") as client:
        assert client.delete(f"/api/v1/builds/{instance}").status_code == 202
        follow(client, instance, "deleted")
        timeline = client.get(f"/api/v1/builds/{instance}").json()["timeline"]
        asked = {line["what"]: line["by"] for line in timeline if "by" in line}
        assert asked == {"requested": "alice", "stop scheduled": "alice", "delete_requested": "op"}
        assert "(by alice)" in client.get(f"/builds/{instance}").text
        at = {line["what"]: line["at"] for line in timeline}
        assert at["requested"] <= at["chosen"] <= at["claimed"] <= at["dispatched"]


def test_the_uuid_makes_a_request_idempotent_and_other_content_a_conflict(web: Web) -> None:
    instance = str(uuid.uuid4())
    with web.client() as client:
        assert boot(client, instance_uuid=instance) == boot(client, instance_uuid=instance) == instance
        clash = client.post("/api/v1/builds", json={"flavor": "m1.small", "project_id": "p", "instance_uuid": instance})
        assert code_of(clash, 409) == "request.duplicate"


def test_pages_of_builds_follow_each_other(web: Web) -> None:
    with web.client() as client:
        together = client.post("/api/v1/builds", json={"flavor": "m1.tiny", "project_id": "paging", "count": 5}).json()
        made = set(together["members"])
        seen: list[str] = []
        following: str | None = "/api/v1/builds?project=paging&limit=2"
        while following is not None:
            page = client.get(following).json()
            seen += [one["instance_uuid"] for one in page["builds"]]
            following = page["next"]
            assert following is None or following.startswith("/api/v1/builds?"), "wherever a proxy has the server"
        assert set(seen) == made and len(seen) == len(made)


def test_builds_are_searched_by_host_flavor_code_and_time(web: Web) -> None:
    with web.client() as client:
        built = boot(client, project_id="search")
        refused = boot(client, project_id="search", flavor="bm.gold")

        def found(**parameters: str) -> list[dict[str, Any]]:
            builds: list[dict[str, Any]] = client.get(
                "/api/v1/builds", params={"project": "search", **parameters}
            ).json()["builds"]
            return builds

        for one in (built, refused):
            follow(client, one)
        machine = found(state="active")[0]
        assert [one["instance_uuid"] for one in found(host=machine["host"])] == [machine["instance_uuid"]]
        assert [one["instance_uuid"] for one in found(code="no_valid_host")] == [refused]
        assert [one["instance_uuid"] for one in found(flavor="bm.gold")] == [refused]
        assert found(cell="elsewhere") == [] and found(before="2001-01-01T00:00:00") == []
        assert len(found(after="2001-01-01")) == 2
        page = client.get("/builds", params={"project": "search", "code": "no_valid_host"}).text
        assert refused in page and machine["instance_uuid"] not in page


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{not json", JSON, 400, "request.malformed"),
        (b"\xff\xfe", JSON, 400, "request.malformed"),
        (b"[" * 100_000, JSON, 400, "request.malformed"),
        (b"[]", JSON, 400, "request.malformed"),
        (b'{"flavor": "m1.tiny", "project_id": "p", "hostt": "x"}', JSON, 400, "request.invalid"),
        (b'{"flavor": "m1.tiny", "project_id": "p", "type": "build.delete.v1"}', JSON, 400, "request.invalid"),
        (b'{"flavor": "m1.tiny", "project_id": "../p"}', JSON, 400, "request.invalid"),
        (b'{"project_id": "p"}', JSON, 400, "request.invalid"),
        (b'{"flavor": "m1.tiny", "project_id": "p", "instance_uuid": "x"}', JSON, 400, "request.invalid"),
        (b'{"flavor": "m1.tiny", "project_id": "p", "volumes": [{"volume": "x"}]}', JSON, 400, "request.invalid"),
        (b'{"flavor": "nope", "project_id": "p"}', JSON, 422, "flavor.unknown"),
        (b"{}", {"content-type": "text/plain"}, 415, "request.media_type"),
        (b" " * (MAX_BODY_BYTES + 1), JSON, 413, "request.too_large"),
    ],
)
def test_a_wrong_request_is_a_coded_problem(
    web: Web, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    with web.client() as client:
        assert code_of(client.post("/api/v1/builds", content=body, headers=headers), status) == code


def test_the_nearest_field_is_offered(web: Web) -> None:
    with web.client() as client:
        answer = client.post("/api/v1/builds", json={"flavor": "m1.tiny", "project_id": "p", "hostt": "x"})
        assert "did you mean `host`?" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/v1/nothing", 404, "path.unknown"),
        ("/api/v1/builds/nothing", 400, "request.invalid"),
        (f"/api/v1/builds/{UNKNOWN}", 404, "build.unknown"),
        (f"/api/v1/builds/{UNKNOWN}/events", 404, "build.unknown"),
        ("/api/v1/builds?limit=0", 400, "request.invalid"),
        ("/api/v1/builds?limit=1e9", 400, "request.invalid"),
        ("/api/v1/builds?state=nope", 400, "request.invalid"),
        ("/api/v1/builds?before=nan%00", 400, "request.invalid"),
        ("/api/v1/builds?projekt=p", 400, "request.invalid"),
        ("/api/v1/builds?after=yesterday", 400, "request.invalid"),
        ("/api/v1/builds?after=inf", 400, "request.invalid"),
        ("/api/v1/builds?cell=%2e%2e%2fp", 400, "request.invalid"),
        ("/api/v1/hosts?up=maybe", 400, "request.invalid"),
        ("/builds/nothing", 400, "request.invalid"),
        ("/builds?project=%2e%2e%2fp", 400, "request.invalid"),
        ("/builds?before=never", 400, "request.invalid"),
        (f"/fleet/{UNKNOWN}", 404, "host.unknown"),
    ],
)
def test_a_wrong_question_is_a_coded_problem(web: Web, path: str, status: int, code: str) -> None:
    with web.client() as client:
        assert code_of(client.get(path), status) == code
        assert code_of(client.put("/api/v1/builds"), 405) == "method.unknown"


def test_hosts_are_listed_with_what_is_used(web: Web) -> None:
    with web.client() as client:
        hosts = client.get("/api/v1/hosts", params={"up": "true"}).json()
        assert len(hosts) == 6 and all(host["resources"]["VCPU"][1] > 0 for host in hosts)
        assert {host["cell"] for host in client.get("/api/v1/hosts?cell=cell2").json()} == {"cell2"}


OPERATORS_RIGHTS: list[dict[str, Any]] = [
    {"kind": "revert", "force": True},
    {"kind": "migrate"},
    {"kind": "live-migrate", "host": "x"},
    {"kind": "evacuate", "fenced": True},
    {"kind": "unshelve", "host": "x"},
    {"kind": "resize", "flavor": "m1.small", "host": "x", "forced": True},
    {"kind": "rebuild", "image": "i", "image_source": {"source": "http://169.254.169.254/"}},
]
OPERATORS_BUILDS: list[dict[str, Any]] = [
    {"host": "x", "forced": True},
    {"image_source": {"source": "file:///etc/passwd"}},
    {"volumes": [{"volume_id": "v"}]},
]


def test_an_instance_is_moved_stopped_and_shown(web: Web) -> None:
    with web.client("op") as client, web.client("alice") as alice, web.client("bob") as bob, web.client("see") as see:
        uuid = alice.post("/api/v1/builds", json={"flavor": "m1.tiny"}).json()["instance_uuid"]
        assert follow(alice, uuid)[-1][1]["state"] == "active"
        path = f"/api/v1/builds/{uuid}/actions"
        assert code_of(bob.post(path, json={"kind": "stop"}), 404) == "build.unknown"
        assert code_of(see.post(path, json={"kind": "stop"}), 403) == "role.forbidden"
        for right in OPERATORS_RIGHTS:
            assert code_of(alice.post(path, json=right), 403) == "role.forbidden", right
        for fields in OPERATORS_BUILDS:
            assert code_of(alice.post("/api/v1/builds", json={"flavor": "m1.tiny", **fields}), 403) == "role.forbidden"
        assert code_of(alice.post(path, json={"kind": "stop", "project_id": "p-bob"}), 400) == "request.invalid"
        assert code_of(alice.post(path, json={"kind": "stop", "imag": "x"}), 400) == "request.invalid"
        stopped = alice.post(path, json={"kind": "stop"})
        assert ended(alice, stopped)["state"] == "done"
        assert alice.get(f"/api/v1/builds/{uuid}").json()["condition"] == "stopped"
        again = {"kind": "stop", "request_id": stopped.json()["request_id"]}
        assert alice.post(path, json=again).status_code == 202
        assert code_of(alice.post(path, json={**again, "kind": "start"}), 409) == "request.duplicate"
        assert code_of(bob.get(stopped.headers["location"]), 404) == "action.unknown"
        assert code_of(alice.post(path, json={"kind": "reboot", "soft": "yes"}), 400) == "request.invalid"
        soft = ended(alice, alice.post(path, json={"kind": "reboot", "soft": True}))
        assert (soft["state"], soft["code"]) == ("refused", "instance.not_running")
        assert ended(alice, alice.post(path, json={"kind": "start"}))["state"] == "done"
        before = client.get(f"/api/v1/builds/{uuid}").json()["host"]
        moved = ended(client, client.post(path, json={"kind": "live-migrate"}))
        assert moved["state"] == "done" and moved["host"] != before, moved
        assert client.get(f"/api/v1/builds/{uuid}").json()["host"] == moved["host"]
        kinds = [one["kind"] for one in alice.get("/api/v1/actions", params={"instance": uuid}).json()]
        assert kinds == ["live-migrate", "start", "reboot", "stop"]
        refused = ended(alice, alice.post(path, json={"kind": "confirm"}))
        why = alice.get(f"/api/v1/builds/{uuid}/why").json()
        assert (why["request"], why["request_id"], why["code"]) == ("confirm", refused["request_id"], refused["code"])
        assert why["cause"] and why["remedy"] and why["next"]
        of_stop = alice.get(f"/api/v1/builds/{uuid}/why", params={"request": stopped.json()["request_id"]}).json()
        assert (of_stop["request"], of_stop["request_state"], of_stop["code"]) == ("stop", "done", "")
        unknown = {"params": {"request": uuid}}
        assert code_of(alice.get(f"/api/v1/builds/{uuid}/why", **unknown), 404) == "action.unknown"
        assert code_of(bob.get(f"/api/v1/builds/{uuid}/why"), 404) == "build.unknown"
        assert bob.get("/api/v1/actions").json() == []


def test_an_operator_decides_about_a_host_and_is_named(web: Web) -> None:
    with web.client("op") as client, web.client("see") as reader, web.client("alice") as alice:
        host = client.get("/api/v1/hosts").json()[0]["name"]
        path, body = f"/api/v1/hosts/{host}/admin-state", {"state": "disabled", "reason": "fan"}
        try:
            response = client.put(path, json=body)
            assert (
                response.status_code == 200 and response.json()["by"] == "op" and response.json()["state"] == "disabled"
            )
            (known,) = (one for one in client.get("/api/v1/hosts").json() if one["name"] == host)
            assert known["enabled"] is False and known["admin"]["reason"] == "fan"
            assert code_of(reader.put(path, json=body), 403) == "role.forbidden"
            assert code_of(alice.put(path, json=body), 403) == "role.forbidden"
            assert code_of(client.put(path, json={**body, "reasn": "x"}), 400) == "request.invalid"
            assert code_of(client.put("/api/v1/hosts/nowhere/admin-state", json=body), 422) == "host.unknown"
            forget = f"/api/v1/hosts/{host}/delete"
            assert code_of(client.post(forget, json={"reason": "scrapped"}), 409) == "host.service_up"
            assert code_of(client.post(forget, json={"reason": ""}), 400) == "request.invalid"
            assert code_of(client.post(forget, json={}), 400) == "request.invalid"
        finally:
            client.put(path, json={"state": "enabled"})
        services = reader.get("/api/v1/services").json()
        assert {one["cell"] for one in services} == {"cell1", "cell2"} and all(one["up"] for one in services)
        assert sum(one["hosts"] for one in services) == 6
        assert code_of(alice.get("/api/v1/services"), 403) == "role.forbidden"
        forget = f"/api/v1/services/{services[0]['name']}/delete"
        assert code_of(client.post(forget, json={"reason": "scrapped"}), 409) == "service.up"
        assert code_of(client.post(forget, json={}), 400) == "request.invalid"
        unknown = client.post("/api/v1/services/none/delete", json={"reason": "scrapped", "cell": "cell1"}).json()
        assert (unknown["service"], unknown["cell"], unknown["removed"]) == ("none", "cell1", False)


def test_the_document_describes_every_route(web: Web) -> None:
    with web.client() as client:
        document = client.get("/api/v1/openapi.json").json()
        paths = document["paths"]
        assert set(paths) == {
            "/builds", "/builds/{uuid}", "/builds/{uuid}/events", "/events", "/builds/{uuid}/actions", "/actions",
            "/builds/{uuid}/why",
            "/caller", "/login", "/tokens", "/tokens/{token}",
            "/actions/{uuid}", "/hosts", "/hosts/{host}", "/hosts/{host}/admin-state", "/hosts/{host}/delete",
            "/hosts/{host}/drain-plan", "/hosts/{host}/drain", "/drain-plan", "/drains", "/drains/{uuid}",
            "/drains/{uuid}/pause", "/drains/{uuid}/resume", "/services",
            "/services/{service}/delete", "/workers", "/history", "/cells", "/status",
            "/cells/{name}", "/metal", "/zones",
            "/quarantine", "/quarantine/decide", "/breakers", "/breakers/{cell}/{service}", "/breakers/reset",
            "/recoveries", "/recoveries/{cell}/accept", "/recoveries/{cell}/without",
            "/hosts/{host}/claims", "/hosts/{host}/metrics", "/metal/{node}/maintenance",
            "/flavors", "/flavors/{name}", "/aggregates", "/aggregates/{name}", "/quotas", "/quotas/{project}",
            "/groups", "/groups/{name}", "/rules", "/rules/{name}", "/objects", "/objects/log",
            "/dead-letters", "/dead-letters/{bus}/{queue}",
            "/dead-letters/{bus}/{queue}/replay", "/dead-letters/{bus}/{queue}/letters/{dead_letter}",
        }  # fmt: skip
        assert all(answer["responses"].keys() >= {"401", "503"} for path in paths.values() for answer in path.values())
        assert set(paths["/builds"]) == {"get", "post"} and set(paths["/builds/{uuid}"]) == {"get", "delete"}
        body = document["components"]["schemas"]["BuildRequest"]
        assert "type" not in body["properties"] and body["required"] == ["flavor"]
        assert document["components"]["schemas"]["ActionRequest"]["required"] == ["kind"]


# --- who may


def test_without_a_token_there_is_no_answer(web: Web) -> None:
    with httpx.Client(base_url=web.tokens_url, timeout=TIMEOUT_S, verify=NO_TLS) as client:
        assert code_of(client.get("/api/v1/builds"), 401) == "auth.required"
        assert code_of(client.get("/api/v1/builds", headers={"authorization": "Bearer wrong"}), 401) == "auth.required"
        assert client.get("/").headers["location"] == "/login"


def test_a_project_sees_and_changes_its_own_alone(web: Web) -> None:
    with web.client("alice") as alice, web.client("bob") as bob:
        answer = alice.post("/api/v1/builds", json={"flavor": "m1.tiny"})
        assert answer.status_code == 202, answer.text
        instance = answer.json()["instance_uuid"]
        assert follow(alice, instance)[-1][1]["state"] == "active"
        assert alice.get(f"/api/v1/builds/{instance}").json()["project_id"] == "p-alice"
        for ask in (bob.get, bob.delete):
            assert code_of(ask(f"/api/v1/builds/{instance}"), 404) == "build.unknown"
        assert code_of(bob.get(f"/api/v1/builds/{instance}/events"), 404) == "build.unknown"
        assert bob.get("/api/v1/builds").json()["builds"] == []
        assert code_of(bob.get("/api/v1/builds?project=p-alice"), 403) == "project.forbidden"
        forged = bob.post("/api/v1/builds", json={"flavor": "m1.tiny", "project_id": "p-alice"})
        assert code_of(forged, 403) == "project.forbidden"
        for path in ("/api/v1/hosts", "/", "/fleet", "/fleet/map", "/now/events"):
            assert code_of(bob.get(path), 403) == "role.forbidden"


def test_a_reader_sees_all_and_changes_nothing(web: Web) -> None:
    with web.client("op") as operator, web.client("see") as reader:
        instance = boot(operator, project_id="p-read")
        assert reader.get(f"/api/v1/builds/{instance}").status_code == 200
        assert code_of(reader.delete(f"/api/v1/builds/{instance}"), 403) == "role.forbidden"
        requested = reader.post("/api/v1/builds", json={"flavor": "m1.tiny", "project_id": "p"})
        assert code_of(requested, 403) == "role.forbidden"


def test_a_session_begins_with_a_token_and_ends_with_log_out(web: Web) -> None:
    with httpx.Client(base_url=web.tokens_url, timeout=TIMEOUT_S, verify=NO_TLS, follow_redirects=True) as client:
        sent_to = client.get("/fleet?cell=cell1").url
        assert (sent_to.path, sent_to.params["next"]) == ("/login", "/fleet?cell=cell1")
        wrong = client.post("/login", data={"token": "wrong"})
        assert wrong.status_code == 401 and 'role="alert"' in wrong.text
        assert client.post(str(sent_to), data={"token": "op"}).url.raw_path == b"/fleet?cell=cell1"
        assert client.post("/login?next=//evil.example/", data={"token": "op"}).url.raw_path == b"/"
        cookie = next(iter(client.cookies.jar))
        assert not cookie.secure
        assert cookie.has_nonstandard_attr("HttpOnly") and cookie.get_nonstandard_attr("SameSite") == "lax"
        assert client.get("/fleet").status_code == 200
        client.post("/logout")
        assert "Log in" in client.get("/fleet").text


def test_a_session_behind_a_proxy_with_tls_is_sent_over_tls_alone(web: Web) -> None:
    origin = web.tokens_url.replace("http:", "https:")
    answer = httpx.post(f"{web.tokens_url}/login", data={"token": "op"}, headers={"origin": origin}, timeout=TIMEOUT_S)
    assert answer.status_code == 303 and "; Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "null"},
        {"origin": "http://["},
    ],
)
def test_another_sites_page_changes_nothing(web: Web, headers: dict[str, str]) -> None:
    with web.client(**headers) as client:
        answer = client.post("/api/v1/builds", json={"flavor": "m1.tiny", "project_id": "p"})
        assert code_of(answer, 403) == "origin.forbidden"


def test_without_tokens_another_sites_name_does_not_lead_here(web: Web) -> None:
    with web.client(host="evil.example") as client:
        assert code_of(client.get("/api/v1/builds"), 403) == "host.forbidden"


def test_without_tokens_only_this_machine_is_served() -> None:
    clock = SystemClock()
    check_listen("127.0.0.1", Access(None, clock))
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(SettingsError, match="loopback"):
            check_listen(host, Access(None, clock))


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("", "no \\[\\[tokens\\]\\]"),
        ('[[tokens]]\nsha256 = "x"\nname = "n"\nrole = "reader"', "64 hexadecimal digits"),
        (f'[[tokens]]\nsha256 = "{DIGEST}"\nname = "n"\nrole = "reader"\n' * 2, "'n' has the token of 'n'"),
        ('[[tokens]]\nsha256 = "' + DIGEST + '"\nname = "n"\nrole = "king"', "none of project, reader, operator"),
        ('[[tokens]]\nsha256 = "' + DIGEST + '"\nname = "n"\nrole = "project"', "role project has a project"),
        ('[[tokens]]\nsha256 = "' + DIGEST + '"\nname = "n"\nrole = "reader"\nproject = "p"', "no other has"),
        ('[[tokens]]\nsha256 = "' + DIGEST + '"\nname = "n"\nrole = "reader"\ntoken = "secret"', "unknown field"),
    ],
)
def test_a_wrong_token_file_is_a_sentence(tmp_path: Path, rows: str, why: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(rows)
    with pytest.raises(SettingsError, match=why):
        read_tokens(path)


async def test_sessions_are_bounded(tmp_path: Path) -> None:
    access = Access(read_tokens(token_file(tmp_path)), SystemClock())
    first = access.log_in("op")
    assert (await access.caller({}, {"berth_session": first})).role is WebRole.OPERATOR
    for _ in range(MAX_SESSIONS_OF_TOKEN):
        access.log_in("op")
    with pytest.raises(Exception, match="token"):
        await access.caller({}, {"berth_session": first})


async def test_no_other_tokens_sessions_end_an_operators(tmp_path: Path) -> None:
    access = Access(read_tokens(token_file(tmp_path)), SystemClock())
    operators = access.log_in("op")
    for number in range(MAX_SESSIONS + 1):
        access.log_in("bob")
        access.log_in(f"of another {number // 3}")
    assert (await access.caller({}, {"berth_session": operators})).role is WebRole.OPERATOR


def test_what_is_sent_without_an_end_or_ahead_is_refused(web: Web) -> None:
    """Without a token: headers of 100 MB, and 20 MB of requests whose answers are not read, were kept whole."""
    host, port = web.tokens_url.removeprefix("http://").split(":")
    for sent in (
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 400_000,
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 4_000,
    ):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            answered = bytearray()
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
                while piece := connection.recv(65_536):
                    answered += piece
            assert answered.count(b"HTTP/1.1 200") < 1_000  # the connection has ended before all were answered


async def test_a_taken_address_is_a_sentence(web: Web) -> None:
    taken = int(web.open_url.rpartition(":")[2])
    here = Site(Settings())
    access = Access(None, here.clock)
    one = WebServer(here.environment("w"), here.settings, host="127.0.0.1", port=taken, access=access)
    with pytest.raises(WebCannotListen, match="cannot listen"):
        await one.open()


async def test_pages_end_with_the_berth_up_that_holds_their_bus() -> None:
    rig = LocalRig()
    await rig.open()
    here = Site(Settings(state_dir=str(rig.socket.parent)))
    pages = WebServer(here.environment("w"), here.settings, host="127.0.0.1", port=0, access=Access(None, here.clock))
    stop = asyncio.Event()
    try:
        await pages.open()
        serving = asyncio.create_task(pages.serve_until(stop))
        await rig.server.close()
        with pytest.raises(BusUnavailable, match="has ended"):
            await asyncio.wait_for(serving, TIMEOUT_S)
        stop.set()
        await pages.serve_until(stop)
    finally:
        await pages.close()
        await rig.close()


async def test_pages_end_with_what_ends_their_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process lived on, and served nothing."""

    async def broken(*_: object, **__: object) -> None:
        raise OSError("no more of these")

    monkeypatch.setattr(server._Server, "serve", broken)
    rig = LocalRig()
    await rig.open()
    here = Site(Settings(state_dir=str(rig.socket.parent)))
    pages = WebServer(here.environment("w"), here.settings, host="127.0.0.1", port=0, access=Access(None, here.clock))
    try:
        await pages.open()
        with pytest.raises(OSError, match="no more"):
            await asyncio.wait_for(pages.serve_until(asyncio.Event()), TIMEOUT_S)
    finally:
        await pages.close()
        await rig.close()


# --- pages


def test_every_page_has_what_the_api_has(web: Web) -> None:
    with web.client(accept="text/html") as client:
        instance = boot(client, name="shown")
        follow(client, instance)
        assert "Started in five minutes" in client.get("/").text
        fleet = client.get("/fleet").text
        host = client.get("/api/v1/hosts").json()[0]
        assert host["name"] in fleet and f"/fleet/{host['uuid']}" in fleet
        assert "VCPU" in client.get(f"/fleet/{host['uuid']}").text
        assert instance in client.get("/builds").text
        page = client.get(f"/builds/{instance}").text
        assert "Where the time went" in page and "announced" in page and "Delete this instance" in page
        assert len(client.get("/fleet/map").json()["uuid"]) == 6
        assert client.get(f"/builds/{UNKNOWN}").status_code == 404
        assert client.get("/builds", params={"uuid": instance}).headers["location"] == f"/builds/{instance}"


def test_a_hostile_name_is_only_text(web: Web) -> None:
    with web.client(accept="text/html") as client:
        instance = boot(client, name=HOSTILE, image="<img src=x onerror=alert(1)>")
        follow(client, instance)
        for path in ("/builds", f"/builds/{instance}"):
            page = client.get(path)
            assert "<script>alert" not in page.text and "\u202e" not in page.text
            assert "&lt;script&gt;alert(1)&lt;/script&gt;\\n\\u202eevil" in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_first_page_is_kept_up_to_date(web: Web) -> None:
    with web.client() as client, client.stream("GET", "/now/events") as stream:
        lines = stream.iter_lines()
        states = (json.loads(line[6:]) for line in lines if line.startswith("data: ") and "in_flight" in line)
        next(now for now in states if (now["hosts"], now["up"], now["status"]["rows"]) == (6, 6, []))
        with web.client() as other:
            instance = boot(other)
            follow(other, instance)
        assert any(sum(second["active"] for second in now["seconds"]) for now in states)


# --- without a scheduler

PAGES_ALONE: list[tuple[str, int, tuple[str, ...]]] = [
    ("/", 200, ("not known</dd>", 'colspan="3">Not known.')),
    ("/fleet", 504, ("<h1>Fleet</h1>", "Name has", 'colspan="8">Not known.')),
    ("/builds", 504, ("<h1>Instances</h1>", "Instance <input", 'colspan="7">Not known.')),
    ("/system", 504, ("<h1>System</h1>", 'colspan="7">Not known.', 'colspan="9">Not known.')),
    ("/operations", 504, ("Fenced hosts", 'colspan="7">Not known.')),
    ("/actions", 504, ("<h1>Actions</h1>", 'colspan="7">Not known.')),
    ("/objects", 504, ("<h1>Objects</h1>", 'colspan="7">Not known.')),
    ("/objects/log", 504, ("<h1>Log of changes</h1>", "Not known.")),
    ("/objects/flavors?name=m1.tiny", 504, ("<h1>Flavor m1.tiny</h1>",)),
    ("/metal", 504, ("<h1>Bare metal</h1>",)),
    ("/fleet/h1", 504, ("<h1>Host h1</h1>",)),
    ("/fleet/h1/drain", 504, ("<h1>Drain of host h1</h1>",)),
    (f"/builds/{UNKNOWN}", 504, (f"<h1>Instance {UNKNOWN}</h1>",)),
    (f"/drains/{UNKNOWN}", 504, (f"<h1>Drain {UNKNOWN}</h1>",)),
]


@pytest.fixture(scope="module")
def pages_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, httpx.Response]:
    """The pages of a web server beside which no scheduler runs: {path: answer}."""

    async def read() -> dict[str, httpx.Response]:
        settings = replace(Settings(), state_dir=str(tmp_path_factory.mktemp("alone")))
        async with site(settings, directory=None, seed=1) as here:
            alone = web_of(here, "web1", Access(None, here.clock))
            await alone.open()
            try:
                async with httpx.AsyncClient(base_url=alone.url, timeout=TIMEOUT_S, verify=NO_TLS) as client:
                    paths = [path for path, _, _ in PAGES_ALONE]
                    found = await asyncio.gather(*(client.get(path, headers=BROWSER) for path in paths))
                    return dict(zip(paths, found, strict=True))
            finally:
                await alone.close()

    return asyncio.run(read())


@pytest.mark.parametrize(("path", "status", "shown"), PAGES_ALONE)
def test_a_page_shows_what_it_knows_without_a_scheduler(
    pages_alone: dict[str, httpx.Response], path: str, status: int, shown: tuple[str, ...]
) -> None:
    """They were a "504" alone, and the first page said 0 of 0 hosts beside "No scheduler answers"."""
    answer = pages_alone[path]
    assert answer.status_code == status and "No scheduler answers" in answer.text
    assert [one for one in (*shown, 'aria-label="Pages"') if one not in answer.text] == []
