"""Every topic name, in one place.

A *cell* is the part of a fleet that speaks to one aggregator: ``cloud``, or a gateway's id. It is a
level of its own so that gateways which share a broker hear their own vehicles only.
"""

from __future__ import annotations

from hetertrain.errors import SettingsError

ROOT = "ht/1"
CLOUD_CELL = "cloud"
_FORBIDDEN = frozenset("/+#$\x00 ")
_NAME_BYTES_MAX = 64


def is_name(name: str) -> bool:
    """Tell whether ``name`` can stand as one level of a topic."""
    return 0 < len(name.encode()) <= _NAME_BYTES_MAX and not _FORBIDDEN & set(name)


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it can stand as one level of a topic.

    Raises:
        SettingsError: it is empty, too long, or has a character with a meaning in topics.
    """
    if not is_name(name):
        raise SettingsError(
            f"{kind} {name!r} must be 1 to {_NAME_BYTES_MAX} bytes, without spaces or / + # $"
        )
    return name


def up(job: str, cell: str, tier: str, node: str) -> str:
    """A node's transfers to its aggregator."""
    return f"{ROOT}/{job}/{cell}/up/{tier}/{node}"


def down(job: str, cell: str, tier: str) -> str:
    """An aggregator's versions for the nodes of one tier."""
    return f"{ROOT}/{job}/{cell}/down/{tier}"


def sync(job: str, cell: str) -> str:
    """An aggregator's synchronisation notices."""
    return f"{ROOT}/{job}/{cell}/sync"


def order(job: str) -> str:
    """What an operator wants of a job, retained: whether its nodes train."""
    return f"{ROOT}/{job}/order"


def status(job: str, cell: str) -> str:
    """An aggregator's own state, for people who watch."""
    return f"{ROOT}/{job}/{cell}/status"


def members(job: str, cell: str) -> str:
    """Who is in a cell with a broker of its own, told by its gateway."""
    return f"{ROOT}/{job}/{cell}/members"


def inbox(node: str) -> str:
    """What is meant for one node: verdicts, missing chunks, a full model."""
    return f"{ROOT}/node/{node}/in"


def log(node: str) -> str:
    """The end of a node's log, for the control plane that asked for it."""
    return f"{ROOT}/node/{node}/log"


def state(node: str) -> str:
    """A node's presence and state, retained; its last will says offline."""
    return f"{ROOT}/node/{node}/state"
