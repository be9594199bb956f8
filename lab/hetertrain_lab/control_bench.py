"""How fast is the control plane's API on a large fleet? Its pages, with 100,000 nodes.

The application runs in process, so the figures are its own: database, checks and JSON, without a
network. Each page is asked for many times; most of the fleet says something, some of it is offline.
"""

from __future__ import annotations

import datetime
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi.testclient import TestClient

from hetertrain.wire import topics
from hetertrain.wire.messages import NodeState
from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain_cloud.control import jobs, operators
from hetertrain_cloud.control.api.app import build_app
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.database import Database
from hetertrain_cloud.control.live import LiveFleet
from hetertrain_cloud.control.plane import Advertised, ControlPlane
from hetertrain_cloud.control.tables import Claim, Node
from hetertrain_lab.page import Rows

NODES, NODES_QUICK = 100_000, 10_000
REPEATS = 30
BATCH = 5_000
USER, PASSWORD = "bench", "a" * 12
REGIONS = ("north", "south", "east", "west")
GATEWAY_PLACE = 51
"""Of a hundred nodes this one is a gateway."""


@dataclass(frozen=True, slots=True)
class PageMeasure:
    """One page's times."""

    name: str
    path: str
    median_ms: float
    slowest_ms: float


@dataclass(frozen=True, slots=True)
class ControlMeasure:
    """What was measured."""

    nodes: int
    database: str
    pages: tuple[PageMeasure, ...]


def run_control(
    output: Path, *, is_quick: bool, url: str | None, on_progress: Callable[[float], None]
) -> ControlMeasure:
    """Fill a database and measure pages; ``url`` names an empty one, else SQLite is used."""
    num_nodes = NODES_QUICK if is_quick else NODES
    output.mkdir(parents=True, exist_ok=True)
    file = output / "control.db"
    for part in output.glob("control.db*"):
        part.unlink()
    database = Database(url or f"sqlite:///{file}")
    database.migrate()
    now = datetime.datetime.now(datetime.UTC)
    plane = ControlPlane(
        database=database,
        authority=Authority(output / "authority", now),
        live=LiveFleet(),
        advertised=Advertised(host="localhost", port=8883, is_tls=True, websocket_path=None),
        jobs_directory=output / "jobs",
        bootstrap_file=output / "bootstrap-token",
        now=lambda: datetime.datetime.now(datetime.UTC),
        access_changed=threading.Event(),
    )
    try:
        token = fill(plane, num_nodes, now, lambda share: on_progress(0.7 * share))
        client = TestClient(build_app(plane), headers={"Authorization": f"Bearer {token}"})
        paths = {
            "first page of nodes": "/api/v1/nodes?limit=100",
            "page in the middle": f"/api/v1/nodes?limit=100&cursor={node_name(num_nodes // 2)}",
            "last page": f"/api/v1/nodes?limit=100&cursor={node_name(num_nodes - 100)}",
            "by state": "/api/v1/nodes?limit=100&state=revoked",
            "by label": "/api/v1/nodes?limit=100&label=region%3Dwest",
            "by name": f"/api/v1/nodes?limit=100&prefix={node_name(num_nodes - 40)[:-2]}",
            "by what they do": "/api/v1/nodes?limit=100&doing=training&tier=t2&state=active",
            "offline": f"/api/v1/nodes?is_online=false&cursor={node_name(num_nodes // 2)}",
            "the fleet in numbers": "/api/v1/fleet",
            "a job's fleet in numbers": f"/api/v1/fleet?job={REGIONS[1]}",
            "why a node does not train": f"/api/v1/nodes/{node_name(1)}/explanation",
            "a node's timeline": f"/api/v1/nodes/{node_name(1)}/events",
            "gateways": "/api/v1/gateways",
            "jobs": "/api/v1/jobs",
            "a job": f"/api/v1/jobs/{REGIONS[1]}",
            "audit trail": "/api/v1/audit?limit=100",
            "figures for Prometheus": "/metrics",
        }
        pages = []
        for number, (name, path) in enumerate(paths.items(), 1):
            pages.append(_measure(client, name, path))
            on_progress(0.7 + 0.3 * number / len(paths))
    finally:
        database.close()
    return ControlMeasure(num_nodes, database.url.get_backend_name(), tuple(pages))


