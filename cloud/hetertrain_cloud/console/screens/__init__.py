"""The screens, in the order of the menu."""

from hetertrain_cloud.console.screens import (
    account,
    accounts,
    alerts,
    audit,
    enrolment,
    fleet,
    gateways,
    node,
    overview,
    quarantine,
    settings,
)
from hetertrain_cloud.console.view import Screen

ALL: list[Screen] = [
    overview.SCREEN,
    fleet.SCREEN,
    node.SCREEN,
    gateways.SCREEN,
    alerts.SCREEN,
    enrolment.SCREEN,
    quarantine.SCREEN,
    audit.SCREEN,
    accounts.SCREEN,
    account.SCREEN,
    settings.SCREEN,
]
