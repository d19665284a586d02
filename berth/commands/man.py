"""`berth man`: the manual page."""

from __future__ import annotations

import sys


def man() -> None:
    """Print the manual page, for `man -l -` or a file berth.1."""
    from berth.reference.manpage import render  # noqa: PLC0415  (it imports every command)

    sys.stdout.write(render())
