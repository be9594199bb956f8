"""A control plane of our own, with its API in process."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from hetertrain.security import load_or_make_key, make_request
from hetertrain.wire.messages import NodeState
from hetertrain_cloud.control import operators
from hetertrain_cloud.control.api.app import build_app
from hetertrain_cloud.control.api.convention import Limiter
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.database import Database
from hetertrain_cloud.control.live import LiveFleet
from hetertrain_cloud.control.plane import Advertised, ControlPlane

PASSWORD = "correct horse battery"
TASK = "hetertrain_lab.driving:DrivingTask"
JOB = {"name": "fleet", "specification": {"task": TASK}}


def code(response: Any) -> str:
    """Return the code of a refusal."""
    assert response.headers["content-type"] == "application/problem+json"
    return str(response.json()["code"])


@dataclass
class Clock:
    """Stands still until it is moved."""

    at: datetime.datetime = field(
        default_factory=lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    )

    def now(self) -> datetime.datetime:
        return self.at

    def move(self, **time: float) -> None:
        self.at += datetime.timedelta(**time)


@dataclass
class Bench:
    """A control plane, its clock, and clients of its API."""

    plane: ControlPlane
    clock: Clock
    directory: Path

    def client(self, role: str | None = "admin") -> TestClient:
        """Return a client with a token of a user of a role; None: of nobody."""
        client = TestClient(self.app, base_url="https://testserver")
        if role is None:
            return client
        now = self.clock.now()
        with self.plane.database.begin() as transaction:
            if transaction.get(operators.User, f"a-{role}") is None:
                operators.create_user(
                    transaction,
                    name=f"a-{role}",
                    password=PASSWORD,
                    role=role,
                    actor="test",
                    now=now,
                )
            _, secret = operators.create_token(
                transaction,
                operators.Principal(f"a-{role}", operators.ROLES[role]),
                label="test",
                scopes=operators.ROLES[role],
                expires_at=now + datetime.timedelta(days=900),
                now=now,
            )
        client.headers["Authorization"] = f"Bearer {secret}"
        return client

    def __post_init__(self) -> None:
        self.app = build_app(self.plane)
        # The limits are of an address's calls, and all tests call from one.
        self.app.state.limiter = Unlimited()

    def request(self, node: str, key: str | None = None) -> str:
        """Return a certificate request of a node; the same key for the same name."""
        path = self.directory / "keys" / f"{key or node}.key"
        return make_request(load_or_make_key(path), node)

    def claim(self, client: TestClient, **body: Any) -> str:
        """Make a claim; return its secret."""
        made = client.post("/api/v1/claims", json={"role": "vehicle"} | body)
        assert made.status_code == 201, made.text
        secret: str = made.json()["secret"]
        return secret

    def enrol(self, client: TestClient, name: str, **claim: Any) -> dict[str, Any]:
        """Enrol a node with a claim of its own."""
        body = {"claim": self.claim(client, **claim), "request": self.request(name)}
        enrolled = client.post("/api/v1/enrolments", json=body)
        assert enrolled.status_code in (200, 202), enrolled.text
        answer: dict[str, Any] = enrolled.json()
        return answer


class Unlimited(Limiter):
    def check(self, kind: str, address: str, per_minute: int) -> None:
        pass


@contextmanager
def control_plane(directory: Path, url: str | None = None) -> Iterator[Bench]:
    """Build a control plane on a database, SQLite where none is given."""
    clock = Clock()
    database = Database(url or f"sqlite:///{directory / 'control.db'}")
    database.migrate()
    live = LiveFleet()
    live.broker_error = ""
    plane = ControlPlane(
        database=database,
        authority=Authority(directory / "authority", clock.now()),
        live=live,
        advertised=Advertised(host="broker", port=8883, is_tls=True, websocket_path=None),
        jobs_directory=directory / "jobs",
        bootstrap_file=directory / "bootstrap-token",
        now=clock.now,
        access_changed=threading.Event(),
    )
    try:
        yield Bench(plane, clock, directory)
    finally:
        database.close()


def say(bench: Bench, node: str, **said: Any) -> None:
    """Let the control plane hear a node."""
    usual = {"job": "fleet", "cell": "cloud", "tier": "t2", "role": "vehicle"}
    bench.plane.live.see(NodeState(**usual | {"node": node, "is_online": True} | said))


def enrol(bench: Bench, client: TestClient, names: list[str], **claim: Any) -> None:
    """Enrol nodes with one claim for all."""
    secret = bench.claim(client, uses=len(names), **claim)
    for name in names:
        body = {"claim": secret, "request": bench.request(name, key="all")}
        assert client.post("/api/v1/enrolments", json=body).status_code in (200, 202)
