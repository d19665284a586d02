"""Commands that call the HTTP API, and where they find it: none of them loads a broker's or a database's library."""

from __future__ import annotations
