"""Tokens on record: how soon a new one is accepted and a revoked one refused, and what goes on without a scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from berth.web.problems import Problem
from berth.web.sign_in_sessions import Access, WebCaller, WebRole, digest_of
from berth.web.tokens import FAILED_AGE_S, KEPT_S, MAX_AGE_S, MIN_AGE_S, TOKEN_PREFIX, StoredTokens
from bus.contracts.base import Message
from bus.contracts.objects import AccessToken, ObjectKind, ObjectsPage, StoredObject, TokenRole
from bus.faults import RequestTimeout
from scheduler_worker.records.object_records import BodyInvalid, body_of
from tests.unit.berth.world import HandClock

SECRET = TOKEN_PREFIX + "a"
ALICE = WebCaller("alice", WebRole.PROJECT, "p")


class Schedulers:
    """A bus whose scheduler has tokens on record."""

    def __init__(self) -> None:
        self.requests = 0
        self.answers = True
        self.tokens: dict[str, AccessToken] = {}

    def add(self, name: str, secret: str, **fields: Any) -> None:
        token = {"sha256": digest_of(secret), "role": "project", "project": "p", "expires_at": 10_000.0, **fields}
        self.tokens[name] = msgspec.convert(token, AccessToken)

    async def request(self, _: Message, _reply: type[Any], **_more: Any) -> ObjectsPage:
        self.requests += 1
        if not self.answers:
            raise RequestTimeout("no answer")
        bodies = {name: msgspec.to_builtins(one) for name, one in self.tokens.items()}
        stored = [StoredObject(kind=ObjectKind.TOKEN, name=name, body=body, version=1) for name, body in bodies.items()]
        newer = StoredObject(kind=ObjectKind.TOKEN, name="newer", body={"role": "auditor"}, version=1)
        return ObjectsPage(revision=1, objects=(newer, *stored))


@pytest.fixture
def schedulers() -> Schedulers:
    found = Schedulers()
    found.add("alice", SECRET)
    return found


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def stored(schedulers: Schedulers, clock: HandClock) -> StoredTokens:
    return StoredTokens(schedulers, clock)  # type: ignore[arg-type]


async def test_a_token_on_record_is_its_callers(stored: StoredTokens, schedulers: Schedulers) -> None:
    assert await stored.caller(SECRET) == ALICE
    assert await stored.caller(SECRET) == ALICE
    assert schedulers.requests == 1


async def test_a_revoked_token_is_refused_within_the_bound(
    stored: StoredTokens, schedulers: Schedulers, clock: HandClock
) -> None:
    await stored.caller(SECRET)
    del schedulers.tokens["alice"]
    clock.now += MAX_AGE_S + 0.1
    assert await stored.caller(SECRET) is None


async def test_the_server_that_revokes_refuses_at_once(stored: StoredTokens, schedulers: Schedulers) -> None:
    await stored.caller(SECRET)
    del schedulers.tokens["alice"]
    stored.reread()
    assert await stored.caller(SECRET) is None


async def test_an_expired_token_is_refused_at_its_time_whatever_the_scheduler_says(
    stored: StoredTokens, schedulers: Schedulers, clock: HandClock
) -> None:
    schedulers.add("alice", SECRET, expires_at=clock.time() + 1.0)
    assert await stored.caller(SECRET) == ALICE
    schedulers.answers = False
    clock.now += 1.1
    assert await stored.caller(SECRET) is None


async def test_a_new_token_is_accepted_soon_and_guesses_ask_once_a_second(
    stored: StoredTokens, schedulers: Schedulers, clock: HandClock
) -> None:
    for number in range(50):
        assert await stored.caller(f"{TOKEN_PREFIX}guess{number}") is None
    assert schedulers.requests == 1
    schedulers.add("new", f"{TOKEN_PREFIX}new")
    clock.now += MIN_AGE_S + 0.1
    assert (await stored.caller(f"{TOKEN_PREFIX}new") or ALICE).name == "new"


async def test_a_token_of_another_form_asks_nobody(stored: StoredTokens, schedulers: Schedulers) -> None:
    assert await stored.caller("gAAAA-of-keystone") is None
    assert schedulers.requests == 0


async def test_without_a_scheduler_a_known_token_goes_on_for_its_time_and_no_other_is_accepted(
    stored: StoredTokens, schedulers: Schedulers, clock: HandClock
) -> None:
    await stored.caller(SECRET)
    schedulers.answers = False
    clock.now += KEPT_S - 1.0
    assert await stored.caller(SECRET) == ALICE
    with pytest.raises(Problem) as unknown:
        await stored.caller(f"{TOKEN_PREFIX}other")
    assert (unknown.value.status, unknown.value.code) == (503, "tokens.unavailable")
    asked = schedulers.requests
    clock.now += 1.1
    with pytest.raises(Problem) as too_old:
        await stored.caller(SECRET)
    assert too_old.value.code == "tokens.unavailable"
    assert schedulers.requests == asked, "callers wait one after the other for a scheduler that is away"
    schedulers.answers = True
    clock.now += FAILED_AGE_S
    assert await stored.caller(SECRET) == ALICE


async def test_the_tokens_of_the_file_need_no_scheduler(
    stored: StoredTokens, schedulers: Schedulers, clock: HandClock
) -> None:
    access = Access({digest_of("of the file"): ALICE}, clock)
    access.stored = stored.caller
    schedulers.answers = False
    assert await access.by_token("of the file") == ALICE
    schedulers.answers = True
    assert await access.by_token(SECRET) == ALICE, "a session and a program are looked up alike"
    assert schedulers.requests == 1


def test_a_body_of_a_newer_scheduler_is_no_token() -> None:
    wrong = [{"role": "project"}, {"role": "reader", "project": "p"}, {"sha256": "x"}, {"role": "root"}]
    for fields in (*wrong, {"expires_at": 1e300}):
        body = {"sha256": "0" * 64, "role": "reader", "expires_at": 1.0, **fields}
        with pytest.raises(BodyInvalid):
            body_of(ObjectKind.TOKEN, "t", body)
    with pytest.raises(BodyInvalid):
        body_of(ObjectKind.TOKEN, "two words", {"sha256": "0" * 64, "role": "reader", "expires_at": 1.0})
    assert [role.name for role in TokenRole] == [role.name for role in WebRole]
