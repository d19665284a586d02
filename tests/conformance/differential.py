"""Random requests to berth and to OpenStack's Placement side by side; see scripts/conformance --differential.

Both start empty and get the same requests; the answer's status, error code and data (lists as sets) must be the same.
A disagreement is printed with what led to it, and both start again. Run by the suite's own interpreter.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from typing import Any

import httpx
from gabbits import OLD_DEFAULTS, Placement, berth_with, say
from placement.tests.functional.fixtures import gabbits as fixtures

LENGTH = 60  # requests from empty to empty
VERSIONS = (0, 7, 8, 11, 12, 13, 14, 17, 18, 19, 20, 22, 24, 25, 27, 28, 29, 30, 31, 33, 34, 35, 36, 37, 38, 39)
SHOWN = 400


def uuid_of(kind: int, number: int) -> str:
    """The nth uuid of a kind."""
    return f"{kind:08x}-0000-4000-8000-{number:012x}"


PROVIDERS = [uuid_of(1, n) for n in range(6)]
CONSUMERS = [uuid_of(2, n) for n in range(5)]
AGGREGATES = [uuid_of(3, n) for n in range(3)]
CLASSES = ["VCPU", "MEMORY_MB", "DISK_GB", "CUSTOM_A", "CUSTOM_B"]
TRAITS = ["HW_CPU_X86_AVX2", "MISC_SHARES_VIA_AGGREGATE", "CUSTOM_T", "CUSTOM_U"]


DIFFERENT: dict[str, int] = {}  # differences on purpose, and how often they were met


class Maker:
    """Makes requests that are mostly good; `known` is what berth says of the generations."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.generations: dict[str, int] = {}
        self.consumers: dict[str, int] = {}

    def request(self) -> tuple[str, str, Any, int]:
        """(method, path, body, version)."""
        rng = self.rng
        makers = [
            (6, self.create), (3, self.update), (2, self.delete), (9, self.inventories), (4, self.one_inventory),
            (5, self.traits), (5, self.aggregates), (12, self.allocate), (5, self.allocate_many), (2, self.forget),
            (14, self.candidates), (6, self.listing), (8, self.look), (4, self.words), (3, self.reshape),
            (3, self.usages), (3, self.nonsense),
        ]  # fmt: skip
        [(_, make)] = rng.choices(makers, [weight for weight, _ in makers])
        if not self.generations and rng.random() < 0.7:
            make = self.create
        method, path, body = make()
        version = 39 if rng.random() < 0.6 else rng.choice(VERSIONS)
        return method, path, body, version

    # --- parts

    def provider(self) -> str:
        return self.rng.choice(PROVIDERS)

    def generation(self, provider: str) -> int:
        return self.generations.get(provider, 0) + (self.rng.random() < 0.05)

    def inventory(self) -> dict[str, Any]:
        rng = self.rng
        total = rng.choice([1, 4, 8, 100])
        made: dict[str, Any] = {"total": total}
        if rng.random() < 0.2:
            made["reserved"] = rng.choice([0, 1, total, total + 1])
        if rng.random() < 0.2:
            made["allocation_ratio"] = rng.choice([1.5, 2, 0.5, 16.0, 0])
        if rng.random() < 0.15:
            made[rng.choice(["min_unit", "max_unit", "step_size"])] = rng.choice([0, 1, 2, 3])
        return made

    def stock(self) -> dict[str, Any]:
        return {name: self.inventory() for name in self.rng.sample(CLASSES, self.rng.randint(0, 3))}

    def resources(self) -> dict[str, int]:
        names = self.rng.sample(CLASSES, self.rng.choice([1, 1, 2, 3]))
        return {name: self.rng.choice([1, 1, 1, 2, 4, 8, 200]) for name in names}

    def held(self, consumer: str) -> dict[str, Any]:
        """What a new consumer asks for is seldom nothing or of nobody: there Placement differs (`on_purpose`)."""
        new = consumer not in self.consumers and self.rng.random() < 0.995
        some = [provider for provider in PROVIDERS if provider in self.generations] if new else PROVIDERS
        number = self.rng.choice([1, 1, 2] if new else [0, 1, 1, 2])
        return {
            p: {"resources": self.resources()} for p in self.rng.sample(some or PROVIDERS, min(number, len(some)) or 1)
        }

    def wanted(self, consumer: str) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {
            "allocations": self.held(consumer),
            "project_id": rng.choice("pq"),
            "user_id": rng.choice("uv"),
        }
        if rng.random() < 0.9:
            body["consumer_generation"] = self.consumers.get(consumer) if rng.random() < 0.9 else rng.choice([None, 1])
        if rng.random() < 0.9:
            body["consumer_type"] = rng.choice(["INSTANCE", "MIGRATION", "instance", "X"])
        return body

    # --- requests

    def create(self) -> tuple[str, str, Any]:
        own = self.provider()
        body: dict[str, Any] = {"uuid": own, "name": f"rp{self.rng.choice([PROVIDERS.index(own), 1])}"}
        if self.rng.random() < 0.6:
            body["parent_provider_uuid"] = self.rng.choice([*PROVIDERS, None])
        return "POST", "/resource_providers", body

    def update(self) -> tuple[str, str, Any]:
        body: dict[str, Any] = {"name": f"rp{self.rng.randint(0, 7)}"}
        if self.rng.random() < 0.7:
            body["parent_provider_uuid"] = self.rng.choice([*PROVIDERS, None])
        return "PUT", f"/resource_providers/{self.provider()}", body

    def delete(self) -> tuple[str, str, Any]:
        return "DELETE", f"/resource_providers/{self.provider()}", None

    def inventories(self) -> tuple[str, str, Any]:
        own = self.provider()
        path = f"/resource_providers/{own}/inventories"
        if self.rng.random() < 0.1:
            return "DELETE", path, None
        return "PUT", path, {"resource_provider_generation": self.generation(own), "inventories": self.stock()}

    def one_inventory(self) -> tuple[str, str, Any]:
        own, name = self.provider(), self.rng.choice(CLASSES)
        path = f"/resource_providers/{own}/inventories"
        method = self.rng.choice(["POST", "PUT", "DELETE", "GET"])
        if method == "POST":
            return method, path, {**self.inventory(), "resource_class": name}
        body = {**self.inventory(), "resource_provider_generation": self.generation(own)} if method == "PUT" else None
        return method, f"{path}/{name}", body

    def traits(self) -> tuple[str, str, Any]:
        own = self.provider()
        if self.rng.random() < 0.1:
            return "DELETE", f"/resource_providers/{own}/traits", None
        body = {
            "traits": self.rng.sample(TRAITS, self.rng.randint(0, 3)),
            "resource_provider_generation": self.generation(own),
        }
        return "PUT", f"/resource_providers/{own}/traits", body

    def aggregates(self) -> tuple[str, str, Any]:
        own = self.provider()
        listed = self.rng.sample(AGGREGATES, self.rng.randint(0, 2))
        body = {"aggregates": listed, "resource_provider_generation": self.generation(own)}
        return "PUT", f"/resource_providers/{own}/aggregates", body if self.rng.random() < 0.9 else listed

    def allocate(self) -> tuple[str, str, Any]:
        consumer = self.rng.choice(CONSUMERS)
        return "PUT", f"/allocations/{consumer}", self.wanted(consumer)

    def allocate_many(self) -> tuple[str, str, Any]:
        some = self.rng.sample(CONSUMERS, self.rng.randint(1, 3))
        return "POST", "/allocations", {consumer: self.wanted(consumer) for consumer in some}

    def forget(self) -> tuple[str, str, Any]:
        return "DELETE", f"/allocations/{self.rng.choice(CONSUMERS)}", None

    def candidates(self) -> tuple[str, str, Any]:
        rng = self.rng
        suffixes = rng.choice([[""], [""], ["", "1"], ["1", "2"], ["", "_A", "_B"], ["1"]])
        parts: list[str] = []
        for suffix in suffixes:
            if rng.random() < 0.95:
                text = ",".join(f"{name}:{amount}" for name, amount in self.resources().items())
                parts.append(f"resources{suffix}={text}")
            if rng.random() < 0.3:
                parts.append(f"required{suffix}={self.required()}")
            if rng.random() < 0.25:
                parts.append(f"member_of{suffix}={self.member_of()}")
            if rng.random() < 0.1:
                parts.append(f"in_tree{suffix}={self.provider()}")
        if len(suffixes) > 1 or rng.random() < 0.1:
            parts.append(f"group_policy={rng.choice(['none', 'isolate'])}")
        if rng.random() < 0.15:
            parts.append(f"root_required={rng.choice(['', '!'])}{rng.choice(TRAITS)}")
        if rng.random() < 0.15:
            parts.append(f"same_subtree={','.join(suffix for suffix in suffixes if suffix)}")
        return "GET", f"/allocation_candidates?{'&'.join(parts)}", None

    def required(self) -> str:
        one, two = self.rng.sample(TRAITS, 2)
        return self.rng.choice([one, f"{one},{two}", f"!{one}", f"{one},!{two}", f"in:{one},{two}", ""])

    def member_of(self) -> str:
        one, two = self.rng.sample(AGGREGATES, 2)
        return self.rng.choice([one, f"in:{one},{two}", f"!{one}", f"!in:{one},{two}", f"{one},{two}", "no"])

    def listing(self) -> tuple[str, str, Any]:
        rng = self.rng
        parts = []
        if rng.random() < 0.4:
            parts.append(f"required={self.required()}")
        if rng.random() < 0.4:
            parts.append(f"member_of={self.member_of()}")
        if rng.random() < 0.4:
            parts.append("resources=" + ",".join(f"{n}:{a}" for n, a in self.resources().items()))
        if rng.random() < 0.2:
            parts.append(f"in_tree={self.provider()}")
        if rng.random() < 0.2:
            parts.append(f"uuid={self.provider()}")
        if rng.random() < 0.1:
            parts.append("name=rp1")
        return "GET", f"/resource_providers?{'&'.join(parts)}", None

    def look(self) -> tuple[str, str, Any]:
        kind = self.rng.choice(["", "/inventories", "/usages", "/traits", "/aggregates", "/allocations"])
        if self.rng.random() < 0.3:
            return "GET", f"/allocations/{self.rng.choice(CONSUMERS)}", None
        return "GET", f"/resource_providers/{self.provider()}{kind}", None

    def words(self) -> tuple[str, str, Any]:
        table, name = self.rng.choice(
            [("traits", self.rng.choice(TRAITS)), ("resource_classes", self.rng.choice(CLASSES)), ("traits", "bad")]
        )
        method = self.rng.choice(["PUT", "PUT", "PUT", "GET", "DELETE"])
        return method, f"/{table}/{name}", None

    def reshape(self) -> tuple[str, str, Any]:
        some = self.rng.sample(PROVIDERS, 2)
        inventories = {
            p: {"resource_provider_generation": self.generation(p), "inventories": self.stock()} for p in some
        }
        consumers = self.rng.sample(CONSUMERS, self.rng.randint(0, 2))
        return "POST", "/reshaper", {
            "inventories": inventories,
            "allocations": {consumer: self.wanted(consumer) for consumer in consumers},
        }  # fmt: skip

    def usages(self) -> tuple[str, str, Any]:
        kind = self.rng.choice(["", "&consumer_type=all", "&consumer_type=unknown", "&consumer_type=INSTANCE"])
        user = self.rng.choice(["", "&user_id=u"])
        return "GET", f"/usages?project_id={self.rng.choice('pq')}{user}{kind}", None

    def nonsense(self) -> tuple[str, str, Any]:
        path = self.rng.choice(
            ["/nothing", "/resource_providers", "/allocations", f"/allocations/{CONSUMERS[0]}", "/traits"]
        )
        body = self.rng.choice([None, {}, [], {"name": 1}, {"name": "rp1", "more": 1}, {"allocations": []}])
        return self.rng.choice(["POST", "PUT", "DELETE", "GET"]), path, body


