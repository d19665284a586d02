"""`python -m ironic_sync` is `berth run ironic-sync`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from berth.cli import main

    sys.argv[1:1] = ["run", "ironic-sync"]
    main()
