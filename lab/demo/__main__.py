"""`python -m lab.demo`."""

from __future__ import annotations

from lab.demo.run import main

if __name__ == "__main__":
    main()
