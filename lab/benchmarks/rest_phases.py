"""The phases that lab/benchmarks/rest_beside.py runs on each system: one phase a row of its table."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Literal

import msgspec
from msgspec import Struct

from lab.benchmarks.rest_books import AGGREGATES, CELL, GOLD, NOWHERE, Host, flat_host
from lab.benchmarks.rest_client import Bound, Connection, Outcome, Work, request

ASK = "resources=VCPU:1,MEMORY_MB:{amount},DISK_GB:1"
AMOUNTS = range(128, 3128)  # in turn, so that no search finds its answer from the last one
WRITERS, TARGETS = 64, 4
CONSUMERS_A_POST = 20
OLDER = b"placement 1.37"  # from 1.38 the real one answers /usages with 500 on PostgreSQL
SWAPPED = 400  # consumers that take turns in the swap
OK, NO_CONTENT, CONFLICT = 200, 204, 409

CLAIM = b'{"allocations":%b,"consumer_generation":%b,"project_id":"bench","user_id":"bench","consumer_type":"INSTANCE"}'
ONE = b'{"%b":{"resources":{"VCPU":1,"MEMORY_MB":128,"DISK_GB":1}}}'


class TestBed(Struct, kw_only=True):
    """The objects that one system's phases work on, and those that they have left there."""

    hosts: Sequence[Host]
    rng: random.Random
    consumers: deque[str] = msgspec.field(default_factory=deque)
    held: int = 0  # consumers that must hold something in the end
    unsure: bool = False  # some answer was lost, so that its effect is unknown

    def new(self) -> str:
        """A uuid of this run."""
        digits = f"{self.rng.getrandbits(128):032x}"
        return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-8{digits[17:20]}-{digits[20:]}"


class Phase(Struct, frozen=True, kw_only=True):
    """One row. better: what is compared, pieces of work a second or the median time of one.

    warm: pieces of work before the clock runs.
    """

    key: str
    title: str
    make: Callable[[TestBed], Work]
    better: Literal["rate", "median"] = "rate"
    clients: int = 8
    fine: frozenset[int] = frozenset({NO_CONTENT})
    warm: int = 16
    most: int = 40_000

    def bound(self, seconds: float) -> Bound:
        """How long it lasts."""
        return Bound(seconds, self.most, least=3)


async def holds(connection: Connection, bed: TestBed) -> str | None:
    """The problems of placement: it must show every consumer that was answered it has something, and no other."""
    if bed.unsure:
        return None
    ask = request("GET", "/usages?project_id=bench").replace(b"placement 1.39", OLDER)
    status, body = await connection.ask(ask)
    used = msgspec.json.decode(body)["usages"].get("VCPU", 0) if status == OK else None
    return None if used == bed.held else f"{bed.held} consumers hold something, {body[:500]!r}"


def value(phase: Phase, outcome: Outcome) -> float:
    """The compared figures: larger is better for a rate, smaller for a median."""
    return outcome.per_s if phase.better == "rate" else outcome.p50_ms


# --- searches


def search(query: str) -> Callable[[TestBed], Work]:
    """GET /allocation_candidates, each with another amount where the query has `{amount}`."""
    amounts = cycle(AMOUNTS)

    async def work(connection: Connection, _: int) -> int:
        sent = request("GET", f"/allocation_candidates?{query.format(amount=next(amounts))}")
        return (await connection.ask(sent))[0]

    return lambda _: work


def candidates(key: str, title: str, query: str) -> Phase:
    """A search by one client."""
    return Phase(
        key=key,
        title=title,
        make=search(query),
        better="median",
        clients=1,
        fine=frozenset({OK}),
        warm=6,
        most=5000,
    )


# --- writes


def claim(bed: TestBed) -> Work:
    """PUT of a new consumer on any host."""
    return _claim(bed, bed.hosts)


def crowded(bed: TestBed) -> Work:
    """The same, all on few hosts."""
    return _claim(bed, bed.hosts[:TARGETS])


def _claim(bed: TestBed, hosts: Sequence[Host]) -> Work:
    holdings = [holding(host.uuid) for host in hosts]

    async def work(connection: Connection, number: int) -> int:
        consumer = bed.new()
        body = CLAIM % (holdings[number % len(holdings)], b"null")
        status, _answer = await connection.ask(request("PUT", f"/allocations/{consumer}", body))
        if status == NO_CONTENT:
            bed.held += 1
            if len(bed.consumers) < SWAPPED:
                bed.consumers.append(consumer)
        return status

    return work


def holding(host: str) -> bytes:
    """One small instance's worth of a flat host."""
    return ONE % host.encode()


def swap(bed: TestBed) -> Work:
    """POST that hands over what one consumer holds to a new one, as a migration begins."""
    hosts = [holding(host.uuid) for host in bed.hosts]

    async def work(connection: Connection, number: int) -> int:
        old, new = bed.consumers.popleft(), bed.new()
        there = CLAIM % (hosts[number % len(hosts)], b"null")
        body = b'{"%b":%b,"%b":%b}' % (new.encode(), there, old.encode(), CLAIM % (b"{}", b"1"))
        status, _answer = await connection.ask(request("POST", "/allocations", body))
        bed.consumers.append(new if status == NO_CONTENT else old)
        return status

    return work


def many(place: Callable[[TestBed], bytes]) -> Callable[[TestBed], Work]:
    """POST of many new consumers at once, each somewhere."""

    def make(bed: TestBed) -> Work:
        async def work(connection: Connection, _: int) -> int:
            rows = [b'"%b":%b' % (bed.new().encode(), CLAIM % (place(bed), b"null")) for _ in range(CONSUMERS_A_POST)]
            status, _answer = await connection.ask(request("POST", "/allocations", b"{%b}" % b",".join(rows)))
            if status == NO_CONTENT:
                bed.held += CONSUMERS_A_POST
            return status

        return work

    return make


