"""Parts of the REST API by themselves: bodies, CORS, ids of log lines, the OpenAPI document, summaries."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, MutableMapping
from typing import Any, cast

import httpx
import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from bus.clock import SystemClock
from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState
from bus.faults import BrokenInvariant
from placement_worker.domain.refusal import RefusalCode, WriteRefusal
from placement_worker.domain.values import MAX_CAPACITY
from placement_worker.replica.candidates import candidates
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import CandidatesRequest, Group
from placement_worker.rest import bodies
from placement_worker.rest.api import Api, copy_of
from placement_worker.rest.application import Application
from placement_worker.rest.auth import NoAuth2
from placement_worker.rest.bodies import InventoryBody, consumer_write
from placement_worker.rest.candidates import summaries
from placement_worker.rest.candidates_query import MAX_GROUPS, is_uuid, parse_candidates, resources_of
from placement_worker.rest.config import CorsConfig, RestConfig
from placement_worker.rest.faults import HttpFault, best, refused
from placement_worker.rest.http import NEWEST, QueryString, at, version_of
from placement_worker.rest.openapi import document
from placement_worker.rest.policy import Policy
from placement_worker.rest.routes import ROUTES
from placement_worker.rest.server import with_cors

# --- bodies and query strings: what is taken, and in which words the rest is turned down

HOST = "11111111-1111-4111-8111-111111111111"
UNNAMED = ("nobody", "nobody")


@settings(deadline=None)  # machines that run tests are busy
@given(
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.floats(max_value=3.4e38, allow_nan=False, allow_infinity=False),
)
def test_a_capacity_is_a_whole_number_within_bounds(total: int, reserved: int, ratio: float) -> None:
    room = InventoryBody(total=total, reserved=reserved, allocation_ratio=ratio).inventory().capacity
    assert 0 <= room <= MAX_CAPACITY
    if 0 < (total - reserved) * ratio < MAX_CAPACITY:
        assert room <= (total - reserved) * ratio < room + 1


def allocations(**more: Any) -> bytes:
    body = {"allocations": {HOST: {"resources": {"VCPU": 1}}}, "project_id": "p", "user_id": "u"}
    return json.dumps({**body, "consumer_generation": None, "consumer_type": "INSTANCE", **more}).encode()


def test_what_only_the_schema_takes_is_taken_too() -> None:
    body = at(bodies.PUT_ALLOCATIONS, 39).parse(allocations(allocations={HOST: {"resources": {"VCPU": 1.0}}}))
    assert consumer_write("c", body, UNNAMED).allocations == {HOST: {"VCPU": 1}}
    body = at(bodies.PUT_ALLOCATIONS, 39).parse(allocations(mappings={"!": 7, "": [HOST]}))
    assert consumer_write("c", body, UNNAMED).allocations == {HOST: {"VCPU": 1}}
    made = bodies.POST_PROVIDER_14.parse(b'{"name": "a", "uuid": "11111111111141118111111111111111"}')
    assert made.uuid == HOST


def test_other_peoples_identifiers_are_left_as_they_are() -> None:
    plain = HOST.replace("-", "")
    body = at(bodies.PUT_ALLOCATIONS, 39).parse(allocations(project_id=plain, mappings={"": [plain]}))
    assert consumer_write("c", body, UNNAMED).project_id == plain


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"allocations": {HOST: {"resources": {"VCPU": 0}}}}, "0 is less than the minimum of 1"),
        ({"allocations": {"x": {"resources": {"VCPU": 1}}}}, "does not match any of the regexes"),
        ({"consumer_type": "instance"}, "'instance' does not match '^[A-Z0-9_]+$'"),
        ({"project_id": ""}, "'' should be non-empty"),
        ({"more": 1}, "Additional properties are not allowed ('more' was unexpected)"),
        ({"mappings": {"": []}}, None),
    ],
)
def test_a_bad_body_is_described_in_python_jsonschemas_words(more: dict[str, Any], words: str | None) -> None:
    parse = at(bodies.PUT_ALLOCATIONS, 39).parse
    if words is None:
        parse(allocations(**more))
        return
    with pytest.raises(HttpFault) as caught:
        parse(allocations(**more))
    assert caught.value.status == 400
    assert caught.value.words.startswith("JSON does not validate: ")
    assert words in caught.value.words


@settings(deadline=None)  # machines that run tests are busy
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda d: json.dumps(d).encode())
)
def test_no_body_is_more_than_a_bad_request(body: bytes) -> None:
    for parse in (bodies.POST_PROVIDER.parse, bodies.PUT_INVENTORIES.parse, at(bodies.POST_ALLOCATIONS, 39).parse):
        with pytest.raises(HttpFault) as caught:
            parse(body)
        assert caught.value.status == 400


def test_half_a_surrogate_under_a_name_that_the_schema_leaves_alone_is_a_bad_request() -> None:
    inventories = b'{"build.request.v1": {"total": 18, "min_unit": "\\ud800"}}'
    with pytest.raises(HttpFault, match="JSON does not validate") as caught:
        bodies.PUT_INVENTORIES.parse(b'{"resource_provider_generation": 1, "inventories": ' + inventories + b"}")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [b'{"name":"\xff"}', b'{"na\xdbme":"a"}', '{"name":"a"}'.encode("utf-16"), b'\xef\xbb\xbf{"name":"a"}'],
    ids=["a value", "a name", "UTF-16", "a byte order mark"],
)
def test_a_body_that_is_not_utf_8_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(HttpFault, match="Malformed JSON") as caught:
        bodies.POST_PROVIDER.parse(body)
    assert caught.value.status == 400


@settings(deadline=None)  # machines that run tests are busy
@given(st.text(alphabet="resourcesmember_ofrequired1=&:!,in%VCPU-_", max_size=120))
def test_no_query_is_more_than_a_bad_request(text: str) -> None:
    for version in (10, 24, 25, 33, 36, 39):
        try:
            parse_candidates(QueryString(text.encode()), version)
        except HttpFault as fault:
            assert fault.status == 400


@pytest.mark.parametrize("version", [10, 24, 25, 33, 35, 36, 39])
def test_groups_that_all_have_resources_are_taken(version: int) -> None:
    query = b"resources=VCPU:1" + b"&resources1=VCPU:2&group_policy=none" * (version >= 25)
    assert len(parse_candidates(QueryString(query), version).request.groups) == 1 + (version >= 25)


@pytest.mark.parametrize("query", ["limit=x&limit=1", "limit=0&limit=1", "limit=-1&limit=1", "limit=&limit=1"])
def test_a_limit_that_is_none_is_a_bad_request_though_a_later_one_is_good(query: str) -> None:
    with pytest.raises(HttpFault) as caught:
        parse_candidates(QueryString(f"resources=VCPU:1&{query}".encode()), 39)
    assert caught.value.status == 400


def test_a_limit_of_thousands_of_digits_is_a_limit() -> None:
    limit = parse_candidates(QueryString(b"resources=VCPU:1&limit=" + b"9" * 5000), 39).limit
    assert limit is not None
    assert limit > 2**53


def test_an_inventory_among_others_has_a_generation_that_is_a_number_or_none_at_all() -> None:
    for generation in ("", ', "resource_provider_generation": 7'):
        text = f'{{"resource_provider_generation": 1, "inventories": {{"VCPU": {{"total": 1{generation}}}}}}}'
        assert bodies.PUT_INVENTORIES.parse(text.encode()).inventories["VCPU"].total == 1
    with pytest.raises(HttpFault, match="None is not of type 'integer'"):
        bodies.PUT_INVENTORIES.parse(
            b'{"resource_provider_generation": 1,'
            b' "inventories": {"VCPU": {"total": 1, "resource_provider_generation": null}}}'
        )


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (bodies.RESOURCE_CLASS, {"name": "CUSTOM_A\n"}),
        (bodies.POST_PROVIDER, {"name": "a", "uuid": f"{HOST}\n"}),
        (bodies.POST_INVENTORY, {"resource_class": "VCPU\n", "total": 1}),
        (
            at(bodies.PUT_ALLOCATIONS, 39),
            {
                "allocations": {},
                "project_id": "p",
                "user_id": "u",
                "consumer_generation": None,
                "consumer_type": "INSTANCE\n",
            },
        ),
    ],
)
def test_a_name_ends_where_it_ends(body: bodies.Body[Any], value: dict[str, Any]) -> None:
    with pytest.raises(HttpFault) as caught:
        body.parse(json.dumps(value).encode())
    assert caught.value.status == 400


def test_amounts_beyond_all_bounds_are_amounts() -> None:
    most = resources_of("VCPU:" + "9" * 100)["VCPU"]
    assert most > 2**53 and most * MAX_GROUPS < 2**63, "the sum of a query's groups is compared in 64 bits"


@pytest.mark.parametrize("ratio", ["1e999", "-1e999", "3.5e38", "-3.5e38"])
def test_a_ratio_is_a_number_that_a_column_holds(ratio: str) -> None:
    room = f'{{"total": 1, "reserved": 1, "allocation_ratio": {ratio}}}'.encode()
    with pytest.raises(HttpFault) as caught:
        bodies.PUT_INVENTORIES.parse(b'{"resource_provider_generation": 1, "inventories": {"VCPU": ' + room + b"}}")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("text", "taken"),
    [(HOST, True), (HOST.upper(), True), (HOST.replace("-", ""), True), (f"{{{HOST}}}", True), ("1" * 31, False)],
)
def test_uuids_are_taken_as_placement_takes_them(text: str, taken: bool) -> None:
    assert is_uuid(text) is taken


@pytest.mark.parametrize(
    ("header", "version"),
    [("", 0), ("placement 1.7", 7), ("placement latest", 39), ("compute 2.90, placement 1.12", 12), ("compute 2.1", 0)],
)
def test_a_version_is_read_from_its_service(header: str, version: int) -> None:
    assert version_of(header) == version


@pytest.mark.parametrize(("header", "status"), [("placement 1.40", 406), ("placement 2.0", 406), ("placement x", 400)])
def test_a_version_that_is_not_served_is_named(header: str, status: int) -> None:
    with pytest.raises(HttpFault) as caught:
        version_of(header)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("accept", "offer"),
    [
        ("application/json", "application/json"),
        ("text/html", "text/html"),
        ("text/plain", None),
        ("text/html;q=0.5, application/json;q=0.8", "application/json"),
        ("application/*, text/html;q=0", "application/json"),
        ("*/*;q=0.1, application/json;q=0", "text/html"),
        ("application/json;q=nonsense", None),
    ],
)
def test_an_accept_header_chooses(accept: str, offer: str | None) -> None:
    assert best(accept, ("text/html", "application/json")) == offer


@pytest.mark.parametrize("body", [bodies.AGGREGATES, bodies.AGGREGATES_19])
@pytest.mark.parametrize("again", [False, True])
def test_a_list_of_objects_is_not_compared_pair_by_pair(
    body: bodies.Body[Any], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """51 kB of objects stopped the loop for 20 s, and claims and heartbeats with it."""

    def compared(*_: object) -> bool:
        raise AssertionError("pair by pair")

    monkeypatch.setattr("jsonschema._keywords.uniq", compared)
    listed = [{"a": 0 if again else number} for number in range(5_000)]
    sent = listed if body is bodies.AGGREGATES else {"aggregates": listed, "resource_provider_generation": 0}
    with pytest.raises(HttpFault) as fault:
        body.parse(json.dumps(sent).encode())
    assert fault.value.status == 400


def test_an_aggregate_named_twice_is_shown_as_before() -> None:
    with pytest.raises(HttpFault, match="has non-unique elements"):
        bodies.AGGREGATES.parse(json.dumps([HOST, HOST]).encode())


@pytest.mark.parametrize("value", ["[]", "{}", "1", "null", '{"a":0}'])
def test_item_16_a_body_of_very_many_values_is_not_built_to_be_examined(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of empty lists withheld the interpreter for 56 ms, from all threads."""

    def traits(count: int) -> bytes:
        return f'{{"traits":[{",".join([value] * count)}],"resource_provider_generation":1}}'.encode()

    with pytest.raises(HttpFault, match="JSON does not validate: "):
        bodies.PROVIDER_TRAITS.explain(traits(100))
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(HttpFault, match="more than 65536 values") as refused:
        bodies.PROVIDER_TRAITS.parse(traits(65_536)[:-1])
    assert refused.value.status == 400


