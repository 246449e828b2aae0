import re
import socket

import pytest

from esper.leyline.errors import EsperError
from esper.scripts.serve_command import serve_command


def test_error_of_esper_serve_without_its_dependencies_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("esper.scripts.serve_command.find_spec", lambda name: None)

    with pytest.raises(EsperError, match=r"needs starlette and uvicorn, .*: pip install 'esper\[serve\]'"):
        serve_command([str(tmp_path)])


@pytest.mark.parametrize("words", [[], ["--port", "0"]])
def test_esper_serve_without_a_folder_argument_is_refused(words):
    with pytest.raises(EsperError, match="esper serve needs a folder as its first word"):
        serve_command(words)


def test_esper_serve_of_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(EsperError, match=r"there is no folder '.*nowhere'"):
        serve_command([str(tmp_path / "nowhere"), "--port", "0"])


def test_esper_serve_on_a_port_in_use_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(EsperError, match=f"cannot listen at 127.0.0.1, port {port}: .*in use"):
            serve_command([str(tmp_path), "--port", str(port)])


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1"])
def test_esper_serve_on_an_address_of_another_machine_is_refused(tmp_path, host):
    with pytest.raises(EsperError, match=f"cannot listen at {host}, port 0: "):
        serve_command([str(tmp_path), "--host", host, "--port", "0"])


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--port", "0"], r"0 runs in .*, at http://127\.0\.0\.1:\d+/  "),
        (["--port", "0", "--token"], r"at http://127\.0\.0\.1:\d+/\?token=\S{32}  "),
        (["--port", "0", "--host", "0.0.0.0"], r"at http://localhost:\d+/\?token=\S{32}  "),
    ],
)
def test_esper_serve_prints_its_address_before_the_server_starts(tmp_path, monkeypatch, capsys, flags, shown):
    monkeypatch.setattr("esper.karn.serve.app.serve", lambda folder, access, listener: listener.close())

    serve_command([str(tmp_path), *flags])

    assert re.search(shown, capsys.readouterr().out)
