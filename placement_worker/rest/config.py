"""Everything about the REST API that an operator may set."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.service.settings import Secret

UNOWNED = "00000000-0000-0000-0000-000000000000"


class CorsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which other origins' pages may use the API, as oslo.middleware's [cors] has it. No origin: no CORS."""

    allowed_origin: tuple[str, ...] = ()
    allow_credentials: bool = True
    expose_headers: tuple[str, ...] = ()
    max_age: Annotated[int, Bound(ge=0)] = 3600
    allow_methods: tuple[str, ...] = ("OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "PATCH")
    allow_headers: tuple[str, ...] = ()


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """oslo.policy's settings. policy_file, policy_dir: overrides of Placement's rules by name; none needed."""

    policy_file: str = ""
    policy_dir: str = ""
    enforce_new_defaults: bool = True


class KeystoneConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where Keystone is, and who we are to it (a user that may validate tokens), as [keystone_authtoken] has it.

    A domain's id, where it is set, goes before its name.
    """

    auth_url: str = ""
    username: str = "placement"
    password: Secret = ""
    project_name: str = "service"
    user_domain_name: str = "Default"
    project_domain_name: str = "Default"
    user_domain_id: str = ""
    project_domain_id: str = ""
    cafile: str = ""
    insecure: bool = False
    cache_s: Annotated[float, Bound(gt=0, le=3600)] = 300.0
    timeout_s: Annotated[float, Bound(gt=0, le=300)] = 10.0


class RestConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The REST API of one placement process.

    listen: HOST:PORT, empty = where `berth run placement --http` and `berth up` say. conf_dir: a directory with an
    OpenStack `placement.conf`, of which [api] auth_strategy, [keystone_authtoken], [oslo_policy], [cors] and
    [placement] are read over what is set here.
    auth: `noauth2` believes what the caller says of itself, and so listens on loopback only, unless noauth2_anywhere
    says it again; `tokens` reads token_file ([[tokens]] with sha256, user_id, project_id, roles); `keystone` asks it;
    not set: noauth2, but where `berth up` chooses the address a token of its own.
    incomplete_*: who holds what was allocated below 1.8. default_limit: the most candidates an answer has, whatever is
    asked for (-1: no bound). randomize: a sample of the candidates instead of the first. search_budget,
    search_timeout_s: what a candidate search may look at, and how long. max_group, max_waiting: writes in one
    transaction, and waiting for one. max_bodies_bytes: of all bodies that are not whole yet. write_timeout_s: how long
    a client may read nothing of its answer. openapi: serve the OpenAPI document at /openapi.json, where Placement has
    nothing.
    """

    listen: str = ""
    conf_dir: str = ""
    auth: Literal["noauth2", "tokens", "keystone"] | None = None
    noauth2_anywhere: bool = False
    token_file: str = ""
    keystone: KeystoneConfig = KeystoneConfig()
    policy: PolicyConfig = PolicyConfig()
    cors: CorsConfig = CorsConfig()
    incomplete_project_id: Annotated[str, Bound(min_length=1, max_length=255)] = UNOWNED
    incomplete_user_id: Annotated[str, Bound(min_length=1, max_length=255)] = UNOWNED
    openapi: bool = False
    randomize: bool = False
    search_budget: Annotated[int, Bound(ge=1000)] = 100_000
    search_timeout_s: Annotated[float, Bound(gt=0, le=60)] = 5.0
    default_limit: Annotated[int, Bound(ge=-1)] = -1
    max_group: Annotated[int, Bound(ge=1, le=1000)] = 64
    max_waiting: Annotated[int, Bound(ge=1)] = 4096
    max_body_bytes: Annotated[int, Bound(ge=1024, le=16 * 2**20)] = 2**20
    max_bodies_bytes: Annotated[int, Bound(ge=1024)] = 256 * 2**20
    max_query_bytes: Annotated[int, Bound(ge=1024)] = 64 * 2**10
    body_timeout_s: Annotated[float, Bound(gt=0)] = 30.0
    write_timeout_s: Annotated[float, Bound(gt=0)] = 30.0
    max_connections: Annotated[int, Bound(ge=1)] = 2000
    keep_alive_s: Annotated[int, Bound(ge=1)] = 75
