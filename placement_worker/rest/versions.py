"""Parses the microversion of a request. All served versions are 1.x, so a version is represented by its minor
number.
"""

from __future__ import annotations

from typing import TypeVar

from placement_worker.rest.faults import HttpFault

T = TypeVar("T")

OLDEST, NEWEST = 0, 39
SERVICE = "placement"
HEADER = b"openstack-api-version"
RANGE = (f"1.{OLDEST}", f"1.{NEWEST}")


def version_of(header: str) -> int:
    """Return the minor version for placement in an `openstack-api-version` header, or else the oldest version.

    Raises HttpFault 406 for a version that is not served, and 400 for an invalid one.
    """
    for value in reversed(header.split(",")):
        service, _, version = value.strip().partition(" ")
        if service.lower() == SERVICE and version.strip():
            return _minor(version.strip())
    return OLDEST


def _minor(text: str) -> int:
    if text == "latest":
        return NEWEST
    major, dot, minor = text.partition(".")
    try:
        requested = (int(major), int(minor)) if dot else (int(major), -1)
        if not dot:
            raise ValueError("a minor version is missing")
    except ValueError as error:
        raise HttpFault(400, f"Invalid microversion: invalid version string: {text}; {error}") from error
    if requested[0] != 1 or not OLDEST <= requested[1] <= NEWEST:
        raise HttpFault(406, f"Invalid microversion: Unacceptable version header: {text}")
    return requested[1]


def at(table: tuple[tuple[int, T], ...], version: int) -> T:
    """Return the row for a microversion: the newest row that is not newer than the version."""
    return next(row for since, row in table if version >= since)