def control_rows(measure: ControlMeasure) -> Rows:
    """Lay the measures out as a table."""
    title = f"{measure.nodes:,} nodes in {measure.database}, {REPEATS} requests each"
    rows: list[tuple[str, ...]] = [
        (page.name, f"{page.median_ms:.1f}", f"{page.slowest_ms:.1f}") for page in measure.pages
    ]
    return title, ("page", "median, ms", "slowest, ms"), rows


def role_of(number: int) -> str:
    """Return a node's role: one in a hundred is a gateway."""
    return GATEWAY_ROLE if number % 100 == GATEWAY_PLACE else "vehicle"


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"{'car' if role_of(number) == 'vehicle' else 'rsu'}-{number:08d}"


def cell_of(number: int) -> str:
    """Return a node's cell: a fifth of the vehicles have a gateway."""
    if number % 5 or role_of(number) != "vehicle":
        return topics.CLOUD_CELL
    return node_name(number - number % 100 + GATEWAY_PLACE)


def fill(
    plane: ControlPlane,
    num_nodes: int,
    now: datetime.datetime,
    on_progress: Callable[[float], None],
) -> str:
    """Make nodes, a tenth of them online, jobs and an admin; return a token of hers."""
    with plane.database.begin() as transaction:
        operators.create_user(
            transaction, name=USER, password=PASSWORD, role="admin", actor=USER, now=now
        )
        rights = operators.ROLES["admin"]
        _, token = operators.create_token(
            transaction,
            operators.Principal("bench", rights),
            label="bench",
            scopes=rights,
            expires_at=now + datetime.timedelta(days=1),
            now=now,
        )
        claim = Claim(
            id="bench",
            digest="",
            role="vehicle",
            labels={},
            uses_max=num_nodes,
            needs_approval=False,
            created_by="bench",
            created_at=now,
            expires_at=now,
        )
        transaction.add(claim)
        for region in REGIONS:
            specification = jobs.JobSpecification(
                task="module:Task", eligible_labels={"region": region}
            )
            jobs.create(
                transaction, name=region, specification=specification, actor="bench", now=now
            )
    for start in range(0, num_nodes, BATCH):
        with plane.database.begin() as transaction:
            for number in range(start, min(start + BATCH, num_nodes)):
                transaction.add(_node(number, now))
        on_progress((start + BATCH) / num_nodes)
    plane.live.broker_error = ""
    for number in range(num_nodes):
        if number % 10:
            plane.live.see(_said(number))
    return token


def _node(number: int, now: datetime.datetime) -> Node:
    return Node(
        name=node_name(number),
        role=role_of(number),
        state="revoked" if number % 100 == 0 else "active",
        labels={"region": REGIONS[number % 4], "model": f"m{number % 17}"},
        claim="bench",
        public_key=f"{number:064x}",
        request="",
        enrolled_at=now,
    )


def _said(number: int) -> NodeState:
    """Return what a node says: most train, some must not, some took their leave."""
    says = (
        ("training", ""),
        ("training", ""),
        ("not_eligible", f"Vehicle.Speed < 1: it is {number}"),
    )
    doing, waiting_for = says[number % len(says)]
    is_online = number % 7 != 0
    return NodeState(
        node=node_name(number),
        job=REGIONS[number % 4],
        cell=cell_of(number),
        tier=f"t{number % 4}",
        role=role_of(number),
        is_online=is_online,
        doing=doing if is_online else "offline",
        waiting_for=waiting_for,
        metrics={"r2": 0.5},
    )


def _measure(client: TestClient, name: str, path: str) -> PageMeasure:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        response = client.get(path)
        times.append(1000 * (time.perf_counter() - began))
        response.raise_for_status()
    return PageMeasure(name, path, statistics.median(times), max(times))
