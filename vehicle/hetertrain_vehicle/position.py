"""Where the vehicle is, by its signals, as far as its owner lets the fleet know: to about 100 m."""

from __future__ import annotations

from collections.abc import Mapping

from hetertrain.core.eligibility import Value

LATITUDE = "Vehicle.CurrentLocation.Latitude"
LONGITUDE = "Vehicle.CurrentLocation.Longitude"
NAMES = frozenset((LATITUDE, LONGITUDE))
DECIMALS = 3
"""Of a degree: 111 m from north to south, and less from west to east."""

Position = tuple[float, float]
"""Latitude and longitude in degrees."""


def coarse_position(signals: Mapping[str, Value]) -> Position | None:
    """Return the rounded position that signals tell; None: they do not, or not a place on Earth."""
    latitude, longitude = signals.get(LATITUDE), signals.get(LONGITUDE)
    if not isinstance(latitude, float) or not isinstance(longitude, float):
        return None
    # A NaN is in no range.
    if not (-90 <= latitude <= 90 and -180 <= longitude <= 180):
        return None
    return round(latitude, DECIMALS), round(longitude, DECIMALS)
