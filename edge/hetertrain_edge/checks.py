"""What a gateway's doctor looks at: the node itself, and the links to the cloud and to its cell."""

from __future__ import annotations

from hetertrain.checks_link import Link, link_checks
from hetertrain.checks_node import control_check, node_checks
from hetertrain.core.tiers import TIERS
from hetertrain.doctor import Check
from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.uplink import Uplink
from hetertrain_edge.service import EdgeSettings


def edge_checks(settings: EdgeSettings) -> list[Check]:
    """Return a gateway's checks; where its cell has a broker of its own, those of both links.

    Raises:
        SettingsError: settings do not go together.
    """
    state = settings.state()
    job, node = settings.job, settings.node
    uplink, downlink = Uplink(state, TIERS[state.tier]), Downlink(job, node)
    hears = (*uplink.subscriptions, uplink.will.topic)
    says = (*uplink.publications, topics.status(job, node))
    south_says = (topics.down(job, node, state.tier), topics.sync(job, node), topics.inbox(node))
    if not settings.has_own_broker:
        hears, says = (*hears, *downlink.subscriptions), (*says, *south_says)
    else:
        says = (*says, topics.members(job, node))
    north = Link(
        host=settings.broker_host,
        port=settings.broker_port,
        endpoint=lambda: settings.endpoint(node),
        subscriptions=hears,
        publications=says,
    )
    links = link_checks(north)
    if settings.has_own_broker and not settings.south_embedded:
        south = Link(
            host=settings.south_host or settings.broker_host,
            port=settings.south_port or settings.broker_port,
            endpoint=lambda: settings.south(settings.endpoint(node), None),
            subscriptions=downlink.subscriptions,
            publications=(*south_says, topics.order(job)),
        )
        links += link_checks(south, "south ")
    checks = node_checks(settings, node, settings.state_directory / node)
    return [*checks, *links, control_check(settings)]
