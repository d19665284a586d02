"""Where the bus of a cell that an operator adds is found, and that its URL is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from berth.site import url_of
from bus.contracts.objects import CellBus
from bus.service.environment import CellAddressInvalid

URL = "amqp://user:secret@host:5672/cell3"


def test_the_url_is_in_a_file_in_a_variable_or_that_of_the_api_bus(tmp_path: Path) -> None:
    (tmp_path / "cell3").write_text(f"{URL}\n")
    assert url_of(CellBus(url_file="cell3"), str(tmp_path), {}) == URL
    assert url_of(CellBus(url_variable="CELL_3"), "", {"CELL_3": URL}) == URL
    assert url_of(CellBus(prefix="c."), str(tmp_path), {}) == ""


@pytest.mark.parametrize(
    ("where", "text", "reason"),
    [
        (CellBus(url_file="cell3"), None, "No such file"),
        (CellBus(url_file="cell3"), b"", "a bus is at"),
        (CellBus(url_file="cell3"), b"http://user:secret@host/", "a bus is at"),
        (CellBus(url_file="cell3"), b"amqp://user:secret@host:99999/", "a bus is at"),
        (CellBus(url_file="cell3"), b"\xffsecret", "it is not UTF-8"),
        (CellBus(url_file="cell3"), URL.encode() * 200, "a bus is at"),
        (CellBus(url_variable="CELL_3"), None, "a bus is at"),
    ],
)
def test_what_is_no_url_is_refused_and_not_shown(
    tmp_path: Path, where: CellBus, text: bytes | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / "cell3").write_bytes(text)
    with pytest.raises(CellAddressInvalid, match=reason) as wrong:
        url_of(where, str(tmp_path), {})
    assert "secret" not in str(wrong.value)


def test_without_a_directory_no_file_is_read() -> None:
    with pytest.raises(CellAddressInvalid, match="cells_dir is empty"):
        url_of(CellBus(url_file="cell3"), "", {})
