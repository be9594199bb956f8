"""Access rights told to a plugin that answers as Mosquitto's does, and knows nothing else."""

from __future__ import annotations

import json
from typing import Any

from hetertrain.wire.events import Outgoing
from hetertrain_cloud.control.access import CONTROL, Rights
from hetertrain_cloud.control.dynsec import DynamicSecurity, initial_configuration

CAR = Rights(frozenset({"up/car"}), frozenset({"down/+"}))


class Plugin:
    """Users and roles in memory; who is expelled while a role is held, as in 2.0.11, breaks it."""

    def __init__(self) -> None:
        plain = json.loads(initial_configuration())
        self.clients = {each["username"]: each["roles"] for each in plain["clients"]}
        self.roles = {each["rolename"]: each["acls"] for each in plain["roles"]}
        self.security = DynamicSecurity(self.publish)

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        for item in outgoing:
            commands = json.loads(item.frame)["commands"]
            answers = [self.answer(each) for each in commands]
            self.security.take(json.dumps({"responses": answers}).encode())

    def answer(self, each: dict[str, Any]) -> dict[str, Any]:
        name, user, role = each["command"], each.get("username"), each.get("rolename")
        answer = {"command": name, "correlationData": each["correlationData"]}
        match name:
            case "listClients":
                rows = [{"username": u, "roles": r} for u, r in self.clients.items()]
                answer["data"] = {"totalCount": len(rows), "clients": rows}
            case "listRoles":
                rows = [{"rolename": r, "acls": a} for r, a in self.roles.items()]
                answer["data"] = {"totalCount": len(rows), "roles": rows}
            case "getClient" if user in self.clients:
                answer["data"] = {"client": {"username": user, "roles": self.clients[user]}}
            case "getRole" if role in self.roles:
                answer["data"] = {"role": {"rolename": role, "acls": self.roles[role]}}
            case "createClient" | "modifyClient":
                assert all(each["rolename"] in self.roles for each in each["roles"])
                self.clients[user] = each["roles"]
            case "createRole" | "modifyRole":
                assert (role in self.roles) == (name == "modifyRole")
                self.roles[role] = each["acls"]
            case "addRoleACL":
                acl = {key: each[key] for key in ("acltype", "topic", "allow")}
                assert acl not in self.roles[role]
                self.roles[role].append(acl)
            case "deleteClient":
                del self.clients[user]
            case "deleteRole":
                holders = [u for u, rs in self.clients.items() if {"rolename": role} in rs]
                assert not holders, "the broker would crash"
                del self.roles[role]
            case _:
                answer["error"] = "not found"
        return answer


def test_rights_become_what_they_should_be_from_any_drift() -> None:
    plugin = Plugin()
    wanted = {f"car-{number}": CAR for number in range(60)}
    assert plugin.security.reconcile(lambda: wanted) == 60
    assert plugin.security.reconcile(lambda: wanted) == 0

    plugin.clients["intruder"] = [{"rolename": CONTROL}]
    plugin.clients["car-1"] = [{"rolename": CONTROL}]
    plugin.roles["node-car-2"] = []
    plugin.roles["node-gone"] = []
    del plugin.clients["car-3"], wanted["car-4"]

    assert plugin.security.reconcile(lambda: wanted) == 6
    assert plugin.clients.keys() == wanted.keys() | {CONTROL}
    assert plugin.clients["car-1"] == [{"rolename": "node-car-1"}]
    assert plugin.roles.keys() == {f"node-{name}" for name in wanted} | {CONTROL}
    assert plugin.security.reconcile(lambda: wanted) == 0


def test_who_is_revoked_during_a_reconciliation_stays_revoked() -> None:
    plugin = Plugin()
    plugin.security.apply("car-1", lambda: CAR)

    def read() -> dict[str, Rights]:
        stale = {"car-1": CAR, "car-2": CAR}
        plugin.security.apply("car-1", lambda: None)
        return stale

    plugin.security.reconcile(read)
    assert plugin.clients.keys() == {"car-2", CONTROL}


def test_nothing_is_ever_taken_from_the_control_planes_own_rights() -> None:
    plugin = Plugin()
    plugin.roles[CONTROL].append({"acltype": "subscribeLiteral", "topic": "more", "allow": True})
    before = list(plugin.roles[CONTROL])
    assert plugin.security.reconcile(dict) == 0
    assert (plugin.clients.keys(), plugin.roles[CONTROL]) == ({CONTROL}, before)


def test_a_broker_of_an_earlier_release_is_told_what_the_control_plane_may_do_now() -> None:
    plugin = Plugin()
    whole = list(plugin.roles[CONTROL])
    plugin.roles[CONTROL] = [acl for acl in whole if "/log" not in acl["topic"]]
    assert plugin.security.reconcile(dict) == 1
    assert sorted(map(str, plugin.roles[CONTROL])) == sorted(map(str, whole))
    assert plugin.security.reconcile(dict) == 0
