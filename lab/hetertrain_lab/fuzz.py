"""Random scenarios, to find what breaks a promise; and the smallest one that still does.

A seed alone decides the scenario and all that happens in it, so a seed replays a failure. A failing
scenario is made smaller by taking away one kind of trouble after the other, as long as it still
fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetertrain.core.policy import SYNC_PRESETS
from hetertrain.errors import SettingsError
from hetertrain_lab.invariants import ViolationError
from hetertrain_lab.scenario import Scenario, parse_scenario
from hetertrain_lab.simulator import simulate

Plain = dict[str, Any]


def random_scenario(seed: int, drops: tuple[str, ...] = ()) -> Scenario:
    """Make the scenario of a seed, without the troubles named in ``drops``."""
    rng = random.Random(f"fuzz {seed}")  # noqa: S311  # replayed, not secret
    plain: Plain = {
        "name": f"fuzz-{seed}",
        "policy": rng.choice(sorted(SYNC_PRESETS)),
        "seconds": rng.uniform(8.0, 25.0),
        "heartbeat_seconds": rng.choice([1.0, 2.0, 5.0]),
        "installed": rng.random() < 0.3,
        "vehicles": [_vehicles(rng)],
        "gateways": _links(rng) | _troubles(rng, 0.3) | {"count": rng.choice([0, 0, 1, 2])},
        "cloud": _crashes(rng, 0.4),
        "broker": _crashes(rng, 0.3),
        "sync": _rules(rng),
        "weights": {"outer": rng.choice(["none", "none", "sgd", "momentum", "nesterov", "adam"])},
        "learning": {"parameters": rng.choice([1, 7, 300, 3000])},
        "follow_link": rng.random() < 0.5,
    }
    # Drawn apart, so that all else of a seed's scenario stays as it was.
    plain["gateways"] |= _autonomy(random.Random(f"fuzz autonomy {seed}"))  # noqa: S311
    forms = random.Random(f"fuzz forward {seed}")  # noqa: S311
    plain["gateways"]["forward"] = forms.choice(["exact", "exact", "encoded", "bundle"])
    for drop in drops:
        DROPS[drop](plain)
    return parse_scenario(plain)


def _vehicles(rng: random.Random) -> Plain:
    fastest = rng.choice([0.01, 0.05, 0.2])
    return (
        {
            "count": rng.randint(1, 6),
            "step_seconds": (fastest, fastest * rng.choice([1, 3, 10, 30])),
            "joins_within_seconds": rng.choice([0.0, 0.0, 10.0]),
        }
        | _links(rng)
        | _troubles(rng, 0.5)
        | {"roam_seconds": rng.choice([None, 1.0, 5.0])}
    )


def _links(rng: random.Random) -> Plain:
    # Not under the slowest tier: a link that is thinner than its tier assumes is swamped.
    slowest = rng.choice([7e4, 2e5, 2e6])
    links: Plain = {
        "rate_bits_per_second": (slowest, slowest * rng.choice([1, 10, 100])),
        "latency_seconds": rng.choice([0.001, 0.05, 0.5]),
    }
    for name in ("loss", "duplication", "reordering"):
        links[name] = rng.choice([0.0, 0.0, 0.02, 0.2])
    return links


def _troubles(rng: random.Random, likely: float) -> Plain:
    outages: Plain = {"outage_share": rng.choice([0.0, 0.0, 0.1, 0.4])}
    return outages | _crashes(rng, likely)


def _crashes(rng: random.Random, likely: float) -> Plain:
    if rng.random() >= likely:
        return {}
    return {"crash_seconds": rng.uniform(3.0, 20.0), "disk_loss": rng.choice([0.0, 0.0, 0.3])}


def _autonomy(rng: random.Random) -> Plain:
    return {
        "uplink_outage_share": rng.choice([0.0, 0.3, 0.7]),
        "uplink_outage_seconds": (1.0, rng.choice([3.0, 20.0])),
        "local_after_seconds": rng.choice([None, 0.0, 1.0]),
        "inbox_bytes_max": rng.choice([1 << 30, 1 << 30, 4000]),
    }


def _rules(rng: random.Random) -> Plain:
    rules: Plain = {
        "max_lag": rng.choice([0, 2, 8, 64]),
        "cut_fraction": rng.choice([1e-9, 0.25, 0.5, 1.0]),
        "sync_seconds": rng.choice([None, 2.0, 5.0]),
        "sync_deadline_seconds": rng.choice([0.2, 1.0, 3.0]),
        "sync_quorum": rng.choice([0.5, 1.0]),
        "hold_at_sync": rng.random() < 0.5,
    }
    some = {name: value for name, value in rules.items() if rng.random() < 0.5}
    return some | {"cut_seconds": rng.choice([0.5, 2.0, 10.0])}


def _drop_links(name: str) -> Callable[[Plain], None]:
    def drop(plain: Plain) -> None:
        for group in (*plain["vehicles"], plain["gateways"]):
            group.pop(name, None)

    return drop


def _halve(plain: Plain) -> None:
    plain["vehicles"][0]["count"] = max(1, plain["vehicles"][0]["count"] // 2)


def _shorten(plain: Plain) -> None:
    plain["seconds"] /= 2


DROPS: dict[str, Callable[[Plain], None]] = {
    "gateways": lambda plain: plain.update(gateways={"count": 0}),
    "autonomy": lambda plain: plain["gateways"].update(
        uplink_outage_share=0.0, local_after_seconds=None, inbox_bytes_max=1 << 30
    ),
    "forms": lambda plain: plain["gateways"].update(forward="exact"),
    "broker": lambda plain: plain.update(broker={}),
    "cloud": lambda plain: plain.update(cloud={}),
    "rules": lambda plain: plain.update(sync={}),
    "loss": _drop_links("loss"),
    "duplication": _drop_links("duplication"),
    "reordering": _drop_links("reordering"),
    "outages": _drop_links("outage_share"),
    "crashes": _drop_links("crash_seconds"),
    "disks": _drop_links("disk_loss"),
    "tiers": lambda plain: plain.update(follow_link=False),
    "joins": _drop_links("joins_within_seconds"),
    "roaming": _drop_links("roam_seconds"),
    "half": _halve,
    "short": _shorten,
}
"""What can be taken out of a random scenario."""


def parse_drops(text: str) -> tuple[str, ...]:
    """Read names of ``DROPS`` with commas between.

    Raises:
        SettingsError: a name is unknown.
    """
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in DROPS]
    if unknown:
        raise SettingsError(f"--drop {unknown[0]} is unknown; known: {', '.join(DROPS)}")
    return names


@dataclass(frozen=True, slots=True)
class Failure:
    """A scenario that breaks a promise, made as small as it goes."""

    seed: int
    drops: tuple[str, ...]
    message: str

    @property
    def replay(self) -> str:
        """The command that shows it again."""
        drops = f" --drop {','.join(self.drops)}" if self.drops else ""
        return f"hetertrain simulate --fuzz 1 --seed {self.seed}{drops}"


def fuzz_one(seed: int, drops: tuple[str, ...] = ()) -> Failure | None:
    """Run one random scenario."""
    try:
        simulate(random_scenario(seed, drops), seed)
    except ViolationError as violation:
        return Failure(seed, drops, str(violation))
    return None


def minimise(failure: Failure) -> Failure:
    """Take away what the failure does not need."""
    for name in DROPS:
        smaller = fuzz_one(failure.seed, (*failure.drops, name))
        if smaller is not None:
            failure = smaller
    return failure
