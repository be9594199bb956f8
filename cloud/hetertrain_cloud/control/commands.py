"""The operator's commands: twins of the API, with tables for people and ``--json`` for machines."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetertrain.cli import Command
from hetertrain.errors import SettingsError
from hetertrain_cloud.control.login import (
    URL_VARIABLE,
    add_health_arguments,
    add_login_arguments,
    connect,
    read_password,
    run_health,
    run_login,
)
from hetertrain_cloud.control.printing import Row, print_fields, print_json, print_table

NEEDS = ("fastapi",)
NOT_WHOLE = 1
"""Exit code of an audit trail that was altered."""
LIST_PAGE = 200
SORT_KEYS = ("name", "version", "updates", "bytes_up", "seen")


@dataclass(frozen=True, slots=True)
class Operator:
    """A client, and how to answer."""

    client: Any
    arguments: argparse.Namespace

    def rows(self, path: str, columns: tuple[str, ...], **query: object) -> int:
        """Show all of a list."""
        rows = list(self._all(path, query))
        if self.arguments.json:
            print_json(rows)
        else:
            print_table(rows, columns)
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
            print_json(row)
        else:
            print_fields(row)
        return 0


NODE_COLUMNS = ("name", "role", "state", "labels", "live.is_online", "live.doing", "live.version")
GATEWAY_COLUMNS = (
    *("name", "is_online", "job", "doing", "members", "has_own_broker", "version", "local"),
    *("backlog_updates", "waiting_for"),
)
JOB_COLUMNS = (
    *("name", "state", "version", "versions_per_hour", "nodes_online"),
    *("newest.metrics", "waiting_for.text"),
)
CLAIM_COLUMNS = ("id", "role", "node", "labels", "uses", "uses_max", "expires_at", "revoked_at")
VERSION_COLUMNS = (
    *("version", "at", "seconds", "num_updates", "num_nodes", "sync", "metrics"),
    *("is_kept", "is_promoted"),
)
REFUSAL_COLUMNS = ("at", "count", "node", "seq", "base_version", "reason", "detail")
ALERT_COLUMNS = ("severity", "code", "text", "advice", "since")
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
    asked = {"state": a.state, "role": a.role, "label": a.label, "cell": a.cell}
    order = {"sort": a.sort, "descending": a.descending}
    return op.rows("/nodes", NODE_COLUMNS, **asked, **order)


def _read_log(op: Operator, a: argparse.Namespace) -> int:
    found = op.client.get(f"/nodes/{a.name}/log")
    if op.arguments.json:
        print_json(found)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in found["lines"]))
    return 0


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
        print_json(made)
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
    times = {"since": a.since, "until": a.until}
    return op.rows("/audit", AUDIT_COLUMNS, kind=a.kind, object=a.object, actor=a.actor, **times)


def _list_alerts(op: Operator, _a: argparse.Namespace) -> int:
    found = op.client.get("/alerts")
    if op.arguments.json:
        print_json(found)
    else:
        print_table(found["items"], ALERT_COLUMNS, "all is well")
    return 0


def _list_refusals(op: Operator, a: argparse.Namespace) -> int:
    path = f"/jobs/{a.job}/refusals"
    return op.rows(path, REFUSAL_COLUMNS, node=a.node, reason=a.reason)


def _verify(op: Operator, _a: argparse.Namespace) -> int:
    found = op.client.get("/audit/verification")
    op.one(found)
    return 0 if found["broken_at"] is None else NOT_WHOLE


def _create_user(op: Operator, a: argparse.Namespace) -> int:
    password = read_password(a.password_file, f"Password of {a.name}: ")
    body = {"name": a.name, "password": password, "role": a.role}
    return op.one(op.client.post("/users", body))


def _change_user(op: Operator, a: argparse.Namespace) -> int:
    body: Row = {} if a.role is None else {"role": a.role}
    body |= {} if a.active is None else {"is_active": a.active}
    if a.password_file is not None:
        body["password"] = read_password(a.password_file, "")
    return op.one(op.client.change("PATCH", f"/users/{a.name}", body))


def _create_token(op: Operator, a: argparse.Namespace) -> int:
    body = {"label": a.name, "scopes": a.scope, "days": a.days}
    made = op.client.post("/tokens", body)
    if op.arguments.json:
        print_json(made)
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
        with connect(namespace) as client:
            return run(Operator(client, namespace), namespace)

    return Command(name=name, help=text, run=main, add_arguments=add)


COMMANDS = (
    Command(
        name="login",
        help="log in at a control plane, or make its first admin",
        run=run_login,
        add_arguments=add_login_arguments,
    ),
    Command(
        name="health",
        help="say whether a control plane is ready",
        run=run_health,
        add_arguments=add_health_arguments,
    ),
    _command(
        "node list",
        "list nodes",
        _list_nodes,
        _argument("--state", choices=("pending", "active", "revoked", "decommissioned")),
        _argument("--role", choices=("vehicle", "edge")),
        _argument("--label", metavar="KEY=VALUE", help="only with this label"),
        _argument("--cell", help="only in this cell: a gateway's name, or cloud"),
        _argument("--sort", choices=SORT_KEYS, help="by this (name)"),
        _argument("--descending", action="store_true", help="the greatest first, or the latest"),
    ),
    _command("node show", "show a node", _show("nodes"), NAME),
    _command("node log", "show the last lines of a node's log", _read_log, NAME),
    _command("node label", "give a node other labels", _change_labels, NAME, LABELS),
    _command("node approve", "let a pending node in", _post("nodes", "approve"), NAME),
    _command("node revoke", "take all rights from a node now", _post("nodes", "revoke"), NAME),
    _command("node decommission", "take a node out", _post("nodes", "decommission"), NAME),
    _command("gateway list", "list gateways and their cells", _rows("/gateways", GATEWAY_COLUMNS)),
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
    _command("alerts", "list what needs a human now, and what to do", _list_alerts),
    _command(
        "refusal list",
        "list what a job refused, newest first",
        _list_refusals,
        JOB,
        _argument("--node", help="only of this node"),
        _argument("--reason", help="only of this reason"),
    ),
    _command(
        "audit list",
        "list changes, newest first",
        _list_audit,
        _argument("--kind", help="only of things of this kind"),
        _argument("--object", help="only of the thing of this name"),
        _argument("--actor", help="only what this one did"),
        _argument("--since", metavar="TIME", help="only from then on, as 2026-01-31T08:00Z"),
        _argument("--until", metavar="TIME", help="only before then"),
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
        _argument("--scope", action="append", required=True, help="a right, as nodes:read"),
        _argument("--days", type=int, default=90, help="valid for so long (90)"),
    ),
    _command("token revoke", "revoke an API token", _revoke_token, NAME),
)
