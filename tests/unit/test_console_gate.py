"""The gate before the console: who gets in, from where, and what a page may run."""

from __future__ import annotations

import re

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from hetertrain_cloud.console.gate import Gate
from hetertrain_cloud.control.api.convention import SESSION_COOKIE

BROWSER = {"accept": "text/html,*/*"}


def page(_request: Request) -> HTMLResponse:
    return HTMLResponse(
        "<html><script>one()</script><p>&lt;script&gt;</p><script src='x'></script></html>"
    )


async def socket(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.close()


def made(*, has_admin: bool = True) -> TestClient:
    app = Starlette(
        routes=[
            Route("/api/v1/nodes", lambda _request: PlainTextResponse("nodes")),
            Route("/console/fleet", page),
            WebSocketRoute("/console/socket", socket),
        ]
    )
    gate = Gate(app, has_session=lambda secret: secret == "good", has_admin=lambda: has_admin)
    return TestClient(gate, base_url="https://console.test", follow_redirects=False)


@pytest.fixture
def client() -> TestClient:
    return made()


def logged_in(client: TestClient) -> TestClient:
    client.cookies.set(SESSION_COOKIE, "good")
    return client


def test_who_has_no_session_is_sent_to_log_in_and_back_to_what_they_wanted(
    client: TestClient,
) -> None:
    client.cookies.set(SESSION_COOKIE, "bad")
    answer = client.get("/console/fleet?tier=t1", headers=BROWSER)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/console/login?next=/console/fleet%3Ftier%3Dt1"
    assert client.get("/console/fleet").status_code == 401, "a program is not redirected"


def test_the_login_page_and_its_files_are_for_everybody_and_nothing_else_is(
    client: TestClient,
) -> None:
    assert "<form" in client.get("/console/login").text
    for name in ("console.css", "login.js", "mark.svg"):
        assert client.get(f"/console/static/{name}").status_code == 200
    for name in ("data_table.js", "../gate.py", "login.html"):
        assert client.get(f"/console/static/{name}").status_code == 401


def test_the_first_admin_is_offered_to_be_made_only_while_there_is_none() -> None:
    before, after = (made(has_admin=has).get("/console/login").text for has in (False, True))
    assert "Create the first admin" in before
    assert "first admin" not in after
    for page_shown in (before, after):
        assert 'aria-label="Log in"' in page_shown
        assert page_shown.rstrip().endswith("</html>")


def test_another_site_cannot_use_a_session(client: TestClient) -> None:
    elsewhere = {"origin": "https://evil.test"}
    assert logged_in(client).get("/console/fleet", headers=elsewhere).status_code == 403
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        client.websocket_connect("/console/socket", headers=elsewhere),
    ):
        pass
    assert refused.value.code == 4403


def test_a_socket_needs_a_session(client: TestClient) -> None:
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        client.websocket_connect("/console/socket"),
    ):
        pass
    assert refused.value.code == 4401
    ours = {"origin": "https://console.test"}
    with logged_in(client).websocket_connect(
        "wss://console.test/console/socket", headers=ours
    ) as ended:
        assert ended.receive()["type"] == "websocket.close"


def test_a_page_runs_its_own_scripts_and_nothing_that_was_evaluated(client: TestClient) -> None:
    answers = [logged_in(client).get("/console/fleet") for _ in range(2)]
    nonces = set()
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        scripts = re.search(r"script-src ([^;]*)", policy)
        assert scripts is not None
        assert "unsafe" not in scripts[1]
        found = re.findall(r'<script nonce="([^"]+)"', answer.text)
        assert len(found) == answer.text.count("<script") == 2
        assert {f"'nonce-{nonce}'" for nonce in found} <= set(scripts[1].split())
        assert "&lt;script&gt;" in answer.text, "what people wrote stays text"
        nonces |= set(found)
    assert len(nonces) == 2, "a nonce is used once"


def test_what_is_not_the_consoles_passes(client: TestClient) -> None:
    answer = client.get("/api/v1/nodes", headers={"origin": "https://elsewhere.test"})
    assert answer.text == "nodes"
    assert "content-security-policy" not in answer.headers
    assert client.get("/").headers["location"] == "/console/"
