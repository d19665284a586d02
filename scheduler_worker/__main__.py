"""`python -m scheduler_worker` is `berth run scheduler`."""

from __future__ import annotations

import sys

# berth composes the workers; a worker imports it here only, to be started like all others.
from berth.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["run", "scheduler"]
    main()
