"""One action on many nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control import enrolment
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Label,
    LabelValue,
    Name,
    Plane,
    problems,
)
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import ProblemError
from hetertrain_cloud.control.tables import Node

NODES_MAX = 500
LABELS_MAX = 16
BATCH = 100
"""So many are changed in one transaction: others who write wait no longer than for that."""
DONE = "done"
router = APIRouter(prefix="/api/v1", tags=["fleet"])


class NodeActions(Body):
    """One action on many nodes."""

    action: Literal["approve", "revoke", "decommission", "label"]
    nodes: list[Name] = Field(min_length=1, max_length=NODES_MAX)
    labels: Annotated[dict[Label, LabelValue | None], Field(max_length=LABELS_MAX)] | None = Field(
        None, description="for `label` only; null takes a label away, the others stay"
    )

    @model_validator(mode="after")
    def _check(self) -> NodeActions:
        if (self.labels is None) == (self.action == "label"):
            raise ValueError("give labels where the action is label, and only there")
        return self


class ActionResult(Body):
    """What became of one node."""

    node: str
    is_done: bool
    code: str = Field(
        description="`done`, or why not; `broker_unreachable`: it is done, and the broker hears of "
        "it when it is reached",
        examples=["node_unknown"],
    )
    detail: str


class ActionResults(Body):
    """What became of each node, in the order asked; one that fails stops no other."""

    results: list[ActionResult]


@router.post("/nodes/actions", responses=problems(*ALWAYS))
def act_on_nodes(body: NodeActions, caller: Caller, plane: Plane) -> ActionResults:
    """Approve, revoke, decommission or label many nodes, each by itself."""
    caller.require("nodes:write")
    results: list[ActionResult] = []
    names = list(dict.fromkeys(body.nodes))
    broker = _Broker(plane)
    for start in range(0, len(names), BATCH):
        done: dict[str, Node] = {}
        refused: dict[str, ProblemError] = {}
        batch = names[start : start + BATCH]
        with plane.database.begin() as transaction:
            for name in batch:
                try:
                    with transaction.begin_nested():
                        done[name] = _act(transaction, plane, body, name, caller.name)
                except ProblemError as error:
                    refused[name] = error
        for name in batch:
            problem = refused.get(name)
            if problem is None and body.action != "label":
                problem = broker.tell(done[name])
            results.append(_result(name, name in done, problem))
    if body.action == "label":
        plane.access_changed.set()
    return ActionResults(results=results)


def _act(
    transaction: Transaction, plane: ControlPlane, body: NodeActions, name: str, actor: str
) -> Node:
    now = plane.now()
    match body.action:
        case "approve":
            return enrolment.approve(transaction, plane.authority, name, actor, now)
        case "revoke":
            return enrolment.expel(transaction, name, "revoked", actor, now)
        case "decommission":
            return enrolment.expel(transaction, name, "decommissioned", actor, now)
        case "label":
            node = enrolment.find(transaction, name)
            both = node.labels | (body.labels or {})
            labels = {key: value for key, value in both.items() if value is not None}
            if len(labels) > LABELS_MAX:
                raise ProblemError(422, "labels_too_many", f"a node has at most {LABELS_MAX}")
            if labels != node.labels:
                enrolment.relabel(transaction, node, labels, actor, now)
            return node


def _result(name: str, is_done: bool, problem: ProblemError | None) -> ActionResult:
    code = DONE if problem is None else problem.problem
    detail = "" if problem is None else problem.detail
    return ActionResult(node=name, is_done=is_done, code=code, detail=detail)


class _Broker:
    """Tells the broker what nodes may do now; once it does not answer, it is not asked again and
    again: upkeep tells it of all when it is reached.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._problem: ProblemError | None = None

    def tell(self, node: Node) -> ProblemError | None:
        if self._problem is None:
            try:
                self._plane.update_access(node)
            except ProblemError as error:
                self._problem = error
                self._plane.access_changed.set()
        return self._problem
