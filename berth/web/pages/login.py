"""The login page, and sessions."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from berth.web.api import body_of
from berth.web.rendering import rendered
from berth.web.sign_in_sessions import SESSION_COOKIE, SESSION_S, Access, WebRole

MAX_LOGIN_BYTES = 16 * 1024  # a token of Keystone may have 8 KiB


MAX_NEXT = 2_000


def page_of(address: str) -> str:
    """An address if it is a page of this server, else nothing: a link to the login page must not lead elsewhere."""
    # Browsers read a backslash as a slash, and skip tabs and line ends: "/\\evil" and "/\t/evil" are other servers.
    is_path = address.startswith("/") and not address.startswith(("//", "/login")) and "\\" not in address
    return address if is_path and address.isascii() and address.isprintable() and len(address) <= MAX_NEXT else ""


class LoginPages:
    """The handlers that begin and end a session."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/logout", self.logout, methods=["POST"]),
        ]

    async def login(self, request: Request) -> Response:
        """Log in with a token."""
        if self._access.open:
            return RedirectResponse("/", 303)
        wanted = page_of(request.query_params.get("next", ""))
        if request.method == "GET":
            return self._page(request, "login.html", wrong=False, wanted=wanted)
        form = parse_qs((await body_of(request, MAX_LOGIN_BYTES)).decode("utf-8", "replace"))
        token = form.get("token", [""])[0].strip()
        caller = await self._access.by_token(token)
        if caller is None:
            return self._page(request, "login.html", 401, wrong=True, wanted=wanted)
        response = RedirectResponse(wanted or ("/builds" if caller.role is WebRole.PROJECT else "/"), 303)
        response.set_cookie(
            SESSION_COOKIE,
            self._access.log_in(token),
            max_age=int(SESSION_S),
            httponly=True,
            # A link from another site (a chat, a ticket) opens the page that it names. What changes anything is refused
            # to other sites by `SiteGuard`, whatever cookie comes along.
            samesite="lax",
            secure=request.headers.get("origin", "").startswith("https:"),  # TLS is the proxy's: here it is http
        )
        return response

    async def logout(self, request: Request) -> Response:
        """End the session."""
        self._access.log_out(request.cookies.get(SESSION_COOKIE, ""))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(SESSION_COOKIE)
        return response

    def _page(self, request: Request, template: str, status: int = 200, **fields: Any) -> Response:
        return rendered(request, template, status, has_session=not self._access.open, **fields)
