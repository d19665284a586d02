"""Random requests, valid and invalid, that know roughly what is there; the same seed gives the same story.

Everything is drawn from small pools, so that requests meet each other's providers, names and consumers.
"""

from __future__ import annotations

import random
import uuid
from typing import Any
from urllib.parse import urlencode

import queries
from calls import Call, consumer_generation, provider_generation
from pools import (
    AGGREGATES,
    CLASSES,
    CONSUMER_TYPES,
    CONSUMERS,
    CUSTOM_CLASSES,
    CUSTOM_TRAITS,
    ODD_NAMES,
    PROJECTS,
    PROVIDERS,
    SHARES,
    TRAITS,
    USERS,
    World,
)

BUILD_CALLS = 40
WEIGHTS = {
    "candidates": 30,
    "write_allocations": 12,
    "post_allocations": 8,
    "claim": 6,
    "delete_allocations": 4,
    "put_inventories": 6,
    "one_inventory": 6,
    "put_traits": 4,
    "put_aggregates": 4,
    "create_provider": 5,
    "update_provider": 5,
    "delete_provider": 2,
    "list_providers": 8,
    "read": 8,
    "usages": 4,
    "reshape": 5,
    "words": 6,
}
SPOILED = 0.12


class Generator:
    """Draws the next request; learns what came of it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.world = World()

    def next(self) -> Call:
        """A request: the first ones make a placement, the others do anything."""
        rng = self._rng
        if self.world.sent < BUILD_CALLS:
            return self._build()
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        call: Call = getattr(self, f"_{kind}")()
        return self._spoil(call) if rng.random() < SPOILED else call

    def note(self, call: Call, status: int, answer: Any) -> None:
        """The real Placement's answer to a request."""
        self.world.note(call, status, answer)

    # --- parts

    def _version(self, oldest: int = 0) -> str:
        rng = self._rng
        if rng.random() < 0.55:
            return "1.39"
        return f"1.{rng.randint(oldest if rng.random() < 0.9 else 0, 39)}"

    def _provider(self) -> str:
        """One that is there, mostly."""
        there = sorted(self.world.providers)
        if there and self._rng.random() < 0.93:
            return self._rng.choice(there)
        return self._rng.choice(PROVIDERS)

    def _class(self, uuid_: str | None = None) -> str:
        known = sorted(self.world.providers.get(uuid_ or "", ()))
        if known and self._rng.random() < 0.85:
            return self._rng.choice(known)
        return self._rng.choice(CLASSES if self._rng.random() < 0.95 else ODD_NAMES)

    def _generation(self, uuid_: str) -> Any:
        return provider_generation(uuid_, self._rng.choice([0] * 8 + [1, -1]))

    def _consumer_generation(self, uuid_: str) -> Any:
        return consumer_generation(uuid_, self._rng.choice([0] * 9 + [1]))

    def _inventory(self, name: str) -> dict[str, Any]:
        rng = self._rng
        total = rng.choice([1, 2, 4, 8, 16, 64, 100, 1000, 2**31 - 1])
        found: dict[str, Any] = {"total": total}
        if rng.random() < 0.4:
            found["reserved"] = rng.choice([0, 1, total, max(0, total - 1), total + 1])
        if rng.random() < 0.3:
            found["min_unit"] = rng.choice([1, 2, 4])
        if rng.random() < 0.4:
            found["max_unit"] = rng.choice([1, 2, 8, total, 2**31 - 1])
        if rng.random() < 0.25:
            found["step_size"] = rng.choice([1, 2, 3, 4])
        if rng.random() < 0.4:
            found["allocation_ratio"] = rng.choice([1.0, 1.5, 16.0, 0.5, 0.1, 0.3, 1, 2, 1e-3, 3.3, 0, -1.0])
        return found

    def _inventories(self, most: int = 4) -> dict[str, Any]:
        names = self._rng.sample(CLASSES, self._rng.randint(0, most))
        return {name: self._inventory(name) for name in names}

    def _put(self, uuid_: str, kind: str, value: Any, version: str) -> Call:
        body = {kind: value, "resource_provider_generation": self._generation(uuid_)}
        return Call("PUT", f"/resource_providers/{uuid_}/{kind}", version, body)

    # --- the first requests

    def _build(self) -> Call:
        """Names, then trees, then what is in them."""
        rng, step = self._rng, self.world.sent
        if step < len(CUSTOM_TRAITS):
            return Call("PUT", f"/traits/{CUSTOM_TRAITS[step]}")
        step -= len(CUSTOM_TRAITS)
        if step < len(CUSTOM_CLASSES):
            return Call("PUT", f"/resource_classes/{CUSTOM_CLASSES[step]}")
        step -= len(CUSTOM_CLASSES)
        if step < len(PROVIDERS) - 2:
            body: dict[str, Any] = {"uuid": PROVIDERS[step], "name": f"p{step}"}
            if step and rng.random() < 0.6:
                body["parent_provider_uuid"] = PROVIDERS[rng.randrange(step)]
            return Call("POST", "/resource_providers", body=body)
        uuid_ = rng.choice(sorted(self.world.providers) or PROVIDERS)
        draw = rng.random()
        if draw < 0.6:
            names = rng.sample(CLASSES, rng.randint(1, 4))
            inventories = {
                name: {"total": rng.choice([4, 8, 16, 100]), "max_unit": rng.choice([2, 8, 100])} for name in names
            }
            return self._put(uuid_, "inventories", inventories, "1.39")
        if draw < 0.8:
            return self._put(uuid_, "aggregates", rng.sample(AGGREGATES, rng.randint(1, 2)), "1.39")
        traits = rng.sample(CUSTOM_TRAITS, rng.randint(1, 2)) + ([SHARES] if rng.random() < 0.4 else [])
        return self._put(uuid_, "traits", traits, "1.39")

    # --- anything

    def _candidates(self) -> Call:
        version = self._version(10)
        path = queries.candidates(self._rng, self.world, int(version[2:]))
        return Call("GET", f"/allocation_candidates?{path}", version)

    def _resources(self, uuid_: str) -> dict[str, int]:
        rng = self._rng
        names = {self._class(uuid_) for _ in range(rng.choice([1, 1, 2, 3]))}
        return {name: rng.choice([1, 1, 1, 2, 2, 3, 4, 8, 100]) for name in sorted(names)}

    def _holding(self, minor: int, uuid_: str | None, *, may_be_empty: bool) -> dict[str, Any]:
        """The body of one consumer's allocations."""
        rng = self._rng
        providers = sorted({self._provider() for _ in range(rng.choice([1, 1, 2, 3]))})
        if may_be_empty and rng.random() < 0.15:
            providers = []
        body: dict[str, Any] = {}
        if minor >= 12:
            body["allocations"] = {p: {"resources": self._resources(p)} for p in providers}
            if rng.random() < 0.1 and providers:
                body["allocations"][providers[0]]["generation"] = rng.randint(0, 5)
        else:
            body["allocations"] = [
                {"resource_provider": {"uuid": p}, "resources": self._resources(p)} for p in providers
            ]
        if minor >= 8:
            body["project_id"] = rng.choice(PROJECTS)
            body["user_id"] = rng.choice(USERS)
        if minor >= 28 and uuid_ is not None:
            body["consumer_generation"] = self._consumer_generation(uuid_)
        if minor >= 34 and rng.random() < 0.2 and providers:
            body["mappings"] = {"": [providers[0]]}
        if minor >= 38:
            body["consumer_type"] = rng.choice(CONSUMER_TYPES)
        return body

    def _write_allocations(self) -> Call:
        version = self._version()
        consumer = self._rng.choice(CONSUMERS)
        minor = int(version[2:])
        return Call(
            "PUT", f"/allocations/{consumer}", version, self._holding(minor, consumer, may_be_empty=minor >= 28)
        )

    def _post_allocations(self) -> Call:
        version = self._version(13)
        minor = int(version[2:])
        chosen = self._rng.sample(CONSUMERS, self._rng.choice([1, 2, 2, 3]))
        body = {uuid_: self._holding(max(minor, 12), uuid_, may_be_empty=True) for uuid_ in chosen}
        return Call("POST", "/allocations", version, body)

    def _claim(self) -> Call:
        """A client's use of a candidate that it was offered."""
        offered = self.world.offered
        if not offered:
            return self._candidates()
        consumer = self._rng.choice(CONSUMERS)
        chosen = self._rng.choice(offered)
        body = {
            "allocations": chosen["allocations"],
            "project_id": PROJECTS[0],
            "user_id": USERS[0],
            "consumer_generation": consumer_generation(consumer),
            "consumer_type": "INSTANCE",
        }
        if "mappings" in chosen:
            body["mappings"] = chosen["mappings"]
        return Call("PUT", f"/allocations/{consumer}", "1.39", body)

    def _delete_allocations(self) -> Call:
        return Call("DELETE", f"/allocations/{self._rng.choice(CONSUMERS)}", self._version())

    def _put_inventories(self) -> Call:
        return self._put(self._provider(), "inventories", self._inventories(), self._version())

    def _one_inventory(self) -> Call:
        rng, version, uuid_ = self._rng, self._version(), self._provider()
        name = self._class(uuid_)
        path = f"/resource_providers/{uuid_}/inventories"
        draw = rng.random()
        if draw < 0.3:
            body = {**self._inventory(name), "resource_class": name}
            if rng.random() < 0.3:
                body["resource_provider_generation"] = self._generation(uuid_)
            return Call("POST", path, version, body)
        if draw < 0.7:
            body = {**self._inventory(name), "resource_provider_generation": self._generation(uuid_)}
            return Call("PUT", f"{path}/{name}", version, body)
        if draw < 0.93:
            return Call("DELETE", f"{path}/{name}", version)
        return Call("DELETE", path, version)

    def _put_traits(self) -> Call:
        rng, uuid_, version = self._rng, self._provider(), self._version(6)
        if rng.random() < 0.15:
            return Call("DELETE", f"/resource_providers/{uuid_}/traits", version)
        chosen = rng.sample(TRAITS, rng.randint(0, 3)) + (rng.sample(ODD_NAMES, 1) if rng.random() < 0.1 else [])
        if rng.random() < 0.1 and chosen:
            chosen.append(chosen[0])
        return self._put(uuid_, "traits", chosen, version)

    def _put_aggregates(self) -> Call:
        rng, uuid_, version = self._rng, self._provider(), self._version(1)
        chosen = rng.sample(AGGREGATES, rng.randint(0, 3))
        if rng.random() < 0.05 and chosen:
            chosen.append(chosen[0])
        if int(version[2:]) >= 19:
            return self._put(uuid_, "aggregates", chosen, version)
        return Call("PUT", f"/resource_providers/{uuid_}/aggregates", version, chosen)

    def _create_provider(self) -> Call:
        rng, version = self._rng, self._version()
        number = rng.randrange(len(PROVIDERS))
        body: dict[str, Any] = {
            "uuid": PROVIDERS[number],
            "name": f"p{rng.choice([number, number, rng.randrange(14)])}",
        }
        if rng.random() < 0.05:
            body["uuid"] = body["uuid"].replace("-", "")
        if rng.random() < 0.5:
            body["parent_provider_uuid"] = rng.choice([self._provider(), self._provider(), None])
        return Call("POST", "/resource_providers", version, body)

    def _update_provider(self) -> Call:
        rng, version, uuid_ = self._rng, self._version(), self._provider()
        number = PROVIDERS.index(uuid_)
        body: dict[str, Any] = {"name": f"p{rng.choice([number, number, number, rng.randrange(14)])}"}
        if rng.random() < 0.7:
            body["parent_provider_uuid"] = rng.choice([self._provider(), self._provider(), None])
        return Call("PUT", f"/resource_providers/{uuid_}", version, body)

    def _delete_provider(self) -> Call:
        return Call("DELETE", f"/resource_providers/{self._provider()}", self._version())

    def _list_providers(self) -> Call:
        version = self._version(4)
        return Call("GET", f"/resource_providers?{queries.providers(self._rng, self.world, int(version[2:]))}", version)

    def _read(self) -> Call:
        rng, version, uuid_ = self._rng, self._version(), self._provider()
        path = rng.choice(
            (
                f"/resource_providers/{uuid_}",
                f"/resource_providers/{uuid_}/inventories",
                f"/resource_providers/{uuid_}/inventories/{self._class(uuid_)}",
                f"/resource_providers/{uuid_}/usages",
                f"/resource_providers/{uuid_}/aggregates",
                f"/resource_providers/{uuid_}/traits",
                f"/resource_providers/{uuid_}/allocations",
                f"/allocations/{rng.choice(CONSUMERS)}",
                f"/resource_classes/{rng.choice(CLASSES + ODD_NAMES)}",
                f"/traits/{rng.choice(TRAITS + ODD_NAMES)}",
                "/resource_classes",
                "/",
            )
        )
        return Call("GET", path, version)

    def _usages(self) -> Call:
        rng, version = self._rng, self._version(9)
        pairs = [("project_id", rng.choice(PROJECTS))] if rng.random() < 0.95 else []
        if rng.random() < 0.4:
            pairs.append(("user_id", rng.choice(USERS)))
        if rng.random() < 0.5:
            pairs.append(("consumer_type", rng.choice([*CONSUMER_TYPES, "all", "unknown", "ALL", "nobody"])))
        return Call("GET", f"/usages?{urlencode(pairs)}", version)

    def _reshape(self) -> Call:
        rng, version = self._rng, self._version(30)
        minor = int(version[2:])
        chosen = sorted({self._provider() for _ in range(rng.randint(1, 3))})
        inventories = {}
        for uuid_ in chosen:
            known = sorted(self.world.providers.get(uuid_, ()))
            kept = {name: {"total": rng.choice([8, 100, 1000])} for name in known if rng.random() < 0.7}
            chosen_ones = {**kept, **(self._inventories(2) if rng.random() < 0.5 else {})}
            inventories[uuid_] = {"resource_provider_generation": self._generation(uuid_), "inventories": chosen_ones}
        consumers = rng.sample(CONSUMERS, rng.choice([0, 1, 2]))
        allocations = {c: self._holding(max(minor, 28), c, may_be_empty=True) for c in consumers}
        return Call("POST", "/reshaper", version, {"inventories": inventories, "allocations": allocations})

    def _words(self) -> Call:
        rng = self._rng
        if rng.random() < 0.5:
            version = self._version(6)
            name = rng.choice([*TRAITS, *CUSTOM_TRAITS, *ODD_NAMES, "CUSTOM_FLEETING"])
            draw = rng.random()
            if draw < 0.3:
                return Call("GET", f"/traits?{queries.traits(rng)}", version)
            return Call("PUT" if draw < 0.7 else "DELETE", f"/traits/{name}", version)
        version = self._version(2)
        name = rng.choice([*CLASSES, *ODD_NAMES, "CUSTOM_FLEETING"])
        draw = rng.random()
        if draw < 0.25:
            return Call("POST", "/resource_classes", version, {"name": name})
        if draw < 0.6:
            body = {"name": rng.choice([*CUSTOM_CLASSES, "CUSTOM_FLEETING", "CUSTOM_NEW", *ODD_NAMES])}
            return Call("PUT", f"/resource_classes/{name}", version, body if int(version[2:]) < 7 else None)
        return Call("DELETE", f"/resource_classes/{name}", version)

    # --- invalid on purpose

    def _spoil(self, call: Call) -> Call:
        """The same request with one thing wrong, or odd."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.1:
            version = rng.choice(["1.40", "2.0", "latest", "1", "x.y", "", "1.-1"])
            return Call(call.method, call.path, version, call.body)
        if draw < 0.15:
            accept = rng.choice(["text/plain", "text/html", "application/json;q=0.5, text/plain", "image/png", "*/*"])
            return Call(call.method, call.path, call.version, call.body, {"accept": accept})
        if draw < 0.22:
            return Call(rng.choice(["PATCH", "POST", "PUT", "DELETE", "GET"]), call.path, call.version, call.body)
        if draw < 0.3:
            odd = rng.choice(["/", "//", "/x", "?a=b", "&limit=0", "&x=", "%20", "?", "&resources=VCPU", "%00"])
            return Call(call.method, call.path + odd, call.version, call.body)
        if isinstance(call.body, dict | list):
            if draw < 0.37:
                kind = rng.choice(["text/plain", "application/xml", "application/json; charset=utf-8", ""])
                return Call(call.method, call.path, call.version, call.body, {"content-type": kind})
            if draw < 0.45:
                return Call(call.method, call.path, call.version, rng.choice(["", "{", "[]", "null", '"x"', "1", "{}"]))
            body = spoiled(rng, call.body)
            if call.path == "/resource_providers" and not (isinstance(body, dict) and "uuid" in body):
                return call  # a UUID of each server's own choice could not be compared
            return Call(call.method, call.path, call.version, body)
        return Call(call.method, call.path + rng.choice([str(uuid.UUID(int=7)), "x", "/inventories"]), call.version)


ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1.0,
    1.5,
    2**31,
    2**63,
    2**70,
    1e400,
    "",
    "x",
    "1",
    "X" * 300,
    "ü€",
    "a\u0000b",
    " VCPU",
    "VCPU\n",
    [],
    {},
    [1],
    {"x": 1},
)


def spoiled(rng: random.Random, body: Any) -> Any:
    """A copy of the data with one value, key or element changed."""
    if isinstance(body, dict) and (not body or "plus" not in body):
        keys = sorted(body)
        draw = rng.random()
        if not keys or draw < 0.12:
            return {**body, rng.choice(["extra", "", "VCPU", "name", "generation"]): rng.choice(ODD_VALUES)}
        key = rng.choice(keys)
        if draw < 0.27:
            return {name: value for name, value in body.items() if name != key}
        if draw < 0.37:
            odd = rng.choice([key.upper(), key.lower(), key + "\n", key.replace("-", ""), " " + key, "ü", key + "X"])
            return {(odd if name == key else name): value for name, value in body.items()}
        return {**body, key: spoiled(rng, body[key])}
    if isinstance(body, list) and body and rng.random() < 0.7:
        place = rng.randrange(len(body))
        return [*body[:place], spoiled(rng, body[place]), *body[place + 1 :]]
    return rng.choice(ODD_VALUES)