def anywhere(bed: TestBed) -> bytes:
    """A flat host by chance."""
    return holding(bed.rng.choice(bed.hosts).uuid)


def in_a_tree(bed: TestBed) -> bytes:
    """Disk of a root, processors of one of its cells and a function of one of that cell's devices, by chance."""
    root = 7 * bed.rng.randrange(len(bed.hosts) // 7)
    cell, device = bed.rng.randrange(2), bed.rng.randrange(2)
    disk, cpu, net = (bed.hosts[root + place] for place in (0, 1 + cell, 3 + 2 * cell + device))
    return msgspec.json.encode(
        {
            disk.uuid: {"resources": {"DISK_GB": 1}},
            cpu.uuid: {"resources": {"VCPU": 1, "MEMORY_MB": 128}},
            net.uuid: {"resources": {"SRIOV_NET_VF": 1}},
        }
    )


def claim_in_tree(bed: TestBed) -> Work:
    """PUT of a new consumer in one tree."""

    async def work(connection: Connection, _: int) -> int:
        body = CLAIM % (in_a_tree(bed), b"null")
        status, _answer = await connection.ask(request("PUT", f"/allocations/{bed.new()}", body))
        bed.held += status == NO_CONTENT
        return status

    return work


class _Request(Struct):
    allocations: msgspec.Raw


class _Answer(Struct):
    """The part of an answer that a caller needs; the rest is passed over."""

    allocation_requests: list[msgspec.Raw]


def boot(bed: TestBed) -> Work:
    """A search and the claim of one candidate by chance."""
    amounts = cycle(AMOUNTS)
    answers, requests = msgspec.json.Decoder(_Answer), msgspec.json.Decoder(_Request)

    async def work(connection: Connection, _: int) -> int:
        query = f"{ASK}&limit=1000".format(amount=next(amounts))
        status, body = await connection.ask(request("GET", f"/allocation_candidates?{query}"))
        if status != OK:
            return status
        chosen = requests.decode(bed.rng.choice(answers.decode(body).allocation_requests)).allocations
        claimed = CLAIM % (bytes(chosen), b"null")
        status, _answer = await connection.ask(request("PUT", f"/allocations/{bed.new()}", claimed))
        bed.held += status == NO_CONTENT
        return status

    return work


def set_up(bed: TestBed) -> Work:
    """A new flat provider: four calls."""

    async def work(connection: Connection, number: int) -> int:
        uuid = bed.new()
        host = flat_host(uuid, number)
        path = f"/resource_providers/{uuid}"
        for method, where, body in (
            ("POST", "/resource_providers", {"uuid": uuid, "name": host.name}),
            ("PUT", f"{path}/inventories", {"resource_provider_generation": 0, "inventories": host.inventories}),
            ("PUT", f"{path}/traits", {"resource_provider_generation": 1, "traits": host.traits}),
            ("PUT", f"{path}/aggregates", {"resource_provider_generation": 2, "aggregates": host.aggregates}),
        ):
            status, _answer = await connection.ask(request(method, where, msgspec.json.encode(body)))
            if status != OK:
                return status
        return OK

    return work


# --- rows

FLAT: tuple[Phase, ...] = (
    candidates("candidates", "candidates, limit=1000, 1 client", f"{ASK}&limit=1000"),
    candidates("candidates-1", "candidates, limit=1, 1 client", f"{ASK}&limit=1"),
    candidates(
        "candidates-trait",
        "candidates, trait and member_of, limit=1000, 1 client",
        f"{ASK}&required={GOLD}&member_of={AGGREGATES[0]}&limit=1000",
    ),
    candidates("candidates-none", "no candidate (trait), 1 client", f"{ASK}&required={NOWHERE}&limit=1000"),
    Phase(key="put", title="PUT allocations, 8 clients", make=claim),
    Phase(key="crowded", title="PUT allocations, 64 clients on 4 providers", make=crowded, clients=WRITERS),
    Phase(key="swap", title="POST allocations, swap, 8 clients", make=swap),
    Phase(key="many", title="POST allocations, 20 consumers each, 4 clients", make=many(anywhere), clients=4, warm=4),
    Phase(key="boot", title="GET candidates (limit=1000) + PUT, 8 clients", make=boot),
    # last: it leaves providers behind, more on the faster system
    Phase(key="set-up", title="set up a provider (4 calls), 8 clients", make=set_up, fine=frozenset({OK}), most=5000),
)

NESTED: tuple[Phase, ...] = (
    candidates(
        "same-subtree",
        "nested, 3 groups, same_subtree, limit=1000, 1 client",
        "resources=DISK_GB:{amount}&resources_CPU=VCPU:2,MEMORY_MB:1024"
        f"&required_CPU={CELL}&resources_NET=SRIOV_NET_VF:1"
        "&group_policy=none&same_subtree=_CPU,_NET&limit=1000",
    ),
    candidates(
        "isolate",
        "nested, 3 groups, isolate, limit=1000, 1 client",
        "resources=DISK_GB:{amount}&resources1=SRIOV_NET_VF:1&resources2=SRIOV_NET_VF:1&group_policy=isolate&limit=1000",
    ),
    Phase(key="put-tree", title="nested, PUT allocations, 8 clients", make=claim_in_tree),
    Phase(
        key="many-tree",
        title="nested, POST allocations, 20 consumers each, 4 clients",
        make=many(in_a_tree),
        clients=4,
        warm=4,
    ),
)
