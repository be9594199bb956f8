"""NiceGUI's application under the control plane's, behind the gate."""

from __future__ import annotations

from fastapi import FastAPI, Request
from nicegui import app as pages
from nicegui import ui
from starlette.middleware.gzip import GZipMiddleware

from hetertrain_cloud.console import screens
from hetertrain_cloud.console.client import ApiClient
from hetertrain_cloud.console.gate import MOUNT, STATIC, Gate, session_of
from hetertrain_cloud.console.view import register
from hetertrain_cloud.control.operators import by_session

RECONNECT_SECONDS = 30.0
"""A page whose connection comes back within so long goes on as it was."""


def mount_console(app: FastAPI) -> None:
    """Serve the console at ``/console`` of an API's application; once in a process."""
    plane = app.state.plane

    def has_session(secret: str) -> bool:
        if not secret:
            return False
        with plane.database.read() as transaction:
            return by_session(transaction, secret, plane.now()) is not None

    def has_admin() -> bool:
        return plane.bootstrap_token() is None

    def client_of(request: Request) -> ApiClient:
        address = request.client.host if request.client else "unknown"
        return ApiClient(app, session_of(request.headers), address)

    for screen in screens.ALL:
        register(screen, client_of, screens.ALL)
    # No bar at the top whenever the browser asks for a file: screens say themselves how they are.
    pages.config.quasar_config["loadingBar"]["skipHijack"] = True
    pages.add_static_files("/static", STATIC, max_cache_age=0)
    ui.run_with(
        app,
        mount_path=MOUNT,
        title="Heter-Train",
        favicon=STATIC / "mark.svg",
        language="en-US",
        reconnect_timeout=RECONNECT_SECONDS,
        gzip_middleware_factory=None,
        tailwind=False,
        show_welcome_message=False,
        binding_refresh_interval=None,
    )
    app.add_middleware(Gate, has_session=has_session, has_admin=has_admin)
    app.add_middleware(GZipMiddleware, minimum_size=1024)
