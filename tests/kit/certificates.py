"""Certificates made for one test by openssl: an authority, and what it issues."""

from __future__ import annotations

import subprocess
from pathlib import Path

from msgspec import Struct

_CONFIG = "[req]\ndistinguished_name = dn\n[dn]\n"
_NEW = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Certificate(Struct, frozen=True):
    """A certificate and the key to it, as files."""

    file: Path
    key: Path


class Authority:
    """A CA of this test's own; `file` is what those trust who trust it."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._config = directory / "openssl.cnf"
        self._config.write_text(_CONFIG)
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
        self._own = self._make(name, (*extensions, "subjectKeyIdentifier=hash"))
        self.file = self._own.file

    def issue(self, name: str, *alternatives: str) -> Certificate:
        """A certificate for `DNS:...` and `IP:...` names; none for a client."""
        names = (f"subjectAltName={','.join(alternatives)}",) if alternatives else ()
        extensions = ("basicConstraints=critical,CA:FALSE", "authorityKeyIdentifier=keyid", *names)
        return self._make(name, extensions, "-CA", str(self._own.file), "-CAkey", str(self._own.key))

    def _make(self, name: str, extensions: tuple[str, ...], *more: str) -> Certificate:
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        given = [word for extension in extensions for word in ("-addext", extension)]
        where = ("-keyout", str(made.key), "-out", str(made.file), "-config", str(self._config), "-subj", f"/CN={name}")
        subprocess.run(("openssl", *_NEW, *where, *given, *more), check=True, capture_output=True, timeout=60)
        return made
