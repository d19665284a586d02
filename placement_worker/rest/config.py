"""The settings of the REST API."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import reason_of
from bus.openstack.login import KeystoneLogin
from bus.service.settings import SettingsError

UNOWNED = "00000000-0000-0000-0000-000000000000"


class CorsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origins whose pages may use the API, as in oslo.middleware's [cors]. Without an origin, CORS is off."""

    allowed_origin: tuple[str, ...] = ()
    """Origins (`https://host[:port]`), or `*`."""
    allow_credentials: bool = True
    """Whether a browser may send credentials with a request."""
    expose_headers: tuple[str, ...] = ()
    """Response headers that a page may read."""
    max_age: Annotated[int, Bound(ge=0)] = 3600
    """Seconds that a browser may keep the answer of a preflight request."""
    allow_methods: tuple[str, ...] = ("OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "PATCH")
    """HTTP methods that a page may use."""
    allow_headers: tuple[str, ...] = ()
    """Request headers that a page may set."""


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The access rules, as in oslo.policy's [oslo_policy]."""

    policy_file: str = ""
    """A file of rules by name (YAML or JSON) that override Placement's. Empty: none."""
    policy_dir: str = ""
    """A directory of such files, read in the order of their names. Empty: none."""
    enforce_new_defaults: bool = True
    """Whether Placement's rules with scopes and the service role apply, as in its current release."""


class KeystoneConfig(KeystoneLogin, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keystone and the service user that validates tokens there, as in [keystone_authtoken]. The user needs a role that
    may validate tokens.
    """

    username: str = "placement"
    """The service user; also of an application credential that is given by name."""
    cafile: str = ""
    """Certificates (PEM) of the authorities that sign Keystone's. Empty: those that the system trusts."""
    insecure: bool = False
    """Do not verify Keystone's certificate. For tests only."""
    cache_s: Annotated[float, Bound(gt=0, le=3600)] = 300.0
    """Seconds that a validated token is trusted without a new validation, as keystonemiddleware's
    `token_cache_time`.
    """
    timeout_s: Annotated[float, Bound(gt=0, le=300)] = 10.0
    """Seconds that one request to Keystone may take."""


class RestConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The REST API of one placement process."""

    listen: str = ""
    """HOST:PORT. Empty: not served, unless `berth run placement --http` or `berth up` names an address."""
    conf_dir: str = ""
    """A directory with an OpenStack `placement.conf`. Its [api] auth_strategy, [keystone_authtoken], [oslo_policy],
    [cors] and [placement] override what is set here.
    """
    auth: Literal["noauth2", "tokens", "keystone"] | None = None
    """`noauth2` trusts the identity that the caller states, and therefore listens on loopback only; `tokens` reads
    `token_file`; `keystone` validates tokens there. Not set: `noauth2`, but a token of its own where `berth up`
    chooses the address.
    """
    noauth2_anywhere: bool = False
    """Allow `noauth2` on an address that is not loopback."""
    token_file: str = ""
    """A TOML file of [[tokens]] with `sha256`, `user_id`, `project_id` and `roles`."""
    keystone: KeystoneConfig = KeystoneConfig()
    """For `auth` = `keystone`."""
    policy: PolicyConfig = PolicyConfig()
    """Access rules."""
    cors: CorsConfig = CorsConfig()
    """Cross-origin requests."""
    incomplete_project_id: Annotated[str, Bound(min_length=1, max_length=255)] = UNOWNED
    """The project of allocations that were written below microversion 1.8, which has none."""
    incomplete_user_id: Annotated[str, Bound(min_length=1, max_length=255)] = UNOWNED
    """The user of such allocations."""
    randomize: bool = False
    """Answer a sample of the allocation candidates instead of the first ones, as Placement's
    `randomize_allocation_candidates`.
    """
    search_budget: Annotated[int, Bound(ge=1000)] = 100_000
    """Steps that one candidate search may take. It is answered with the results found by then."""
    search_timeout_s: Annotated[float, Bound(gt=0, le=60)] = 5.0
    """Seconds that one candidate search may take. It is answered with the results found by then."""
    default_limit: Annotated[int, Bound(ge=-1)] = -1
    """The most allocation candidates of an answer, whatever limit is requested, as Placement's
    `max_allocation_candidates`. -1: no limit.
    """
    max_group: Annotated[int, Bound(ge=1, le=1000)] = 64
    """The most writes of different requests that one transaction applies."""
    max_waiting: Annotated[int, Bound(ge=1)] = 4096
    """The most writes that wait for a transaction; a further one is answered 503."""
    max_body_bytes: Annotated[int, Bound(ge=1024, le=2**20)] = 2**20
    """The most bytes of one request's body; a larger one is answered 413, as is one with more than 4,096 entries.
    Not more than 1 MiB: while the decoder reads it, for up to 12 ms, nothing else runs.
    """
    max_bodies_bytes: Annotated[int, Bound(ge=1024)] = 256 * 2**20
    """The most bytes of all bodies that are being received; what exceeds it is answered 503."""
    max_query_bytes: Annotated[int, Bound(ge=1024)] = 64 * 2**10
    """The most bytes of a URL's query."""
    body_timeout_s: Annotated[float, Bound(gt=0)] = 30.0
    """Seconds between two parts of a body before the request is answered 408."""
    write_timeout_s: Annotated[float, Bound(gt=0)] = 30.0
    """Seconds that a client may leave its answer unread before its connection is closed."""
    max_connections: Annotated[int, Bound(ge=1)] = 2000
    """The most open connections; requests on further ones are answered 503."""
    keep_alive_s: Annotated[int, Bound(ge=1)] = 75
    """Seconds that an idle connection stays open. 75, as nginx and Apache's proxies expect."""


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