def seen(answer: httpx.Response) -> Any:
    """What of an answer must be the same."""
    if answer.status_code >= 400:
        error = answer.json()["errors"][0]
        return answer.status_code, error.get("code"), error["title"]
    data = unordered(answer.json()) if answer.content else None
    headers = [answer.headers.get(name) for name in ("openstack-api-version", "cache-control", "content-type")]
    return answer.status_code, headers, "last-modified" in answer.headers, data


def on_purpose(ours: httpx.Response, theirs: httpx.Response) -> str | None:
    """Which of the differences of docs/placement.md this is, if it is one."""
    if theirs.status_code == 409 and "expected 0 but got" in theirs.text:
        return "empty consumer"  # Placement keeps the record of a consumer that never held anything
    empty = ({"allocation_requests": [], "provider_summaries": {}}, {"resource_providers": []})
    nothing = theirs.status_code == 200 and theirs.json() in empty
    if nothing and ours.status_code == 400 and "No such" in ours.text:
        return "unknown name"  # Placement looks a name up only if the search comes to it
    return None


def unordered(data: Any) -> Any:
    """Data with its lists as sorted ones."""
    if isinstance(data, dict):
        return {name: unordered(value) for name, value in data.items()}
    if isinstance(data, list):
        return sorted((unordered(value) for value in data), key=lambda value: json.dumps(value, sort_keys=True))
    return data


