"""The screens, in the order of the menu."""

from hetertrain_cloud.console.screens import (
    account,
    accounts,
    alerts,
    audit,
    compare,
    enrolment,
    fleet,
    gateways,
    job,
    job_form,
    jobs,
    node,
    overview,
    quarantine,
    settings,
    version,
    versions,
)
from hetertrain_cloud.console.view import Screen

ALL: list[Screen] = [
    overview.SCREEN,
    jobs.SCREEN,
    job_form.NEW,
    compare.SCREEN,
    job.SCREEN,
    job_form.EDIT,
    versions.SCREEN,
    version.SCREEN,
    fleet.SCREEN,
    node.SCREEN,
    gateways.SCREEN,
    alerts.SCREEN,
    enrolment.SCREEN,
    quarantine.SCREEN,
    audit.SCREEN,
    accounts.SCREEN,
    settings.SCREEN,
    account.SCREEN,
]
