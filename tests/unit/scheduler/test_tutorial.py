"""The filter of docs/start/first-filter.md, read out of the page and asked about hosts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

from berth.settings import read_settings

PAGE = (Path(__file__).parents[3] / "docs" / "start" / "first-filter.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"^ *```{language}\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return textwrap.dedent(found.group(1))


def test_the_filter_of_the_tutorial_passes_odd_hosts() -> None:
    module: dict[str, object] = {"__name__": "my_filters"}
    exec(block("python"), module)
    tried = module["OddHostsOnly"]()  # type: ignore[operator]
    assert tried.rejection_reason(SimpleNamespace(name="c1-00003"), None) is None
    assert tried.rejection_reason(SimpleNamespace(name="c1-00004"), None) == "host.even"


def test_the_settings_of_the_tutorial_are_settings(tmp_path: Path) -> None:
    (tmp_path / "berth.toml").write_text(block("toml"))
    assert read_settings(tmp_path / "berth.toml", {}).scheduler.enabled_filters == ("ComputeFilter", "OddHostsOnly")
