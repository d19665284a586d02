"""The settings of `berth serve web`: the OpenID Connect provider whose tokens it takes, and what their claims allow."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

ClaimPath = Annotated[str, Bound(max_length=200)]
ClaimValues = Annotated[tuple[Annotated[str, Bound(min_length=1, max_length=255)], ...], Bound(max_length=100)]


class OidcConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenID Connect provider. A claim within another is named with dots, as `realm_access.roles`."""

    issuer: Annotated[str, Bound(max_length=1_000)] = ""
    """Its issuer, to the letter as its tokens name it; https, or http on this computer. Empty: no such tokens are
    taken.
    """
    client_id: Annotated[str, Bound(max_length=255)] = ""
    """The public client at the provider with which `berth login --oidc` runs the device flow."""
    audience: Annotated[str, Bound(max_length=255)] = ""
    """The audience of the access tokens that are taken; they are JWTs (RFC 9068). Empty: ID tokens are taken, whose
    audience is `client_id`.
    """
    scopes: Annotated[str, Bound(max_length=1_000)] = "openid"
    """What `berth login` requests, separated by blanks; with `openid` among them."""
    algorithms: Annotated[
        tuple[Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"], ...],
        Bound(min_length=1),
    ] = ("RS256", "ES256")
    """The signatures that are taken."""
    name_claim: ClaimPath = "sub"
    """The claim with the caller's name, which the log and the timelines have: 1 to 255 printable letters. Name one that
    users cannot change.
    """
    role_claim: ClaimPath = "roles"
    """The claim with the caller's roles: a text, or a list of them."""
    operators: ClaimValues = ()
    """Roles that make an operator."""
    readers: ClaimValues = ()
    """Roles that make a reader."""
    project_claim: ClaimPath = ""
    """The claim with the caller's project: a text, or a list of one. Empty: no caller has role project."""
    members: ClaimValues = ()
    """Roles that make the caller one of its project. Empty: everyone who has a project is."""
    clock_skew_s: Annotated[int, Bound(ge=0, le=300)] = 30
    """Seconds that the provider's clock may differ from this computer's."""
    timeout_s: Annotated[float, Bound(gt=0, le=60)] = 5.0
    """Seconds that one request to the provider may take."""
    ca_file: Annotated[str, Bound(max_length=4_000)] = ""
    """Certificates (PEM) of the authorities that sign the provider's. Empty: those that come with httpx."""


class WebConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pages and the HTTP API."""

    oidc: OidcConfig = OidcConfig()
    """An OpenID Connect provider, whose tokens are taken beside those of a file, of the schedulers and of Keystone."""
