"""The operator's commands: twins of the API, with tables for people and ``--json`` for machines.

``hetertrain login`` keeps the address, the authority and an API token in one file of mode 0600; a
token in ``HETERTRAIN_TOKEN`` and an address in ``HETERTRAIN_CONTROL_URL`` come first.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetertrain.cli import Command
from hetertrain.errors import CredentialError, SettingsError

NEEDS = ("fastapi",)
URL_VARIABLE, TOKEN_VARIABLE = "HETERTRAIN_CONTROL_URL", "HETERTRAIN_TOKEN"  # names
AUTHORITY_VARIABLE = "HETERTRAIN_AUTHORITY_FILE"
NOT_WHOLE = 1
"""Exit code of an audit trail that was altered."""
NOT_READY = 1
"""Exit code of the health check where something is wrong."""
LIST_PAGE = 200
ALL_SCOPES = [
    *(
        f"{kind}:{verb}"
        for kind in ("nodes", "claims", "jobs", "versions", "users")
        for verb in ("read", "write")
    ),
    "audit:read",
    "metrics:read",
]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """A client, and how to answer."""

    client: Any
    arguments: argparse.Namespace

    def rows(self, path: str, columns: tuple[str, ...], **query: object) -> int:
        """Show all of a list."""
        rows = list(self._all(path, query))
        if self.arguments.json:
            _print_json(rows)
        else:
            _print_table(rows, columns)
        return 0

    def _all(self, path: str, query: Row) -> Iterable[Row]:
        cursor, left = None, self.arguments.limit
        while left > 0:
            page = self.client.get(path, cursor=cursor, limit=min(left, LIST_PAGE), **query)
            yield from page["items"]
            left -= len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def one(self, row: Row) -> int:
        """Show one thing."""
        if self.arguments.json:
            _print_json(row)
        else:
            _print_fields(row)
        return 0


def login_file() -> Path:
    """Return where ``login`` keeps what it got."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hetertrain" / "login.toml"


def _connect(arguments: argparse.Namespace) -> Any:
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
    try:
        return Path(file).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {AUTHORITY_VARIABLE}={file}: {error}") from error


def run_login(arguments: argparse.Namespace) -> int:
    """Log in, or make the first admin; keep an API token for the commands that follow."""
    from hetertrain.control import ControlClient, fetch_authority
    from hetertrain.security import write_private

    pem = None
    if arguments.authority_file is not None:
        pem = arguments.authority_file.read_text(encoding="ascii")
    elif arguments.authority_fingerprint is not None:
        pem = fetch_authority(arguments.url, arguments.authority_fingerprint)
    password = _password(arguments.password_file, "Password: ")
    with ControlClient(arguments.url, authority_pem=pem) as client:
        credentials = {"name": arguments.name, "password": password}
        if arguments.bootstrap_file is not None:
            first = arguments.bootstrap_file.read_text(encoding="ascii").strip()
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
        pem = arguments.authority_file.read_text(encoding="ascii")
    with ControlClient(arguments.url, authority_pem=pem) as client:
        ready = client.ready()
    _print_json(ready)
    return 0 if ready["is_ready"] else NOT_READY


def _health_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="the control plane, https://HOST:PORT")
    parser.add_argument("--authority-file", type=Path, help="certificate of its authority")


def _password(file: Path | None, prompt: str) -> str:
    if file is None:
        return getpass.getpass(prompt)
    try:
        return file.read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise SettingsError(f"cannot read the password file: {error}") from error


def _login_arguments(parser: argparse.ArgumentParser) -> None:
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


NODE_COLUMNS = ("name", "role", "state", "labels", "live.is_online", "live.doing", "live.version")
JOB_COLUMNS = ("name", "state", "version", "nodes_online", "newest.metrics", "waiting_for.text")
CLAIM_COLUMNS = ("id", "role", "node", "labels", "uses", "uses_max", "expires_at", "revoked_at")
VERSION_COLUMNS = ("version", "num_updates", "sync", "metrics", "is_kept", "is_promoted")
AUDIT_COLUMNS = ("number", "at", "actor", "action", "kind", "object")
USER_COLUMNS = ("name", "role", "is_active", "locked_until", "created_at")
TOKEN_COLUMNS = ("id", "user", "label", "scopes", "expires_at", "revoked_at")

Run = Callable[[Operator, argparse.Namespace], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]


def _argument(*names: str, **options: Any) -> Argument:
    return names, options


NAME = _argument("name", help="its name")
LABELS = _argument("--label", action="append", default=[], metavar="KEY=VALUE", help="a label")


