"""What each part may do at the broker, by topic; and how a broker is told.

A node may publish in its own name only, and hear its jobs' broadcasts and its own inbox only. Which
topics those are follows from its role and jobs; ``BrokerAccess`` makes a broker keep to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hetertrain.wire import topics
from hetertrain.wire.signing import CLOUD_SIGNER, CONTROL_SIGNER, GATEWAY_ROLE

AGGREGATOR = CLOUD_SIGNER
CONTROL = CONTROL_SIGNER
_ANY = "+"


@dataclass(frozen=True, slots=True)
class Rights:
    """Topics, with wildcards, that one credential may use."""

    publish: frozenset[str]
    subscribe: frozenset[str]


class BrokerAccess(Protocol):
    """A broker that knows who may do what."""

    def reconcile(self, read: Callable[[], Mapping[str, Rights]]) -> int:
        """Make the broker's rules be exactly what ``read`` returns, by user; return how many
        differed. What ``apply`` says from the call of ``read`` on is newer, and stands.

        Whoever is not there is disconnected and loses all rights.

        Raises:
            TransportError: the broker cannot be reached or refuses.
        """

    def apply(self, user: str, read: Callable[[], Rights | None]) -> None:
        """Bring one user's rules up to date with what ``read`` returns when its turn comes; None:
        disconnect it and take all rights.

        Raises:
            TransportError: the broker cannot be reached or refuses.
        """


def node_rights(node: str, role: str, jobs: list[str]) -> Rights:
    """Return what a node may do that works on ``jobs``."""
    publish = {topics.state(node), topics.log(node)}
    # Its own state too: so it notices another process in its name.
    subscribe = {topics.inbox(node), topics.state(node)}
    for job in jobs:
        cell = topics.CLOUD_CELL if role == GATEWAY_ROLE else _ANY
        publish.add(topics.up(job, cell, _ANY, node))
        subscribe |= {topics.down(job, cell, _ANY), topics.sync(job, cell), topics.order(job)}
        if role == GATEWAY_ROLE:
            publish |= {
                topics.down(job, node, _ANY),
                topics.sync(job, node),
                topics.status(job, node),
                topics.members(job, node),
            }
            subscribe.add(topics.up(job, node, _ANY, _ANY))
    if role == GATEWAY_ROLE:
        publish.add(topics.inbox(_ANY))
        subscribe.add(topics.state(_ANY))
    return Rights(frozenset(publish), frozenset(subscribe))


def aggregator_rights() -> Rights:
    """Return what the cloud's aggregators may do."""
    cloud = topics.CLOUD_CELL
    publish = {
        topics.inbox(_ANY),
        topics.down(_ANY, cloud, _ANY),
        topics.sync(_ANY, cloud),
        topics.status(_ANY, cloud),
    }
    subscribe = {
        topics.up(_ANY, cloud, _ANY, _ANY),
        topics.state(_ANY),
        topics.status(_ANY, cloud),
    }
    return Rights(frozenset(publish), frozenset(subscribe))


def watcher_topics() -> tuple[str, ...]:
    """Return what the control plane listens to."""
    return (
        topics.state(_ANY),
        topics.log(_ANY),
        topics.status(_ANY, _ANY),
        topics.members(_ANY, _ANY),
    )


def watcher_publications() -> tuple[str, ...]:
    """Return what the control plane says to nodes on: orders, and requests for their logs."""
    return (topics.order(_ANY), topics.inbox(_ANY))
