"""Credentials for Keystone in the settings, apart from the client: reading settings needs no HTTP library."""

from __future__ import annotations

from msgspec import Struct

from bus.service.settings import Secret


class KeystoneLogin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Credentials for Keystone: a user of a project with a password, or an application credential."""

    auth_url: str = ""
    """Keystone's address, with or without /v3. Empty: no Keystone."""
    username: str = ""
    """The user; also of an application credential that is given by name."""
    password: Secret = ""
    """The user's password."""
    project_name: str = "service"
    """The user's project."""
    user_domain_name: str = "Default"
    """The domain of the user."""
    project_domain_name: str = "Default"
    """The domain of the project."""
    user_domain_id: str = ""
    """The domain of the user by its id. Not empty: used instead of the name."""
    project_domain_id: str = ""
    """The domain of the project by its id. Not empty: used instead of the name."""
    application_credential_id: str = ""
    """An application credential by its id, instead of user and password."""
    application_credential_name: str = ""
    """An application credential by its name and its user."""
    application_credential_secret: Secret = ""
    """The application credential's secret."""
