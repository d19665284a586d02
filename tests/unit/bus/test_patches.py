"""What reaches into private parts of libraries works with the versions that it names, and states that of others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bus.rabbitmq import RabbitTransport, patches
from bus.rabbitmq.patches import KNOWN, UnknownLibrary, install

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture
def not_installed() -> None:
    install()
    install.cache_clear()


@pytest.mark.parametrize("library", KNOWN)
def test_a_library_of_an_unknown_version_is_a_coded_error(
    monkeypatch: pytest.MonkeyPatch, not_installed: None, library: str
) -> None:
    found = patches.version
    monkeypatch.setattr(patches, "version", lambda name: "99.0.1" if name == library else found(name))
    with pytest.raises(UnknownLibrary, match=rf"{library} 99\.0\.1") as refused:
        RabbitTransport("amqp://127.0.0.1", name="api")
    assert refused.value.code == "bus.library"


def test_a_library_without_a_part_that_is_reached_for_is_a_coded_error(
    monkeypatch: pytest.MonkeyPatch, not_installed: None
) -> None:
    monkeypatch.delattr(patches.Channel, "_on_deliver_frame")
    with pytest.raises(UnknownLibrary, match="_on_deliver_frame"):
        RabbitTransport("amqp://127.0.0.1", name="api")


def test_the_known_versions_are_those_that_may_be_installed() -> None:
    wanted = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    bounds = {text.partition(">=")[0]: text.partition(">=")[2] for text in wanted}
    for name, known in KNOWN.items():
        *above, last = known.removesuffix(".").split(".")
        upper = ".".join([*above, str(int(last) + 1)])
        assert bounds[name] == f"{known.removesuffix('.')},<{upper}"
