"""The version of this program, and the commit that it is of where pip or git knows it."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from bus import distribution

HERE = Path(__file__).resolve().parents[1]  # a checkout, or the site-packages that it is installed in
SHORT = 8  # digits of a commit that are shown


def version() -> str:
    """The version; in brackets the commit, where it is known, and Python's version."""
    known = [*filter(None, [commit()]), f"Python {platform.python_version()}"]
    return f"{distribution.version()} ({', '.join(known)})"


def commit() -> str:
    """The commit that pip has installed from a repository, or that our checkout is at; "": it is not known."""
    recorded = json.loads(metadata.distribution(distribution.DISTRIBUTION).read_text("direct_url.json") or "{}")
    if found := recorded.get("vcs_info", {}).get("commit_id", ""):
        return str(found)[:SHORT]
    if not (HERE / ".git").exists():  # a directory above is another repository
        return ""
    try:
        command = ["git", "-C", str(HERE), "rev-parse", f"--short={SHORT}", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        return ""
