"""Access rights in Mosquitto's dynamic security plugin, over its control topic.

A user is the common name of a certificate; each has one role of its own, with literal topics (the
plugin of Mosquitto 2.0 knows no ``%u``). Measured with 2.0.11, and minded here: a role that a
client still holds must not be deleted (the broker crashes later), so clients go first; a
certificate's login ignores ``disableClient``, so who is expelled is deleted; the plugin writes its
whole file for each command, so commands go in small batches.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hetertrain.errors import TransportError
from hetertrain.wire.events import Outgoing
from hetertrain_cloud.control.access import (
    CONTROL,
    Rights,
    watcher_publications,
    watcher_topics,
)

TOPIC = "$CONTROL/dynamic-security/v1"
RESPONSE_TOPIC = f"{TOPIC}/response"
USERS_MAX = 25
PAGE = 100
ANSWER_SECONDS = 20.0
ROLE_PREFIX = "node-"
"""Before a user's name: its role. The control plane's own role has another name."""

Command = dict[str, Any]


class DynamicSecurity:
    """Keeps the plugin's users and roles as they should be; any thread may call it.

    What ``apply`` says of a user while a ``reconcile`` is under way is newer, and stands. The
    control plane's own role is given what it lacks, as after an upgrade, and nothing is taken.
    """

    def __init__(self, publish: Callable[[tuple[Outgoing, ...]], None]) -> None:
        """Send commands with ``publish``; give what comes on ``RESPONSE_TOPIC`` to ``take``."""
        self._publish = publish
        self._answers: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        self._reconciling = threading.Lock()
        self._turn = threading.Lock()
        self._applied: set[str] = set()
        """Users that were dealt with since the running reconciliation began."""
        self._number = 0

    def take(self, frame: bytes) -> None:
        """Take what the plugin answered; any thread may call it."""
        try:
            answers = json.loads(frame)["responses"]
        except (ValueError, KeyError, TypeError):
            return
        if isinstance(answers, list):
            self._answers.put([each for each in answers if isinstance(each, dict)])

    def reconcile(self, read: Callable[[], Mapping[str, Rights]]) -> int:
        """See ``BrokerAccess``."""
        with self._reconciling:
            with self._turn:
                self._applied.clear()
            wanted = read()
            roles = {each["rolename"]: _acls(each) for each in self._list("Roles", "roles")}
            users = {each["username"]: _roles(each) for each in self._list("Clients", "clients")}
            stale = sorted(users.keys() - wanted.keys() - {CONTROL})
            changes = [(name, self._without(name, has_role=_role(name) in roles)) for name in stale]
            has = roles.get(CONTROL)
            missing = [acl for acl in _own_acls() if has is not None and _key(acl) not in has]
            if missing:
                changes.append((CONTROL, [_give(acl) for acl in missing]))
            for name, rights in sorted(wanted.items()):
                acls = _wanted_acls(rights)
                has_role, has_user = roles.get(_role(name)), users.get(name)
                if has_role != _as_set(acls) or has_user != [_role(name)]:
                    changes.append((name, _with(name, acls, has_role is not None, has_user)))
            for role in sorted(roles):
                name = role.removeprefix(ROLE_PREFIX)
                if role.startswith(ROLE_PREFIX) and name not in wanted and name not in users:
                    changes.append((name, [{"command": "deleteRole", "rolename": role}]))
            for start in range(0, len(changes), USERS_MAX):
                with self._turn:
                    batch = [
                        c for c in changes[start : start + USERS_MAX] if c[0] not in self._applied
                    ]
                    commands = [command for _, some in batch for command in some]
                    if commands:
                        self._ask(commands)
            return len(changes)

    def apply(self, user: str, read: Callable[[], Rights | None]) -> None:
        """See ``BrokerAccess``."""
        if not self._turn.acquire(timeout=ANSWER_SECONDS):
            raise TransportError("the broker's dynamic security is busy: try again")
        try:
            self._apply(user, read())
        finally:
            self._turn.release()

    def _apply(self, user: str, rights: Rights | None) -> None:
        self._applied.add(user)
        # To ask for what is not there fails, and that is an answer.
        (has_user,) = self._ask([{"command": "getClient", "username": user}], may_fail=True)
        (has_role,) = self._ask([{"command": "getRole", "rolename": _role(user)}], may_fail=True)
        is_user, is_role = "error" not in has_user, "error" not in has_role
        if rights is None:
            commands = self._without(user, has_role=is_role) if is_user else []
        else:
            roles = _roles(has_user["data"]["client"]) if is_user else None
            commands = _with(user, _wanted_acls(rights), is_role, roles)
        if commands:
            self._ask(commands)

    def _without(self, user: str, *, has_role: bool) -> list[Command]:
        commands: list[Command] = [{"command": "deleteClient", "username": user}]
        if has_role:
            commands.append({"command": "deleteRole", "rolename": _role(user)})
        return commands

    def _list(self, command: str, key: str) -> Iterator[Command]:
        offset = 0
        while True:
            request = {"command": f"list{command}", "verbose": True, "count": PAGE}
            with self._turn:
                (answer,) = self._ask([request | {"offset": offset}])
            data = answer["data"]
            yield from data[key]
            offset += len(data[key])
            if not data[key] or offset >= data["totalCount"]:
                return

    def _ask(self, commands: list[Command], *, may_fail: bool = False) -> list[Command]:
        """Send commands and return their answers, in order.

        Raises:
            TransportError: no answer came in time, or a command was refused.
        """
        self._number += 1
        mark = f"{id(self):x}-{self._number}"
        marked = [command | {"correlationData": mark} for command in commands]
        frame = json.dumps({"commands": marked}).encode()
        self._publish((Outgoing(TOPIC, frame),))
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                answers = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TransportError(
                    f"the broker's dynamic security did not answer within {ANSWER_SECONDS:g} s: is "
                    f"the plugin loaded, and may {CONTROL} use {TOPIC}?"
                ) from None
            if all(each.get("correlationData") == mark for each in answers):
                break
        failed = next((each for each in answers if "error" in each), None)
        if failed is not None and not may_fail:
            raise TransportError(f"dynamic security: {failed['command']}: {failed['error']}")
        return answers


def initial_configuration() -> str:
    """Return the plugin's file for a new broker: the control plane may administer, nobody else may
    do anything.
    """
    control = {"username": CONTROL, "roles": [{"rolename": CONTROL}]}
    nothing = {
        "publishClientSend": False,
        "publishClientReceive": False,
        "subscribe": False,
        "unsubscribe": True,
    }
    role = {"rolename": CONTROL, "acls": _own_acls()}
    return json.dumps(
        {"defaultACLAccess": nothing, "clients": [control], "roles": [role]}, indent=1
    )


def _own_acls() -> list[Command]:
    """Return what the control plane itself may do."""
    own = f"{TOPIC.rpartition('/')[0]}/#"
    acls = [("publishClientSend", topic) for topic in (own, *watcher_publications())]
    for topic in (own, *watcher_topics()):
        acls += [(kind, topic) for kind in ("publishClientReceive", "subscribePattern")]
    return [{"acltype": kind, "topic": topic, "allow": True} for kind, topic in acls]


def _give(acl: Command) -> Command:
    return {"command": "addRoleACL", "rolename": CONTROL} | acl


def _with(
    user: str, acls: list[Command], has_role: bool, has_roles: list[str] | None
) -> list[Command]:
    """Return the commands that give a user its role, with these rights."""
    verb = "modifyRole" if has_role else "createRole"
    commands: list[Command] = [{"command": verb, "rolename": _role(user), "acls": acls}]
    roles = [{"rolename": _role(user)}]
    if has_roles is None:
        commands.append({"command": "createClient", "username": user, "roles": roles})
    elif has_roles != [_role(user)]:
        commands.append({"command": "modifyClient", "username": user, "roles": roles})
    return commands


def _role(user: str) -> str:
    return f"{ROLE_PREFIX}{user}"


def _wanted_acls(rights: Rights) -> list[Command]:
    acls = [("publishClientSend", topic) for topic in rights.publish]
    for topic in rights.subscribe:
        kind = "subscribePattern" if "+" in topic else "subscribeLiteral"
        acls += [(kind, topic), ("publishClientReceive", topic)]
    return [{"acltype": kind, "topic": topic, "allow": True} for kind, topic in sorted(acls)]


def _acls(role: Command) -> frozenset[tuple[str, str, bool]]:
    return _as_set(role.get("acls", []))


def _as_set(acls: list[Command]) -> frozenset[tuple[str, str, bool]]:
    return frozenset(map(_key, acls))


def _key(acl: Command) -> tuple[str, str, bool]:
    return acl["acltype"], acl["topic"], bool(acl.get("allow"))


def _roles(client: Command) -> list[str]:
    return sorted(each["rolename"] for each in client.get("roles", []))
