"""Reads the REST API's settings from an OpenStack `placement.conf`, so that a site keeps its file."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from bus.contracts.patterns import reason_of
from bus.service.settings import SettingsError
from placement_worker.rest.config import RestConfig

FILE = "placement.conf"

# The defaults of oslo.policy, and keystoneauth1's names of the supported authentication plugins.
POLICY_FILE, POLICY_DIR = "policy.yaml", "policy.d"
SIGN_IN = frozenset({"password", "v3password"})

T = TypeVar("T", bound=msgspec.Struct)


def with_oslo_conf(config: RestConfig) -> RestConfig:
    """Return the configuration, overridden by the file in conf_dir. Raises SettingsError."""
    if not config.conf_dir:
        return config
    folder = Path(config.conf_dir)
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        with (folder / FILE).open(encoding="utf-8") as file:
            parser.read_file(file)
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise SettingsError("rest.conf_dir", f"cannot use {folder / FILE}: {error}") from error
    sections: dict[str, Mapping[str, str]] = {name: parser[name] for name in parser.sections()}
    try:
        return _laid_over(config, sections, folder)
    except (msgspec.ValidationError, ValueError) as error:
        raise SettingsError("rest.conf_dir", f"{folder / FILE}: {reason_of(error)}") from error


def _laid_over(config: RestConfig, sections: Mapping[str, Mapping[str, str]], folder: Path) -> RestConfig:
    placement = sections.get("placement", {})
    auth = sections.get("api", {}).get("auth_strategy", config.auth)
    cors = sections.get("cors", {})
    keystone = dict(sections.get("keystone_authtoken", {}))
    if keystone.get("auth_type", "password") not in SIGN_IN:
        raise ValueError(f"auth_type {keystone['auth_type']}: berth signs in with a password only")
    if "token_cache_time" in keystone:
        keystone["cache_s"] = keystone["token_cache_time"]
    listed = {key: _list(cors[key]) for key in cors if isinstance(getattr(config.cors, key, None), tuple)}
    changed = replace(
        config,
        auth=auth,
        keystone=_convert(config.keystone, keystone),
        policy=_convert(config.policy, _policy(sections.get("oslo_policy", {}), folder)),
        cors=_convert(config.cors, {**cors, **listed}),
        incomplete_project_id=placement.get("incomplete_consumer_project_id", config.incomplete_project_id),
        incomplete_user_id=placement.get("incomplete_consumer_user_id", config.incomplete_user_id),
        randomize=_boolean(placement.get("randomize_allocation_candidates"), config.randomize),
        default_limit=int(placement.get("max_allocation_candidates", config.default_limit)),
    )
    return msgspec.convert(msgspec.to_builtins(changed), RestConfig)


def _policy(section: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the policy settings as oslo.policy finds them: policy files beside the configuration apply even if no
    setting names them.
    """
    policy = dict(section)
    file, more = policy.pop("policy_file", ""), policy.pop("policy_dirs", "")
    if file or (folder / POLICY_FILE).is_file():
        policy["policy_file"] = str(folder / (file or POLICY_FILE))
    if more or (folder / POLICY_DIR).is_dir():
        policy["policy_dir"] = str(folder / (more or POLICY_DIR))
    return policy


def _convert(base: T, changes: Mapping[str, object]) -> T:
    known = {key: changes[key] for key in base.__struct_fields__ if key in changes}
    return msgspec.convert({**msgspec.to_builtins(base), **known}, type(base), strict=False)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _boolean(text: str | None, default: bool) -> bool:
    return default if text is None else text.strip().lower() in {"true", "1", "yes", "on"}
