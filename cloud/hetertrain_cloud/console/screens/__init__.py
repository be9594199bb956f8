"""The screens, in the order of the menu."""

from hetertrain_cloud.console.screens import fleet, gateways, node, overview
from hetertrain_cloud.console.view import Screen

ALL: list[Screen] = [
    overview.SCREEN,
    fleet.SCREEN,
    node.SCREEN,
    gateways.SCREEN,
]
