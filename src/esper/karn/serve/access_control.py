"""Access control of the web server, and security headers of its responses.

Every HTTP request is checked in this order: Host header (against DNS rebinding), method, and token, if the
server has one. The HTTP response headers forbid the browser to load anything from other servers.
"""

import functools
import hmac
import ipaddress
import secrets
import socket
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""HTTP security headers of every response."""
METHODS: Final = ("GET", "HEAD")
TOKEN: Final = "token"


class Access(NamedTuple):
    """Address and access token of the web server."""

    host: str
    port: int
    token: str | None
    """Secret token that HTTP requests must contain; None requires no token, so any process on this machine
    may connect.
    """

    @property
    def cookie(self) -> str:
        """Name of the token's cookie; the name contains the port, because browsers send a cookie to all ports
        of a machine.
        """
        return f"esper-{self.port}"

    @property
    def url(self) -> str:
        """Address of the web server for a browser, with the token if there is one."""
        address = _address(self.host)
        host = "localhost" if address is not None and address.is_unspecified else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/" + (f"?{TOKEN}={self.token}" if self.token else "")


def access(host: str, port: int, *, ask_for_token: bool) -> Access:
    """Return the access settings of a web server; a server that other machines can reach always has a
    token.
    """
    needed = ask_for_token or not _is_loopback(host)
    return Access(host, port, secrets.token_urlsafe(24) if needed else None)


class Guard:
    """ASGI middleware that checks every HTTP request and adds the security headers to the response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        turned_away = self._check(scope)
        await (turned_away or self._app)(scope, receive, send_guarded)

    def _check(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_ours(host):
            named = f"this server does not answer to the name '{host[:80]}'"
            return _sentence(421, f"{named}; open it by the address it printed")
        if scope["method"] not in METHODS:
            return _sentence(405, f"{scope['method'][:20]} is not allowed; this server is read, by GET")
        return None if self._access.token is None else self._ask_for_token(scope, headers)

    def _is_ours(self, host_header: str) -> bool:
        """Return whether the Host header of a request contains a name of this server.

        The port in the Host header is not checked, because a tunnel may use another port.
        """
        try:
            name = urlsplit(f"//{host_header}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self._access.host.lower()) or _is_loopback(name):
            return True
        if _is_loopback(self._access.host):
            return False
        return _address(name) is not None or name in _names_of_this_machine()

    def _ask_for_token(self, scope: Scope, headers: Headers) -> Response | None:
        query = QueryParams(scope["query_string"])
        if (scope["method"], scope["path"]) == ("GET", "/") and self._is_right(query.get(TOKEN, "")):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self._access.cookie, query[TOKEN], httponly=True, samesite="lax", path="/")
            return answer
        kind, _, given = headers.get("authorization", "").partition(" ")
        cookie = cookie_parser(headers.get("cookie", "")).get(self._access.cookie, "")
        if self._is_right(cookie) or (kind.lower() == "bearer" and self._is_right(given)):
            return None
        return _sentence(403, "this server asks for its token; open the whole address that it printed")

    def _is_right(self, given: str) -> bool:
        """Compare a token with the server's token in constant time, so that response times reveal nothing
        about it.
        """
        return hmac.compare_digest(given.encode(), (self._access.token or "").encode())


def _sentence(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": sentence}, status_code=status)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    return name == "localhost" or ((address := _address(name)) is not None and address.is_loopback)


@functools.cache  # Cached, because socket.getfqdn() may query a name server.
def _names_of_this_machine() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({name, f"{name}.local", socket.getfqdn().lower()})