def send(client: httpx.Client, method: str, path: str, body: Any, version: int) -> httpx.Response:
    """One request as an administrator who is a service too."""
    headers = {
        "x-auth-token": "admin",
        "x-roles": "admin,service",
        "openstack-api-version": f"placement 1.{version}",
    }
    return client.request(method, path, json=body, headers=headers)


def compare(berth: httpx.Client, real: httpx.Client, seed: int) -> tuple[int, str | None]:
    """(requests sent, the first disagreement)."""
    maker = Maker(random.Random(seed))
    for client in (berth, real):
        Placement(client).wipe()
    story: list[str] = []
    for number in range(LENGTH):
        method, path, body, version = maker.request()
        story.append(f"1.{version} {method} {path} {json.dumps(body) if body is not None else ''}")
        ours = send(berth, method, path, body, version)
        theirs = send(real, method, path, body, version)
        story[-1] += f"  -> {ours.status_code}"
        if seen(ours) != seen(theirs):
            known = on_purpose(ours, theirs)
            if known is not None:
                DIFFERENT[known] = DIFFERENT.get(known, 0) + 1
                if method == "GET":
                    continue
                return number + 1, None  # from here on they are in different states
            told = [f"seed {seed}", *story, f"berth: {ours.status_code} {ours.text[:SHOWN]}"]
            return number + 1, "\n  ".join([*told, f"real:  {theirs.status_code} {theirs.text[:SHOWN]}"])
        if method != "GET" and ours.status_code < 400:
            learn(maker, berth)
    return LENGTH, None


