"""ASGI application of the web server: views and static files, protected by access control."""

import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from esper.karn.page.rendering import style
from esper.karn.serve.access_control import Access, Guard
from esper.karn.serve.answer_cache import AnswerCache
from esper.karn.serve.folder import RunFolder
from esper.karn.serve.views import Views
from esper.leyline.errors import EsperError

STATIC: Final = Path(__file__).parent / "static"
SECONDS_TO_END: Final = 3
"""Seconds that open HTTP connections may take to close when the server stops."""


def create_app(folder: RunFolder, access: Access, is_ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Create the web application that shows the runs of ``folder``, with the access control of ``access``."""
    views = Views(AnswerCache(folder), is_ending)

    def no_such_address(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        sentence = f"{HTTPStatus(status).phrase}: {request.method} {request.url.path[:200]}"
        page = views.refusal(request, EsperError(sentence))
        page.status_code = status
        return page

    files = [Route("/style.css", _style), Mount("/static", StaticFiles(directory=STATIC))]
    handlers = {EsperError: views.refusal, HTTPException: no_such_address}
    return Guard(Starlette(routes=[*views.routes(), *files], exception_handlers=handlers), access)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 selects a free port."""
    try:
        # On an invalid host name, socket.create_server() would leave its socket open, so the name is checked
        # first.
        host.encode("idna")
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EsperError(
            f"cannot listen at {host}, port {port}: {reason}; choose another one with --port, or --port 0"
            " for any that is free"
        ) from None


def serve(folder: RunFolder, access: Access, listener: socket.socket) -> None:
    """Run the web server on the socket ``listener`` until it is interrupted."""
    config = uvicorn.Config(
        create_app(folder, access, lambda: server.should_exit),
        log_level="warning",
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])


def _style(request: Request) -> Response:
    return PlainTextResponse(style(), media_type="text/css", headers={"Cache-Control": "no-cache"})
