"""``hetertrain login``: keeps the control plane's address, its authority and an API token in one
file of mode 0600, for the operator's commands; what the environment says comes first.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from hetertrain.config import read_text
from hetertrain.errors import CredentialError, SettingsError
from hetertrain_cloud.control.printing import print_json

URL_VARIABLE, TOKEN_VARIABLE = "HETERTRAIN_CONTROL_URL", "HETERTRAIN_TOKEN"  # names
AUTHORITY_VARIABLE = "HETERTRAIN_AUTHORITY_FILE"
NOT_READY = 1
"""Exit code of the health check where something is wrong."""


def login_file() -> Path:
    """Return where ``login`` keeps what it got."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hetertrain" / "login.toml"


def connect(arguments: argparse.Namespace) -> Any:
    """Return a client of the control plane that is logged in at, or named by the environment.

    Raises:
        CredentialError: there is neither.
        SettingsError: what was kept cannot be read.
    """
    from hetertrain.control import ControlClient

    path, kept = login_file(), {}
    if path.exists():
        try:
            kept = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"cannot read {path}: {error}; log in again") from error
    url = arguments.url or os.environ.get(URL_VARIABLE) or kept.get("url")
    token = os.environ.get(TOKEN_VARIABLE) or kept.get("token")
    if not url or not token:
        raise CredentialError(
            "log in first: hetertrain login --url https://HOST:8443 --name NAME; or set "
            f"{URL_VARIABLE} and {TOKEN_VARIABLE}"
        )
    return ControlClient(url, authority_pem=_authority(kept.get("authority")), token=token)


def _authority(kept: str | None) -> str | None:
    file = os.environ.get(AUTHORITY_VARIABLE)
    if file is None:
        return kept
    return read_text(Path(file), AUTHORITY_VARIABLE)


def run_login(arguments: argparse.Namespace) -> int:
    """Log in, or make the first admin; keep an API token for the commands that follow."""
    from hetertrain.control import ControlClient, fetch_authority
    from hetertrain.security import write_private

    pem = None
    if arguments.authority_file is not None:
        pem = read_text(arguments.authority_file, "the authority's certificate")
    elif arguments.authority_fingerprint is not None:
        pem = fetch_authority(arguments.url, arguments.authority_fingerprint)
    password = read_password(arguments.password_file, "Password: ")
    with ControlClient(arguments.url, authority_pem=pem) as client:
        credentials = {"name": arguments.name, "password": password}
        if arguments.bootstrap_file is not None:
            first = read_text(arguments.bootstrap_file, "the one-time token").strip()
            client.post("/bootstrap", credentials | {"token": first})
        session = client.ask("POST", "/sessions", body=credentials)
        csrf = {"X-CSRF-Token": session.json()["csrf_token"]}
        rights = client.get("/me")["rights"]
        body = {"label": f"login of {arguments.name}", "scopes": rights, "days": arguments.days}
        token = client.ask("POST", "/tokens", body=body, headers=csrf).json()["secret"]
        client.ask("DELETE", "/sessions/current", headers=csrf)
    kept = {"url": arguments.url, "token": token} | ({} if pem is None else {"authority": pem})
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in kept.items()]
    write_private(login_file(), "".join(lines).encode())
    sys.stderr.write(f"logged in as {arguments.name}; kept in {login_file()}\n")
    return 0


def run_health(arguments: argparse.Namespace) -> int:
    """Say whether a control plane is ready; exit code 0: yes."""
    from hetertrain.control import ControlClient

    pem = None
    if arguments.authority_file is not None:
        pem = read_text(arguments.authority_file, "the authority's certificate")
    with ControlClient(arguments.url, authority_pem=pem) as client:
        ready = client.ready()
    print_json(ready)
    return 0 if ready["is_ready"] else NOT_READY


def add_health_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the health check."""
    parser.add_argument("--url", required=True, help="the control plane, https://HOST:PORT")
    parser.add_argument("--authority-file", type=Path, help="certificate of its authority")


def read_password(file: Path | None, prompt: str) -> str:
    """Read a password from a file, else ask for it."""
    if file is None:
        return getpass.getpass(prompt)
    return read_text(file, "the password").rstrip("\n")


def add_login_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a login."""
    parser.add_argument("--url", required=True, help="the control plane, https://HOST:PORT")
    parser.add_argument("--name", required=True, help="the user's name")
    parser.add_argument("--password-file", type=Path, help="read the password there, do not ask")
    parser.add_argument(
        "--bootstrap-file", type=Path, help="make the first admin, with the token in this file"
    )
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument("--authority-file", type=Path, help="certificate of the fleet's authority")
    trust.add_argument("--authority-fingerprint", help="its SHA-256, hexadecimal")
    parser.add_argument("--days", type=int, default=30, help="stay logged in for so long (30)")
