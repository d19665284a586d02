"""`python -m compute_sim` is `berth run compute`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from berth.cli import main

    sys.argv[1:1] = ["run", "compute"]
    main()
