"""Where the settings of a Placement find its policy files."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement_worker.rest.config import POLICY_DIR, POLICY_FILE, _policy


@pytest.mark.parametrize(
    ("section", "there", "found"),
    [
        ({}, (), {}),
        ({}, (POLICY_FILE,), {"policy_file": POLICY_FILE}),
        ({}, (POLICY_DIR,), {"policy_dir": POLICY_DIR}),
        ({"policy_file": "mine.yaml"}, (), {"policy_file": "mine.yaml"}),
        (
            {"policy_file": "mine.yaml"},
            (POLICY_FILE, POLICY_DIR),
            {"policy_file": "mine.yaml", "policy_dir": POLICY_DIR},
        ),
        ({"policy_dirs": "mine.d"}, (), {"policy_dir": "mine.d"}),
        ({"policy_dirs": "mine.d"}, (POLICY_DIR,), {"policy_dir": "mine.d"}),
    ],
)
def test_policy_files_apply_that_are_named_or_beside_the_configuration(
    section: dict[str, str], there: tuple[str, ...], found: dict[str, str], tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).mkdir() if name == POLICY_DIR else (tmp_path / name).touch()
    assert _policy(section, tmp_path) == {key: str(tmp_path / name) for key, name in found.items()}
