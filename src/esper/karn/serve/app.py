"""The server of the page: static files, the endpoints of the API and the guard around both."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from esper.karn.figures import STYLE
from esper.karn.serve.api import Api, refusal
from esper.karn.serve.folder import RunFolder
from esper.karn.serve.readings import Readings
from esper.karn.serve.safety import Access, Guard
from esper.leyline.errors import EsperError

STATIC: Final = Path(__file__).parent / "static"
SECONDS_TO_END: Final = 3
"""How long open connections may take to end when the server is stopped."""


def create_app(folder: RunFolder, access: Access, is_ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The page over ``folder`` for whoever ``access`` lets in."""
    app = Starlette(
        routes=[
            Route("/", _index),
            Route("/figures.css", _figure_style),
            *Api(Readings(folder), is_ending).routes(),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        exception_handlers={EsperError: refusal, HTTPException: _no_such_address},
    )
    return Guard(app, access)


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address; port 0 is any that is free."""
    try:
        host.encode("idna")  # before there is a socket that would be left open
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EsperError(
            f"cannot listen at {host}, port {port}: {reason}; choose another one with --port, or --port 0"
            " for any that is free"
        ) from None


def serve(folder: RunFolder, access: Access, listener: socket.socket) -> None:
    """Answer at ``listener`` until interrupted."""
    config = uvicorn.Config(
        create_app(folder, access, lambda: server.should_exit),
        log_level="warning",
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])


def _index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})


def _figure_style(request: Request) -> Response:
    return PlainTextResponse(STYLE, media_type="text/css", headers={"Cache-Control": "no-cache"})


def _no_such_address(request: Request, error: Exception) -> Response:
    """What starlette refuses, as a sentence too."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse(
        {"error": f"{HTTPStatus(status).phrase}: {request.method} {request.url.path[:200]}"},
        status_code=status,
    )
