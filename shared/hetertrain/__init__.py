"""Heter-Train: semi-asynchronous training over a fleet of vehicles, gateways and a cloud.

This package is what all nodes share: the task interface and the client for loops of your own, the
state machines (``core``), the codecs (``codec``), the protocol (``wire``) and its carriage over
MQTT (``transport``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetertrain.errors import HetertrainError
from hetertrain.task import Node, Task

if TYPE_CHECKING:
    from hetertrain.arrays import save_initial
    from hetertrain.client import Checkpoint, Session, join

__all__ = [
    "Checkpoint",
    "HetertrainError",
    "Node",
    "Session",
    "Task",
    "join",
    "save_initial",
]
__version__ = "0.1.0"

_LATER = {
    "Checkpoint": "hetertrain.client",
    "Session": "hetertrain.client",
    "join": "hetertrain.client",
    "save_initial": "hetertrain.arrays",
}
"""Imported when they are used: an agent needs none of them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
