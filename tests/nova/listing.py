"""The ids of Nova's functional tests, as one line of JSON. Run by Nova's own interpreter.

Without the tests of samples: they compare with files of Nova's source tree that are in no wheel.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import unittest
from collections.abc import Iterator

os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = "true"

from nova.tests import functional

SAMPLES = ("api_sample_tests", "notification_sample_tests")


def tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Those in it and below it."""
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from tests(one)
        else:
            yield one


def main() -> None:
    """Print them."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(functional.__path__, f"{functional.__name__}."):
        name = module.name.split(".")
        if name[-1].startswith("test_") and not set(SAMPLES) & set(name):
            suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module.name))
            found.update(test.id() for test in tests(suite))
    sys.stdout.write(json.dumps(sorted(found)) + "\n")


if __name__ == "__main__":
    main()
