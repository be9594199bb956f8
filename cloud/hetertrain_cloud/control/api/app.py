"""The FastAPI application: its parts, and what holds for every request."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from sqlalchemy.exc import IntegrityError, OperationalError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetertrain import __version__
from hetertrain.errors import StoreError
from hetertrain.logging import get_logger
from hetertrain_cloud.control.api import (
    accounts,
    actions,
    attention,
    configuration,
    enrolment,
    filters,
    fleet,
    gateways,
    logs,
    nodes,
    quarantine,
    versions,
    watch,
    work,
)
from hetertrain_cloud.control.api.convention import (
    PROBLEM_TYPE,
    Invalid,
    Limiter,
    Problem,
    problem_response,
)
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import ProblemError

PARTS = (
    accounts,
    filters,
    enrolment,
    nodes,
    actions,
    fleet,
    gateways,
    logs,
    work,
    versions,
    quarantine,
    attention,
    configuration,
    watch,
)
BODY_BYTES_MAX = 64 << 10
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Strict-Transport-Security": "max-age=31536000",
}
DESCRIPTION = """Who is in the fleet, what it works on, and what became of it.

Everything under `/api/v1` needs a credential but enrolment, renewal, login and the authority's
certificate. Refusals are `application/problem+json` with a stable `code`."""


def build_app(plane: ControlPlane) -> FastAPI:
    """Build the application of a control plane."""
    app = FastAPI(
        title="Heter-Train control plane",
        version=__version__,
        description=DESCRIPTION,
        # The framework's own pages load scripts from elsewhere, which a closed network has not.
        docs_url=None,
        redoc_url=None,
    )
    app.state.plane = plane
    app.state.limiter = Limiter()
    for part in PARTS:
        app.include_router(part.router)
    app.add_middleware(_Guard)
    app.add_exception_handler(ProblemError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(OperationalError, _unavailable)
    app.add_exception_handler(StoreError, _unavailable)
    app.add_exception_handler(IntegrityError, _raced)
    _describe(app)
    return app


class _Guard:
    """Limits the size of a body as it comes in, and adds the headers that every answer has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            # As if the client had gone: whoever reads the body gives up.
            return message if num_bytes <= BODY_BYTES_MAX else {"type": "http.disconnect"}

        async def headed(message: Message) -> None:
            if num_bytes > BODY_BYTES_MAX:
                return  # What the handler answers is about a body that it did not get.
            await answer(message)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(n.lower().encode(), value.encode()) for n, value in HEADERS.items()]
                names = {name.lower() for name, _ in message["headers"]}
                if b"cache-control" not in names:
                    headers.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, limited, headed)
        if num_bytes > BODY_BYTES_MAX:
            too_large = ProblemError(413, "body_too_large", f"at most {BODY_BYTES_MAX} bytes")
            await problem_response(too_large)(scope, receive, answer)


def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError), "registered for it"
    return problem_response(error)


def _malformed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for it"
    errors = [
        Invalid(where=".".join(map(str, each["loc"])), message=each["msg"])
        for each in error.errors()[:20]
    ]
    text = "; ".join(f"{each.where}: {each.message}" for each in errors[:3])
    return problem_response(ProblemError(422, "request_invalid", text), errors)


def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    if error.status_code == 400:  # The framework could not even decode the body.
        return problem_response(ProblemError(422, "request_invalid", str(error.detail)))
    codes = {404: "path_unknown", 405: "method_unknown"}
    code = codes.get(error.status_code, "request_refused")
    response = problem_response(ProblemError(error.status_code, code, str(error.detail)))
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """Return what a path can be asked for; the framework names the first handler's only."""
    routes = [route for part in PARTS for route in part.router.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in route.methods or ()}


def _unavailable(_request: Request, error: Exception) -> Response:
    get_logger().error("request_failed", error=str(error))
    text = "the database or the disk cannot be used right now: see the server's log"
    return problem_response(ProblemError(503, "store_unavailable", text, 5))


def _raced(_request: Request, _error: Exception) -> Response:
    text = "somebody else did the same at this moment: read it, and ask again if need be"
    return problem_response(ProblemError(409, "changed_meanwhile", text))


def _describe(app: FastAPI) -> None:
    """Describe problems as what they are, in place of the framework's own form."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = schema["components"]["schemas"]
            reference = "#/components/schemas/{model}"
            problem = Problem.model_json_schema(ref_template=reference)
            schemas |= problem.pop("$defs") | {"Problem": problem}
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            content = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
            for path in schema["paths"].values():
                for operation in path.values():
                    if "422" in operation["responses"]:
                        malformed = {"description": "malformed", "content": content}
                        operation["responses"]["422"] = malformed
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]  # how the framework is told
