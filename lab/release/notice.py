"""NOTICE of a release: each package that a virtualenv has, its licence, and the licence's text: `... VIRTUALENV`."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

from bus.distribution import DISTRIBUTION

LICENCE_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT")
HEADING = """berth
Copyright the berth maintainers; Apache-2.0 (LICENSE).

What an installation of berth-scheduler[embedded] brings besides, each under the licence that its package states:
"""


def licence_of(found: Distribution) -> str:
    """What its metadata state: the expression, else the first line of the text, else the classifiers; "": nothing."""
    metadata = found.metadata
    texts = [text for name in ("License-Expression", "License") for text in metadata.get_all(name) or ()]
    text = next(filter(None, texts), "").strip()
    kinds = [one.rpartition(" :: ")[2] for one in metadata.get_all("Classifier") or () if one.startswith("License ::")]
    return text.partition("\n")[0] if text and text != "UNKNOWN" else ", ".join(kinds)


def texts_of(found: Distribution) -> list[str]:
    """The texts of licences among its own files."""
    named = [
        path
        for path in found.files or ()
        if ".dist-info" in str(path.parent) and path.name.upper().startswith(LICENCE_NAMES)
    ]
    return [_text(path) for path in sorted(named)]


def _text(path: PackagePath) -> str:
    return Path(str(path.locate())).read_text(errors="replace").strip()


def notice(site: Path) -> tuple[str, list[str]]:
    """The text, and the packages that state no licence."""
    found = sorted(distributions(path=[str(site)]), key=lambda one: one.name.lower())
    parts, unstated = [HEADING], []
    for one in found:
        if one.name == DISTRIBUTION:  # of others' files in its own it has the licences beside them
            kept = [path for path in one.files or () if path.suffix == ".LICENSE"]
            parts += ["\n".join(["-" * 72, str(path), "", _text(path), ""]) for path in kept]
            continue
        licence, texts = licence_of(one), texts_of(one)
        if not licence and not texts:
            unstated.append(one.name)
        parts.append("\n".join(["-" * 72, f"{one.name} {one.version}: {licence or 'see its text'}", "", *texts, ""]))
    return "\n".join(parts), unstated


def main() -> int:
    """Print it. 1: a package states no licence."""
    (site,) = Path(sys.argv[1]).glob("lib/python*/site-packages")
    text, unstated = notice(site)
    sys.stdout.write(text)
    if unstated:
        sys.stderr.write(f"berth: no licence is stated by {', '.join(unstated)}\n")
    return 1 if unstated else 0


if __name__ == "__main__":
    sys.exit(main())
