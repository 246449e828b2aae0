import socket
from pathlib import Path

import pytest

from esper.karn.serve.access_control import Access, access
from tests.karn.serving import LOCAL, Client, write_run

OPEN = Access("0.0.0.0", 8377, token="right-token")
BEARER = {"authorization": "Bearer right-token"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine").parent


@pytest.fixture(scope="module")
def local(folder) -> Client:
    return Client(folder)


@pytest.fixture(scope="module")
def opened(folder) -> Client:
    return Client(folder, OPEN)


# --- Host header ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8377", "localhost:8377", "localhost:9000", "[::1]:8377", "LOCALHOST"]
)
def test_server_accepts_a_host_header_with_a_local_name_and_any_port(local, host):
    assert local.ask("/rows", headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8377",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "192.168.1.7:8377",
        "127.0.0.1@evil.example",
        "[::1",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/rows", "/static/page.js", "/events"])
def test_server_rejects_a_host_header_with_a_foreign_name(local, host, path):
    answer = local.ask(path, headers={"host": host})

    assert answer.status == 421
    assert answer.error == (
        f"this server does not answer to the name '{host}'; open it by the address it printed"
    )


@pytest.mark.parametrize("host", ["192.168.1.7:8377", "[fe80::1]:8377", "localhost", socket.gethostname()])
def test_public_server_accepts_ip_addresses_and_the_machine_name_as_host_header(opened, host):
    assert opened.ask("/rows", headers={"host": host, **BEARER}).status == 200


def test_public_server_rejects_foreign_host_headers_even_with_a_valid_token(opened):
    answer = opened.ask("/rows", headers={"host": "evil.example", **BEARER})

    assert answer.status == 421
    assert "default-src 'none'" in answer.headers["content-security-policy"]


# --- methods ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_server_rejects_http_methods_other_than_get_and_head(local, method):
    answer = local.ask("/rows", method)

    assert answer.status == 405
    assert answer.error == f"{method} is not allowed; this server is read, by GET"


# --- response headers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 200), ("/rows", 200), ("/static/page.js", 200), ("/nowhere", 404), ("/runs/x", 404)],
)
def test_every_http_response_has_the_security_headers(local, path, status):
    answer = local.ask(path, headers={"origin": "http://evil.example"})

    assert answer.status == status
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not [name for name in answer.headers if name.startswith("access-control")]


# --- token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/rows", "/static/page.js", "/style.css", "/events"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong-token"},
        {"authorization": "Bearer "},
        {"authorization": "right-token"},
        {"cookie": "esper-8377=wrong-token"},
        {"cookie": "esper-9999=right-token"},
        {"cookie": "esper-8377="},
    ],
)
def test_public_server_rejects_http_requests_without_the_access_token(opened, path, headers):
    answer = opened.ask(path, headers=headers)

    assert answer.status == 403
    assert answer.error == "this server asks for its token; open the whole address that it printed"


@pytest.mark.parametrize("headers", [BEARER, {"cookie": "other=1; esper-8377=right-token"}])
def test_public_server_accepts_the_access_token_as_header_and_as_cookie(opened, headers):
    assert opened.ask("/rows", headers=headers).status == 200


def test_opening_the_printed_address_sets_the_access_token_as_a_cookie(opened):
    answer = opened.ask("/?token=right-token")

    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("esper-8377=right-token;")
    assert "httponly" in cookie.lower()
    assert "samesite=lax" in cookie.lower()


@pytest.mark.parametrize("token", ["wrong-token", "", "right-tokenx", "right-toke", "%C3%A9"])
def test_wrong_access_token_in_the_address_sets_no_cookie(opened, token):
    answer = opened.ask(f"/?token={token}")

    assert answer.status == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("path", ["//evil.example/", "/rows", "/static/page.js"])
def test_access_token_in_the_url_query_is_accepted_only_at_the_root_path(opened, path):
    answer = opened.ask(f"{path}?token=right-token")

    assert answer.status == 403
    assert "location" not in answer.headers


def test_only_a_server_reachable_from_other_machines_needs_an_access_token():
    assert access("127.0.0.1", 8377, ask_for_token=False) == LOCAL
    assert access("localhost", 8377, ask_for_token=False).token is None
    assert access("::1", 8377, ask_for_token=False).url == "http://[::1]:8377/"
    assert access("127.0.0.1", 8377, ask_for_token=True).token is not None
    tokens = {
        access(host, 8377, ask_for_token=False).token for host in ("0.0.0.0", "::", "192.168.1.7", "pc")
    }
    assert len(tokens - {None}) == 4
    assert min(map(len, tokens)) >= 32
