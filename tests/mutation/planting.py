"""How a mutant comes into a process: new code for the functions that it changes, or its source in place of a module's.

As a plugin of pytest (`-p tests.mutation.planting`), the second: for what is run while modules are imported.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

PLANT = "PLANTED_MUTANT"  # not of berth's settings; names a file: what `Plant` holds, as JSON


class OnlyByImport(Exception):
    """What a mutant changes is run by an import, so that no function of a process that has imported it can have it."""


def changed_functions(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The functions of a module whose code differs, as it is and as it becomes. Raises OnlyByImport."""
    if before == after:
        return
    if before.co_flags & CO_OPTIMIZED:
        if before.co_freevars != after.co_freevars:
            raise OnlyByImport
        yield before, after
        return
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (before, after)]
    outer = [[each for each in code.co_consts if not isinstance(each, CodeType)] for code in (before, after)]
    if before.co_code != after.co_code or before.co_names != after.co_names or outer[0] != outer[1]:
        raise OnlyByImport
    for one, other in zip(*inner, strict=True):
        yield from changed_functions(one, other)


class Functions:
    """The functions that this process has imported, by their place in the source."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._of: dict[tuple[str, int, str], list[FunctionType]] = {}
        gc.unfreeze()  # what is frozen is not listed (tests/conftest.py)
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(root)):
                self._of.setdefault(_place(each.__code__), []).append(each)
        gc.freeze()

    def plant(self, path: str, source: str) -> None:
        """Give those of a file that a mutant changes its code. Raises OnlyByImport."""
        name = str(self._root / path)
        before = compile(Path(name).read_text(encoding="utf-8"), name, "exec", dont_inherit=True)
        after = compile(source, name, "exec", dont_inherit=True)
        changed = list(changed_functions(before, after))
        if not changed or not all(_place(code) in self._of for code, _ in changed):
            raise OnlyByImport
        for code, planted in changed:
            for function in self._of[_place(code)]:
                function.__code__ = planted


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_qualname


class _Planted(SourceFileLoader):
    """Loads a module from another source than its file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class Plant:
    """One module's source, and the tests to run first."""

    def __init__(self, path: str, source: str, first: Sequence[str]) -> None:
        self._path, self._source, self._first = path, source, {name: at for at, name in enumerate(first)}
        self._name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """As an importer."""
        if name != self._name:
            return None
        where = str(Path.cwd() / self._path)
        return spec_from_file_location(name, where, loader=_Planted(name, where, self._source))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._first.get(item.nodeid, len(self._first)))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py, which may import the module."""
    if place := os.environ.get(PLANT):
        plant: Any = Plant(**json.loads(Path(place).read_text(encoding="utf-8")))
        sys.meta_path.insert(0, plant)
        early_config.pluginmanager.register(plant)
