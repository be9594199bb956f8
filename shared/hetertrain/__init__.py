"""Heter-Train: semi-asynchronous training over a fleet of vehicles, gateways and a cloud.

This package is what all nodes share: the task interface, the state machines (``core``), the codecs
(``codec``), the protocol (``wire``) and its carriage over MQTT (``transport``).
"""

from hetertrain.errors import HetertrainError
from hetertrain.task import Node, Task

__all__ = ["HetertrainError", "Node", "Task"]
__version__ = "0.1.0"