def learn(maker: Maker, berth: httpx.Client) -> None:
    """Look up the generations that good requests need."""
    listed = send(berth, "GET", "/resource_providers", None, 39).json()["resource_providers"]
    maker.generations = {row["uuid"]: row["generation"] for row in listed}
    maker.consumers = {}
    for consumer in CONSUMERS:
        held = send(berth, "GET", f"/allocations/{consumer}", None, 39).json()
        if "consumer_generation" in held:
            maker.consumers[consumer] = held["consumer_generation"]


def main() -> int:
    """Compare until enough requests are sent; 0 when all agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write requests, disagreements there")
    options = parser.parse_args()
    logging.disable()
    sent, seed, disagreements = 0, options.seed, []
    fixture = fixtures.APIFixture()
    fixture.start_fixture()
    try:
        transport = httpx.WSGITransport(app=fixtures.setup_app(), raise_app_exceptions=False)
        with (
            berth_with(options.berth, OLD_DEFAULTS, None) as url,
            httpx.Client(base_url=url, timeout=30) as berth,
            httpx.Client(base_url="http://real", transport=transport) as real,
        ):
            while sent < options.requests:
                count, wrong = compare(berth, real, seed)
                sent, seed = sent + count, seed + 1
                if wrong is not None:
                    disagreements.append(wrong)
                    say(wrong)
    finally:
        fixture.stop_fixture()
    say(f"{sent} requests, {len(disagreements)} disagreements; on purpose: {DIFFERENT}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"requests": sent, "disagreements": disagreements, "on_purpose": DIFFERENT}, file, indent=1)
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