def test_item_16_at_most_a_thousand_errors_of_a_body_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    best_match, compared = bodies.best_match, list[ValidationError]()

    def counted(errors: Iterable[ValidationError]) -> ValidationError | None:
        compared.extend(errors)
        return best_match(compared)

    monkeypatch.setattr(bodies, "best_match", counted)
    with pytest.raises(HttpFault, match="JSON does not validate: "):
        bodies.AGGREGATES.explain(json.dumps(list(range(2_000))).encode())
    assert len(compared) == 1_000


def test_item_16_no_larger_bodies_can_be_allowed_than_the_decoder_takes_in_20_ms() -> None:
    assert RestConfig(max_body_bytes=2**20) == RestConfig()
    with pytest.raises(msgspec.ValidationError, match="max_body_bytes"):
        msgspec.convert({"max_body_bytes": 2**20 + 1}, RestConfig)


# --- the headers for pages of other origins

PAGE = "https://page.example"
OTHER = "https://other.example"


async def answered(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def answer(config: CorsConfig, method: str, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(with_cors(answered, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://book") as client:
        return await client.request(method, "/resource_providers", headers=headers)


def preflight(origin: str, method: str = "PUT", headers: str = "x-auth-token") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": headers,
    }


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_pages_of_an_allowed_origin_may_read(allowed: str) -> None:
    """An origin of `*` allowed no page."""
    got = await answer(CorsConfig(allowed_origin=(allowed,)), "GET", {"origin": PAGE})
    assert (got.status_code, got.headers["access-control-allow-origin"]) == (204, PAGE)
    assert "Origin" in got.headers["vary"]


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_pages_of_an_allowed_origin_may_write(allowed: str) -> None:
    config = CorsConfig(allowed_origin=(allowed,), allow_headers=("X-Auth-Token",))
    got = await answer(config, "OPTIONS", preflight(PAGE))
    assert (got.status_code, got.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "PUT" in got.headers["access-control-allow-methods"]
    assert "x-auth-token" in got.headers["access-control-allow-headers"].lower()


@pytest.mark.parametrize(("method", "headers"), [("GET", {"origin": OTHER}), ("OPTIONS", preflight(OTHER))])
async def test_pages_of_another_origin_get_no_permission(method: str, headers: dict[str, str]) -> None:
    got = await answer(CorsConfig(allowed_origin=(PAGE,)), method, headers)
    assert "access-control-allow-origin" not in got.headers
    assert got.status_code == (200 if method == "OPTIONS" else 204)


async def test_a_header_that_is_not_allowed_is_not_named() -> None:
    got = await answer(CorsConfig(allowed_origin=(PAGE,)), "OPTIONS", preflight(PAGE, headers="x-other"))
    assert "x-other" not in got.headers["access-control-allow-headers"].lower()


async def test_without_an_origin_in_the_settings_there_is_no_cors() -> None:
    assert with_cors(answered, CorsConfig()) is answered


# --- every log line of a request carries its id, and not whose the one before it was

THEIRS = "req-11111111-2222-4333-8444-555555555555"


class EndedService:
    """Refuses every write, and remembers what a log line would have held."""

    def __init__(self) -> None:
        self.config = RestConfig()
        self.clock = SystemClock()
        self.rng = random.Random(3)
        self.logged: list[dict[str, Any]] = []

    async def write_allocations(self, _write: object) -> None:
        self.logged.append(structlog.contextvars.get_contextvars())
        raise refused(WriteRefusal(RefusalCode.NO_ALLOCATIONS))


def never(error: BrokenInvariant) -> None:
    raise error


async def test_a_callers_own_request_id_is_not_logged_with_the_next_request() -> None:
    """A pipelined request is begun in its forerunner's context."""
    service = EndedService()
    config = service.config
    application = Application(cast(Api, service), NoAuth2(), Policy(config.policy, service.clock), broken=never)
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("there is no body")

    path = "/allocations/00000000-0000-4000-8000-000000000001"
    scope = {"type": "http", "method": "DELETE", "path": path, "query_string": b""}
    token = (b"x-auth-token", b"admin")
    await application({**scope, "headers": [token, (b"x-openstack-request-id", THEIRS.encode())]}, receive, send)
    await application({**scope, "headers": [token]}, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [404, 404]
    first, second = service.logged
    assert first["global_request_id"] == THEIRS
    assert "global_request_id" not in {key for key, value in second.items() if value is not ...}
    assert first["request_id"] != second["request_id"]


def test_every_operation_of_the_newest_version_is_in_the_document() -> None:
    paths = document()["paths"]
    served = {(route.method.lower(), route.path) for route in ROUTES if route.until == NEWEST}
    assert {(method, path) for path, operations in paths.items() for method in operations} == served


def test_every_body_that_is_taken_has_a_schema() -> None:
    takes = {(route.path, route.method.lower()) for route in ROUTES if route.takes and route.until == NEWEST}
    paths = document()["paths"]
    shown = {
        (path, method) for path, of_path in paths.items() for method, one in of_path.items() if "requestBody" in one
    }
    assert shown == takes and {method for _, method in takes} == {"post", "put"}


def test_the_document_is_json_and_its_schemas_are_schemas() -> None:
    json.dumps(document())
    for route in ROUTES:
        for schema in (route.query, route.takes.schema if route.takes is not None else {}):
            Draft202012Validator.check_schema(schema)


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for path in document()["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)


# --- texts that are kept equal texts made anew, whatever has happened to the providers since

REQUEST = CandidatesRequest(groups=(Group(resources={"VCPU": 1}),))


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def state(rng: random.Random, number: int, generation: int) -> ProviderState:
    host = number % 40
    parent = None if number < 40 else uuid(host)
    names = rng.sample(["VCPU", "MEMORY_MB", "CUSTOM_A", "CUSTOM_B"], rng.randint(1, 4))
    return ProviderState(
        uuid=uuid(number),
        name=f"p{number}",
        root_uuid=uuid(host),
        parent_uuid=parent,
        generation=generation,
        spec_generation=generation,
        inventories={name: (float(rng.randint(50, 60)), 1, 60, 1, 60, 0, 1.0) for name in names},
        used={name: rng.randint(0, 3) for name in names},
        traits=tuple(sorted(rng.sample(["HW_CPU_X86_AVX", "CUSTOM_X", "CUSTOM_Y"], rng.randint(0, 3)))),
    )


@pytest.mark.parametrize("version", [16, 26, 28, 29, 39])
def test_what_is_kept_is_what_would_be_made_anew(version: int) -> None:
    rng = random.Random(version)
    replica = Replica()
    known = dict.fromkeys(range(120), 1)
    replica.load([state(rng, number, 1) for number in known], 0)
    for round_ in range(60):
        for _ in range(rng.randint(0, 6)):
            number = rng.choice([*known, 200 + rng.randint(0, 1500)])
            generation = known.get(number, 0)
            how = rng.random()
            if how < 0.5 and number in known:  # a DELETE moves usage, and no generation
                change = Change(
                    sequence=0, provider=uuid(number), generation=generation, used={"VCPU": rng.randint(0, 9)}
                )
            elif how < 0.6 and number >= 40 and number in known:
                change = Change(sequence=0, provider=uuid(number), generation=generation, removed=True)
                del known[number]
            else:
                known[number] = generation + 1
                change = Change(
                    sequence=0,
                    provider=uuid(number),
                    generation=generation + 1,
                    state=state(rng, number, generation + 1),
                )
            assert replica.apply([msgspec.structs.replace(change, sequence=replica.sequence + 1)]) is None
        if round_ == 30:  # a snapshot deals all rows anew
            numbers = rng.sample(sorted(known), len(known))
            known = {number: known[number] for number in numbers}
            replica.load([state(rng, number, generation) for number, generation in known.items()], replica.sequence)
        anew = copy_of(replica)
        kept = summaries(replica, candidates(replica, REQUEST), {"VCPU"}, version)
        fresh = summaries(anew, candidates(anew, REQUEST), {"VCPU"}, version)
        assert msgspec.json.decode(b"{" + kept + b"}") == msgspec.json.decode(b"{" + fresh + b"}")
        assert kept


def test_a_class_that_is_used_without_inventory_is_not_reported() -> None:
    """A provider of the same classes that has inventory of it once lent it a capacity of 0."""
    replica = Replica()
    one, other = (
        ProviderState(
            uuid=uuid(number),
            name=f"p{number}",
            root_uuid=uuid(number),
            generation=1,
            spec_generation=1,
            inventories=dict.fromkeys(names, (8.0, 1, 8, 1, 8, 0, 1.0)),
            used={"VCPU": 1, "CUSTOM_A": 1},
        )
        for number, names in ((1, ("VCPU", "CUSTOM_A")), (2, ("VCPU",)))
    )
    replica.load([one, other], 0)
    answer = msgspec.json.decode(b"{" + summaries(replica, candidates(replica, REQUEST), {"VCPU"}, 39) + b"}")
    assert {key: sorted(each["resources"]) for key, each in answer.items()} == {
        uuid(1): ["CUSTOM_A", "VCPU"],
        uuid(2): ["VCPU"],
    }
