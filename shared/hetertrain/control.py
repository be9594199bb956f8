"""Talks to the control plane over HTTPS: checks whom it talks to, and turns refusals into errors.

The control plane's certificate is signed by the fleet's own authority. Who has a file of that uses
it; who has a claim or a fingerprint fetches the authority's certificate first, and trusts it only
where its SHA-256 is the one expected.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx2

from hetertrain.errors import ControlError, CredentialError, SettingsError
from hetertrain.security import fingerprint

TIMEOUT_SECONDS = 20.0
PREFIX = "/api/v1"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ControlClient:
    """A client of one control plane, for the time of a ``with`` block."""

    def __init__(
        self,
        url: str,
        *,
        authority_pem: str | None = None,
        token: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Trust the authority given, else what the system trusts.

        Raises:
            SettingsError: the address is not https, and not on this machine.
        """
        parts = urlsplit(url)
        is_local = parts.scheme == "http" and parts.hostname in _LOOPBACK
        if parts.hostname is None or not (parts.scheme == "https" or is_local):
            raise SettingsError(f"the control plane's address must be https://HOST, not {url!r}")
        self.url = url.rstrip("/")
        context = ssl.create_default_context(cadata=authority_pem)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx2.Client(
            base_url=self.url, verify=context, headers=headers, timeout=timeout_seconds
        )

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: object) -> Any:
        """Read something.

        Raises:
            ControlError: it was refused, or the control plane cannot be reached.
        """
        return self.ask("GET", path, query=query).json()

    def post(self, path: str, body: object = None) -> Any:
        """Make or order something; see ``get``."""
        response = self.ask("POST", path, body=body)
        return response.json() if response.content else None

    def change(self, method: str, path: str, body: object) -> Any:
        """Change what is at ``path``, as it is right now; see ``get``."""
        etag = self.ask("GET", path).headers["ETag"]
        return self.ask(method, path, body=body, headers={"If-Match": etag}).json()

    def delete(self, path: str) -> None:
        """Delete something; see ``get``."""
        self.ask("DELETE", path)

    def ready(self) -> Any:
        """Return what ``/readyz`` says, ready or not.

        Raises:
            ControlError: the control plane cannot be reached.
        """
        try:
            return self._http.get("/readyz").json()
        except (httpx2.HTTPError, ValueError) as error:
            raise _unreachable(self.url, error) from error

    def download(self, path: str, target: Path) -> int:
        """Write what is at ``path`` into a file, whole or not at all; return its bytes."""
        temporary = target.with_name(f"{target.name}.part")
        try:
            with self._http.stream("GET", PREFIX + path) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                with temporary.open("wb") as file:
                    for piece in response.iter_bytes():
                        file.write(piece)
        except httpx2.HTTPError as error:
            raise _unreachable(self.url, error) from error
        temporary.rename(target)
        return target.stat().st_size

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Send a request; see ``get``."""
        given = {k: v for k, v in (query or {}).items() if v is not None}
        try:
            response = self._http.request(
                method,
                PREFIX + path,
                params={name: str(value) for name, value in given.items()},
                json=body,
                headers=dict(headers or {}),
            )
        except httpx2.HTTPError as error:
            raise _unreachable(self.url, error) from error
        if response.is_error:
            raise _refusal(response)
        return response


def fetch_authority(url: str, expected: str) -> str:
    """Return the PEM certificate of a control plane's authority, whoever answers, if it is the one
    with the ``expected`` SHA-256.

    Raises:
        CredentialError: it is another one: this is not the control plane that was meant.
        ControlError: nobody answers there.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with httpx2.Client(base_url=url, verify=context, timeout=TIMEOUT_SECONDS) as http:
            response = http.get(f"{PREFIX}/authority")
            pem = str(response.raise_for_status().json()["certificate"])
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        raise _unreachable(url, error) from error
    if not hmac.compare_digest(fingerprint(pem).encode(), expected.lower().encode()):
        raise CredentialError(
            f"{url} has another authority than the claim or fingerprint says: check the address"
        )
    return pem


def _unreachable(url: str, error: Exception) -> ControlError:
    return ControlError("control_unreachable", f"{url}: {type(error).__name__}: {error}")


def _refusal(response: httpx2.Response) -> ControlError:
    try:
        problem = response.json()
        return ControlError(str(problem["code"]), str(problem["detail"]))
    except (ValueError, KeyError, TypeError):
        return ControlError(f"http_{response.status_code}", response.text[:200])
