"""The gate before the console: who has no session gets the login page, and no page may run or load
anything but our own files.

NiceGUI's pages are made for a browser that evaluates what the server sends. Ours need that not, so
the policy of each page (CSP level 3) allows scripts by a nonce that is new each time, and nothing
to be evaluated.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetertrain_cloud.control.api.convention import SESSION_COOKIE

MOUNT = "/console"
LOGIN = f"{MOUNT}/login"
STATIC = Path(__file__).parent / "static"
OPEN_FILES = ("console.css", "login.js", "mark.svg")
"""What the login page needs; all else is for those who are in."""
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'nonce-{nonce}'",
        # Vue sets styles of elements, and NiceGUI's page has style blocks without a nonce.
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)


class Gate:
    """Lets into the console who has a session, and guards its pages; passes on all else."""

    def __init__(
        self, app: ASGIApp, has_session: Callable[[str], bool], has_admin: Callable[[], bool]
    ) -> None:
        """``has_session`` tells whether a cookie's secret is that of a session; ``has_admin``,
        whether the first admin is made, which the API tells whoever tries to make another.
        """
        self._app = app
        self._has_session = has_session
        self._has_admin = has_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request or a socket."""
        path = scope.get("path", "")
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif path == "/" and scope["type"] == "http":
            await RedirectResponse(f"{MOUNT}/")(scope, receive, send)
        elif path != MOUNT and not path.startswith(f"{MOUNT}/"):
            await self._app(scope, receive, send)
        else:
            await self._guard(path, scope, receive, send)

    async def _guard(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["type"] == "http" and path == LOGIN:
            page = login_page(has_admin=await run_in_threadpool(self._has_admin))
            await HTMLResponse(page)(scope, receive, _page_sender(send))
        elif scope["type"] == "http" and (found := _open_file(path)) is not None:
            await FileResponse(found)(scope, receive, _page_sender(send))
        elif not _is_same_origin(headers):
            await _refuse(scope, receive, send, 403, "the request comes from another site")
        elif await run_in_threadpool(self._has_session, session_of(headers)):
            await self._app(scope, receive, _page_sender(send))
        elif scope["type"] == "http" and "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            wanted = quote(path + (f"?{query}" if query else ""))
            await RedirectResponse(f"{LOGIN}?next={wanted}", 303)(scope, receive, send)
        else:
            await _refuse(scope, receive, send, 401, f"log in at {LOGIN}")


def session_of(headers: Headers) -> str:
    """Return the session's secret in a request's cookies; empty: none."""
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    found = cookies.get(SESSION_COOKIE)
    return found.value if found else ""


def login_page(*, has_admin: bool) -> str:
    """Return the page to log in, with the way to make the first admin while there is none."""
    page = (STATIC / "login.html").read_text(encoding="utf-8")
    return re.sub(r"<details>.*</details>", "", page, flags=re.DOTALL) if has_admin else page


def _open_file(path: str) -> Path | None:
    name = path.removeprefix(f"{MOUNT}/static/")
    return STATIC / name if name in OPEN_FILES and name != path else None


def _is_same_origin(headers: Headers) -> bool:
    """Browsers name the origin of each request that could change anything, sockets included."""
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 4000 + status, "reason": text})
        return
    await PlainTextResponse(text, status)(scope, receive, send)


def _page_sender(send: Send) -> Send:
    """Send a page with its policy, and its scripts with the nonce that the policy allows."""
    nonce = secrets.token_urlsafe(16)
    start: Message | None = None
    body = bytearray()

    async def sender(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Content-Security-Policy"] = _POLICY.format(nonce=nonce)
            if headers.get("content-type", "").startswith("text/html"):
                start = message
                return
        elif message["type"] == "http.response.body" and start is not None:
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            # What people named things stands in the page with its brackets escaped.
            page = bytes(body).replace(b"<script", b'<script nonce="%s"' % nonce.encode())
            MutableHeaders(scope=start)["Content-Length"] = str(len(page))
            await send(start)
            message = {"type": "http.response.body", "body": page}
        await send(message)

    return sender
