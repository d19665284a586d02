"""The rules of the code that clients have to know about messages: the page documents it, and the code keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.catalogue import MESSAGES
from bus.contracts.catalogue.rows import MessageRow
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome
from bus.wire import MAX_BATCH_ITEMS, MAX_BODY_BYTES, MAX_CLIENT_BYTES, MAX_CLIENT_VALUES
from placement_worker.domain.server_groups import permitted

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "messages.md"
HOSTS = ("10000000-0000-4000-8000-000000000001", "10000000-0000-4000-8000-000000000002")
GROUP = "30000000-0000-4000-8000-000000000001"
SENT_BY_CLIENTS = [row for row in MESSAGES if {"client", "operator"} & set(row.publishers)]


def lists(schema: Any, path: str) -> Iterator[tuple[str, int | None]]:
    """(where, bound) of each list and each mapping of any names in a JSON schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from lists(one, path)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and "prefixItems" not in schema:
        yield path, schema.get("maxItems")
    for name, inner in schema.items():
        yield from lists(inner, f"{path}.{name}" if name not in ("properties", "$defs", "anyOf", "items") else path)


@pytest.mark.parametrize("row", SENT_BY_CLIENTS, ids=lambda row: row.message.__name__)
def test_each_list_that_a_client_sends_is_bounded_and_its_bound_is_documented(row: MessageRow) -> None:
    (_,), components = msgspec.json.schema_components([row.message])
    bounds = dict(lists(components, row.message.__name__))
    assert not [where for where, bound in bounds.items() if bound is None]
    text = PAGE.read_text()
    for where, bound in bounds.items():
        assert f"at most {bound})" in text, where


def test_the_lengths_of_a_body_and_of_a_batch_are_documented() -> None:
    text = " ".join(PAGE.read_text().split())
    assert f"at most {MAX_CLIENT_BYTES:,} bytes (`message.too_large`) and {MAX_CLIENT_VALUES:,} values" in text
    assert f"at most {MAX_BODY_BYTES:,} bytes on others" in text
    assert f"at most {MAX_BATCH_ITEMS:,} items" in text


def test_states_that_may_be_left_out_are_documented() -> None:
    """Held by `tests/unit/bus/test_lingering.py`."""
    text = " ".join(PAGE.read_text().split())
    assert "a state that the next one overtook is not published, so any but the terminal may be missing" in text


def test_each_member_is_held_to_the_policy_that_its_own_request_names() -> None:
    """Of two requests that name one group with contradicting policies none is refused for it."""
    apart = Claim(
        consumer=HOSTS[0],
        attempt=1,
        options=(ClaimOption(allocations={HOSTS[0]: {"VCPU": 1}}),),
        project_id="p",
        server_group=ServerGroup(uuid=GROUP, policy=GroupPolicy.ANTI_AFFINITY),
    )
    together = replace(apart, server_group=ServerGroup(uuid=GROUP, policy=GroupPolicy.AFFINITY))
    here, there = (ClaimOption(allocations={host: {"VCPU": 1}}, host=host) for host in HOSTS)
    others = {HOSTS[0]: 1}
    assert permitted(apart, here, others) is ClaimOutcome.RULED_OUT
    assert permitted(together, here, others) is ClaimOutcome.CLAIMED
    assert permitted(apart, there, others) is ClaimOutcome.CLAIMED
    assert permitted(together, there, others) is ClaimOutcome.RULED_OUT
    documented = "each member is held to the policy that its own request names, also where another named another"
    assert documented in " ".join(PAGE.read_text().split())