def _pairs(texts: list[str]) -> dict[str, str]:
    if not all("=" in text for text in texts):
        raise SettingsError(f"a label is KEY=VALUE, got {' '.join(texts)}")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def _list_nodes(op: Operator, a: argparse.Namespace) -> int:
    return op.rows("/nodes", NODE_COLUMNS, state=a.state, role=a.role, label=a.label)


def _change_labels(op: Operator, a: argparse.Namespace) -> int:
    return op.one(op.client.change("PATCH", f"/nodes/{a.name}", {"labels": _pairs(a.label)}))


def _show(kind: str) -> Run:
    return lambda op, a: op.one(op.client.get(f"/{kind}/{a.name}"))


def _post(kind: str, action: str) -> Run:
    return lambda op, a: op.one(op.client.post(f"/{kind}/{a.name}/{action}"))


def _create_claim(op: Operator, a: argparse.Namespace) -> int:
    body = {
        "role": a.role,
        "node": a.node,
        "labels": _pairs(a.label),
        "uses": a.uses,
        "needs_approval": a.approval,
        "hours": a.hours,
    }
    made = op.client.post("/claims", body)
    if op.arguments.json:
        _print_json(made)
    else:
        sys.stderr.write("shown this once; give it to the node:\n")
        sys.stdout.write(made["secret"] + "\n")
    return 0


def _revoke_claim(op: Operator, a: argparse.Namespace) -> int:
    op.client.delete(f"/claims/{a.name}")
    return 0


