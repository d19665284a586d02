"""What the API says of how one logs in."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct


class OidcOffer(Struct, frozen=True, kw_only=True):
    """An OpenID Connect provider to log in with. by_access_token: berth takes its access tokens, else ID tokens."""

    issuer: Annotated[str, Bound(max_length=1_000)]
    client_id: Annotated[str, Bound(max_length=255)]
    scopes: Annotated[str, Bound(max_length=1_000)]
    by_access_token: bool = False


class LoginOffer(Struct, frozen=True, kw_only=True):
    """How one logs in, beside a token of berth's own. oidc: None: not with an OpenID Connect provider."""

    oidc: OidcOffer | None = None
