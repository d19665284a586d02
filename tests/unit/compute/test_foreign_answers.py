"""Ironic's answers and others' fields of a node, if they are no text or nested without end."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from compute_sim.driver import DriverUnavailable
from compute_sim.drivers.ironic.api import _parse
from compute_sim.drivers.ironic.node import IronicNode, Page

NOT_JSON = (b'{"berth":"\xff"}', b'{"berth":{"deployment":"\xff"}}', b'{"more":' + b"[" * 5_000)


@pytest.mark.parametrize("info", NOT_JSON)
def test_an_entry_of_a_node_that_cannot_be_read_is_no_mark(info: bytes) -> None:
    node = IronicNode(uuid="n", instance_uuid="00000000-0000-4000-8000-000000000001", instance_info=msgspec.Raw(info))
    assert node.mark is None


@pytest.mark.parametrize("answer", [b'{"nodes":[{"uuid":"\xff"}]}', b'{"more":' + b"[" * 5_000])
def test_an_answer_that_cannot_be_read_is_an_unavailable_ironic(answer: bytes) -> None:
    with pytest.raises(DriverUnavailable, match="not understood"):
        _parse(httpx.Response(200, content=answer), Page)
