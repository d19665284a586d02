"""Files for `berth apply` that cannot be used: a sentence with the file, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from berth.commands.objects import MAX_FILE_BYTES, read_file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"flavors = [", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"a = " + b"9" * 5000, "is not TOML"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"#" * (MAX_FILE_BYTES + 1), "is larger than"),
        (b"[flavor.x]\nvcpus = 1\n", "a file has the sections flavors"),
        (b"[flavors]\nx = 1\n", "[flavors] holds one table for each name"),
        (None, "cannot read {}: No such file or directory"),
    ],
    ids=["open", "bytes", "digits", "deep", "large", "section", "table", "absent"],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "objects.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(typer.BadParameter) as mistake:
        read_file(file)
    assert str(file) in mistake.value.message and message.replace("{}", str(file)) in mistake.value.message
