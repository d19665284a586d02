"""The ids of Nova's functional tests, with `--checks` of berth's own, as one line of JSON.

Run by Nova's own interpreter. Without the tests of samples: they compare with files of Nova's tree that no wheel has.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType

os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = "true"

from nova.tests import functional  # isort: skip  (it has to be the first)

import checks

SAMPLES = ("api_sample_tests", "notification_sample_tests")


def tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Those in it and below it."""
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from tests(one)
        else:
            yield one


def below(package: ModuleType, names: Callable[[str], bool]) -> list[str]:
    """The ids in the modules of these names, sorted."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if names(module.name):
            suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module.name))
            found.update(test.id() for test in tests(suite) if test.id().startswith(module.name))
    return sorted(found)


def of_suite(module: str) -> bool:
    """Whether it has tests that this virtualenv can run."""
    name = module.split(".")
    return name[-1].startswith("test_") and not set(SAMPLES) & set(name)


def main() -> None:
    """Print them."""
    ids = below(checks, lambda _: True) if "--checks" in sys.argv[1:] else below(functional, of_suite)
    sys.stdout.write(json.dumps(ids) + "\n")


if __name__ == "__main__":
    main()
