"""A planted defect stands in for a function with all of its parameters: else it is found by its TypeError."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

HERE = Path(__file__).parent
PLANTS = [f"tests.sim.{one.stem}" for one in sorted([*HERE.glob("mutants*.py"), *HERE.glob("test_mutants*.py")])]


def planted() -> Iterator[Any]:
    """Every function without parameters of these modules that returns a context."""
    for name in PLANTS:
        module = importlib.import_module(name)
        for one in vars(module).values():
            if not inspect.isfunction(one) or one.__module__ != name or inspect.signature(one).parameters:
                continue
            if re.search(r"AbstractContextManager|Iterator\[None\]", str(inspect.signature(one).return_annotation)):
                yield pytest.param(one, id=f"{name.rpartition('.')[2]}.{one.__name__}")


def takes_all(before: Callable[..., Any], after: Callable[..., Any]) -> bool:
    """Whether a call with all parameters of the one fits the other."""
    named: dict[str, None] = {}
    unnamed: list[None] = []
    for one in inspect.signature(before).parameters.values():
        if one.kind is one.KEYWORD_ONLY:
            named[one.name] = None
        elif one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            unnamed.append(None)
    try:
        inspect.signature(after).bind(*unnamed, **named)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("plant", list(planted()))
def test_a_planted_function_takes_what_the_real_one_takes(
    plant: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = patch.object
    unfit: list[str] = []

    def looked_at(target: Any, name: str, new: Any = None, *more: Any, **named: Any) -> Any:
        before = inspect.getattr_static(target, name)
        if inspect.isfunction(before) and inspect.isfunction(new) and not takes_all(before, new):
            unfit.append(name)
        return original(target, name, new, *more, **named)

    monkeypatch.setattr(patch, "object", looked_at)
    with plant():
        pass
    assert unfit == []
