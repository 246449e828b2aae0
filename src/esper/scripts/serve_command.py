"""``esper serve DIR``: live web page that shows all runs below a folder."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pydantic import Field

from esper.leyline import EsperError, printable
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words

NEEDED = ("starlette", "uvicorn")


class ServeConfig(Settings):
    """Show all runs below a folder on a live web page in your browser. No data leave this machine."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen at; with 0.0.0.0 other machines can connect if they have the token."""
    port: int = Field(8377, ge=0, le=65535)
    """Port to listen at; 0 selects a free port."""
    token: bool = False
    """Also require the token from browsers on this machine."""


def serve_command(args: Sequence[str]) -> None:
    needed = "a folder as its first word, such as: esper serve runs"
    words, config = parse_words(ServeConfig, "esper serve DIR", args, needed=needed)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise EsperError(f"the page needs {names}, not installed here: pip install 'esper[serve]'")
    from esper.karn.serve.access_control import access
    from esper.karn.serve.app import listen, serve
    from esper.karn.serve.folder import RunFolder

    folder = RunFolder(Path(words[0]))
    listener = listen(config.host, config.port)
    entrance = access(config.host, listener.getsockname()[1], ask_for_token=config.token)
    found = "1 run" if len(folder.runs()) == 1 else f"{len(folder.runs())} runs"
    print(f"esper: {found} in {printable(words[0])}, at {entrance.url}  (Ctrl+C ends it)", flush=True)
    try:
        serve(folder, entrance, listener)
    except KeyboardInterrupt:
        print("\nesper: the page is closed; runs go on without it", file=sys.stderr)