def _read_options(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read {file}: {error}") from error


def _create_job(op: Operator, a: argparse.Namespace) -> int:
    body = {"name": a.name, "specification": _read_options(a.file)}
    job = op.client.post("/jobs", body)
    if a.start:
        job = op.client.post(f"/jobs/{a.name}/start")
    return op.one(job)


def _change_job(op: Operator, a: argparse.Namespace) -> int:
    return op.one(op.client.change("PUT", f"/jobs/{a.name}", _read_options(a.file)))


def _list_versions(op: Operator, a: argparse.Namespace) -> int:
    return op.rows(f"/jobs/{a.job}/versions", VERSION_COLUMNS)


def _show_version(op: Operator, a: argparse.Namespace) -> int:
    return op.one(op.client.get(f"/jobs/{a.job}/versions/{a.version}"))


def _order_version(action: str) -> Run:
    return lambda op, a: op.one(op.client.post(f"/jobs/{a.job}/versions/{a.version}/{action}"))


def _download(op: Operator, a: argparse.Namespace) -> int:
    num_bytes = op.client.download(f"/jobs/{a.job}/versions/{a.version}/model", a.to)
    return op.one({"file": str(a.to), "bytes": num_bytes})


def _list_audit(op: Operator, a: argparse.Namespace) -> int:
    return op.rows("/audit", AUDIT_COLUMNS, kind=a.kind, object=a.object)


def _verify(op: Operator, _a: argparse.Namespace) -> int:
    found = op.client.get("/audit/verification")
    op.one(found)
    return 0 if found["broken_at"] is None else NOT_WHOLE


def _create_user(op: Operator, a: argparse.Namespace) -> int:
    password = _password(a.password_file, f"Password of {a.name}: ")
    body = {"name": a.name, "password": password, "role": a.role}
    return op.one(op.client.post("/users", body))


def _change_user(op: Operator, a: argparse.Namespace) -> int:
    body: Row = {} if a.role is None else {"role": a.role}
    body |= {} if a.active is None else {"is_active": a.active}
    if a.password_file is not None:
        body["password"] = _password(a.password_file, "")
    return op.one(op.client.change("PATCH", f"/users/{a.name}", body))


def _create_token(op: Operator, a: argparse.Namespace) -> int:
    body = {"label": a.name, "scopes": a.scope, "days": a.days}
    made = op.client.post("/tokens", body)
    if op.arguments.json:
        _print_json(made)
    else:
        sys.stderr.write("shown this once:\n")
        sys.stdout.write(made["secret"] + "\n")
    return 0


def _revoke_token(op: Operator, a: argparse.Namespace) -> int:
    op.client.delete(f"/tokens/{a.name}")
    return 0


def _rows(path: str, columns: tuple[str, ...]) -> Run:
    return lambda op, _: op.rows(path, columns)


ROLES = ("viewer", "operator", "admin")
JOB = _argument("job", help="the job's name")
VERSION = _argument("version", type=int, help="the version")
PASSWORD_FILE = _argument("--password-file", type=Path, help="read the password there")


def _command(name: str, text: str, run: Run, *arguments: Argument) -> Command:
    def add(parser: argparse.ArgumentParser) -> None:
        for names, options in arguments:
            parser.add_argument(*names, **options)
        parser.add_argument("--url", help=f"the control plane (else {URL_VARIABLE}, else login)")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument("--limit", type=int, default=1000, help="list so many at most (1000)")

    def main(namespace: argparse.Namespace) -> int:
        with _connect(namespace) as client:
            return run(Operator(client, namespace), namespace)

    return Command(name=name, help=text, run=main, add_arguments=add)


COMMANDS = (
    Command(
        name="login",
        help="log in at a control plane, or make its first admin",
        run=run_login,
        add_arguments=_login_arguments,
    ),
    Command(
        name="health",
        help="say whether a control plane is ready",
        run=run_health,
        add_arguments=_health_arguments,
    ),
    _command(
        "node list",
        "list nodes",
        _list_nodes,
        _argument("--state", choices=("pending", "active", "revoked", "decommissioned")),
        _argument("--role", choices=("vehicle", "edge")),
        _argument("--label", metavar="KEY=VALUE", help="only with this label"),
    ),
    _command("node show", "show a node", _show("nodes"), NAME),
    _command("node label", "give a node other labels", _change_labels, NAME, LABELS),
    _command("node approve", "let a pending node in", _post("nodes", "approve"), NAME),
    _command("node revoke", "take all rights from a node now", _post("nodes", "revoke"), NAME),
    _command("node decommission", "take a node out", _post("nodes", "decommission"), NAME),
    _command("claim list", "list claims", _rows("/claims", CLAIM_COLUMNS)),
    _command(
        "claim create",
        "make the right to enrol nodes",
        _create_claim,
        _argument("--role", choices=("vehicle", "edge"), default="vehicle"),
        _argument("--node", help="for this node only; it may have been enrolled before"),
        LABELS,
        _argument("--uses", type=int, default=1, help="for so many nodes (1)"),
        _argument("--approval", action="store_true", help="each waits to be approved"),
        _argument("--hours", type=int, default=24, help="valid for so long (24)"),
    ),
    _command("claim revoke", "let nobody use a claim any more", _revoke_claim, NAME),
    _command("job list", "list jobs", _rows("/jobs", JOB_COLUMNS)),
    _command("job status", "show a job and what it waits for", _show("jobs"), NAME),
    _command(
        "job create",
        "add a job from a file of its options",
        _create_job,
        NAME,
        _argument("file", type=Path, help="TOML or JSON"),
        _argument("--start", action="store_true", help="start it too"),
    ),
    _command(
        "job change",
        "give a job other options, from its next start on",
        _change_job,
        NAME,
        _argument("file", type=Path, help="TOML or JSON"),
    ),
    _command("job start", "start a job or go on with it", _post("jobs", "start"), NAME),
    _command("job pause", "pause a job", _post("jobs", "pause"), NAME),
    _command("job stop", "stop a job", _post("jobs", "stop"), NAME),
    _command("version list", "list a job's versions", _list_versions, JOB),
    _command("version show", "show a version", _show_version, JOB, VERSION),
    _command("version promote", "keep a version", _order_version("promote"), JOB, VERSION),
    _command("version rollback", "go back to it", _order_version("rollback"), JOB, VERSION),
    _command(
        "version download",
        "download a version's model (safetensors)",
        _download,
        JOB,
        VERSION,
        _argument("to", type=Path, help="the file to write"),
    ),
    _command(
        "audit list",
        "list changes, newest first",
        _list_audit,
        _argument("--kind", help="only of things of this kind"),
        _argument("--object", help="only of the thing of this name"),
    ),
    _command("audit verify", "check that no entry was altered", _verify),
    _command("user list", "list users", _rows("/users", USER_COLUMNS)),
    _command(
        "user create",
        "add a user",
        _create_user,
        NAME,
        _argument("--role", choices=ROLES, required=True),
        PASSWORD_FILE,
    ),
    _command(
        "user change",
        "change a user",
        _change_user,
        NAME,
        _argument("--role", choices=ROLES),
        _argument("--active", action=argparse.BooleanOptionalAction, default=None),
        PASSWORD_FILE,
    ),
    _command("token list", "list API tokens", _rows("/tokens", TOKEN_COLUMNS)),
    _command(
        "token create",
        "make an API token",
        _create_token,
        _argument("name", help="what it is for"),
        _argument("--scope", action="append", required=True, choices=ALL_SCOPES),
        _argument("--days", type=int, default=90, help="valid for so long (90)"),
    ),
    _command("token revoke", "revoke an API token", _revoke_token, NAME),
)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _print_table(rows: list[Row], columns: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column.rpartition(".")[2].replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(escape(_text(_field(row, column))) for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table if rows else "nothing there yet")


def _print_fields(row: Row) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in row.items():
        table.add_row(name.replace("_", " "), escape(_text(value)))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _field(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{key}={_text(each)}" for key, each in value.items())
        case list():
            return ", ".join(_text(each) for each in value[:20])
        case _:
            return str(value)
