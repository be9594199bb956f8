"""Calls of the API in the name of whoever looks at a page: the same application, in process."""

from __future__ import annotations

from typing import Any

import httpx2
from fastapi import FastAPI

from hetertrain_cloud.control.api.convention import SESSION_COOKIE

TIMEOUT_SECONDS = 10.0


class ProblemAnswer(Exception):  # noqa: N818  # what the API calls it
    """The API refused."""

    def __init__(
        self, status: int, code: str, detail: str, errors: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """``errors`` are (where, message) of what is wrong in a malformed request."""
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = errors


class ApiClient:
    """Calls the API with one session."""

    def __init__(self, app: FastAPI, session: str, address: str) -> None:
        """``address`` is the browser's, for limits on how often it may call."""
        transport = httpx2.ASGITransport(app=app, client=(address, 0), raise_app_exceptions=False)
        self._http = httpx2.AsyncClient(
            transport=transport,
            base_url="https://console/api/v1",
            cookies={SESSION_COOKIE: session},
            timeout=TIMEOUT_SECONDS,
        )
        self._csrf_token = ""

    async def me(self) -> dict[str, Any]:
        """Return who calls, and keep what changes need."""
        me: dict[str, Any] = await self.get("/me")
        self._csrf_token = me["csrf_token"] or ""
        return me

    async def get(self, path: str, **query: object) -> Any:
        """Ask for something; what is None or empty in ``query`` is left out.

        Raises:
            ProblemAnswer: the API refused.
        """
        given = {name: _text(value) for name, value in query.items() if value not in (None, "")}
        return _answer(await self._http.get(path, params=given))

    async def has(self, path: str) -> bool:
        """Tell whether there is a file, and have it made ready, without its content.

        Raises:
            ProblemAnswer: the API refused.
        """
        response = await self._http.head(path)
        if response.status_code != httpx2.codes.NOT_FOUND:
            _answer(response)
        return response.is_success

    async def send(
        self, method: str, path: str, body: object = None, *, if_match: str | int | None = None
    ) -> Any:
        """Change something; ``if_match`` is the revision that was read.

        Raises:
            ProblemAnswer: the API refused.
        """
        headers = {"X-CSRF-Token": self._csrf_token}
        if if_match is not None:
            headers["If-Match"] = f'"{if_match}"'
        return _answer(await self._http.request(method, path, json=body, headers=headers))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _answer(response: httpx2.Response) -> Any:
    if response.is_success:
        return response.json() if response.content else None
    try:
        problem = response.json()
        code, detail = str(problem["code"]), str(problem["detail"])
        errors = tuple((str(e["where"]), str(e["message"])) for e in problem.get("errors", ()))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"the control plane failed ({response.status_code})"
        raise ProblemAnswer(response.status_code, "unexpected", text) from None
    raise ProblemAnswer(response.status_code, code, detail, errors)
