"""What nodes say to each other, and processes of one node: the messages, and what each field may
hold.

A message is a frame's header (``frames``); large contents travel as its payload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from hetertrain.core.eligibility import RULE_CHARACTERS_MAX, RULES_MAX
from hetertrain.core.metrics import METRIC_NAME_CHARACTERS_MAX, METRICS_MAX
from hetertrain.core.policy import SyncPolicy, WeightPolicy

NOT_ELIGIBLE = "not_eligible"
"""What a node does whose rules do not let it train."""
MEMBERS_PART_MAX, MEMBER_PARTS_MAX = 512, 64
LOG_LINES_MAX, LOG_LINE_CHARACTERS_MAX = 100, 500
Name = Annotated[str, Field(min_length=1, max_length=64)]
Text = Annotated[str, Field(max_length=512)]
ShortText = Annotated[str, Field(max_length=128)]
Digest = Annotated[str, Field(max_length=64)]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Signature = Annotated[bytes, Field(max_length=128)]
Certificate = Annotated[bytes, Field(max_length=2048)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Latitude = Annotated[float, Field(ge=-90, le=90, allow_inf_nan=False)]
Longitude = Annotated[float, Field(ge=-180, le=180, allow_inf_nan=False)]
Rules = Annotated[
    tuple[Annotated[str, Field(max_length=RULE_CHARACTERS_MAX)], ...], Field(max_length=RULES_MAX)
]
MetricName = Annotated[str, Field(min_length=1, max_length=METRIC_NAME_CHARACTERS_MAX)]
Metrics = Annotated[dict[MetricName, Number], Field(max_length=METRICS_MAX)]
FrozenStatistics = tuple[
    Count,
    Annotated[int, Field(ge=1, le=1 << 42)],
    Annotated[float, Field(ge=0, le=1 << 32)],
    Annotated[float, Field(ge=0, allow_inf_nan=False)],
]
"""(version, examples_cap, reference_steps, norm_median), within what updates are held to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's heartbeat (retained, and as its last will): whether it is there and what it does."""

    node: Name
    job: Name
    cell: Name
    """The cell whose aggregator it speaks to."""
    tier: Name
    role: Name
    is_online: bool
    proposed_tier: Annotated[str, Field(max_length=64)] = ""
    """The tier that its link is in by its own measurement, where that is another one."""
    goodput_bits_per_second: Count = 0
    """What it measured on its transfers; 0: nothing yet."""
    active: Count = 1
    """How many training nodes it stands for (a gateway: those of its cell)."""
    version: Annotated[int, Field(ge=-1)] = -1
    """The version it holds; -1: none."""
    model: Digest = ""
    """Digest of the model it holds."""
    doing: Text = ""
    waiting_for: Text = ""
    label: Text = ""
    steps: Count = 0
    step_seconds: Seconds = 0.0
    updates: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    metrics: Metrics = field(default_factory=dict)
    """What a sync's model measured on the node's own held-out data, where the job asks for it."""
    measured: Annotated[int, Field(ge=-1)] = -1
    """The version that was measured; -1: none."""
    follows: bool = True
    """Whether it takes versions now; one that rests has no use for them."""
    budgets: Text = ""
    """What it has used of what its owner lets it use; for people."""
    month_bytes: Count = 0
    """Bytes sent and received in this calendar month, over all networks."""
    backlog_updates: Count = 0
    """Updates that it still has to deliver: what waits for a verdict."""
    backlog_bytes: Count = 0
    train_failures: Count = 0
    """How often training has failed since its agent's start."""
    failure: Text = ""
    """How training failed last; empty: it has not."""
    agent: Annotated[str, Field(max_length=64)] = ""
    """The version of its software."""
    rss_mib: Count = 0
    """Memory of its agent or gateway, without the trainer's; 0: not known."""
    latitude: Latitude | None = None
    """In degrees, rounded to about 100 m; None: it does not say where it is."""
    longitude: Longitude | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Announces a transfer of ``size_bytes`` in chunks; repeated to ask how it stands."""

    node: Name
    """Who sends."""
    seq: Count
    size_bytes: Count
    chunk_bytes: Annotated[int, Field(ge=256, le=1 << 20)]
    digest: Digest
    relays: bool = False
    """The content is of other nodes' work, which is a gateway's right."""
    signature: Signature = b""
    """The sender's; with the digest it covers the whole content."""
    certificate: Certificate = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk of a transfer; the payload is the chunk."""

    node: Name
    seq: Count
    index: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Asks a sender for the chunks whose bits are set in the payload (lowest bit first)."""

    seq: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictMessage:
    """The application's acknowledgement of an update or partial."""

    node: Name
    seq: Count
    outcome: Name
    reason: Text = ""
    known: tuple[tuple[Name, Count], ...] = ()
    hold_until_clock: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """A node has nothing (more) to flush for a synchronisation."""

    node: Name
    sync: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A synchronisation begins: flush, and hold for at most the deadline."""

    sync: Count
    deadline_seconds: Seconds
    signature: Signature = b""
    certificate: Certificate = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Asks a node for what it has, however little: its last work is old."""

    version: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfirmed:
    """The aggregator's answer to a proposal: from now on the node is in this tier."""

    tier: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """What an operator wants of a job (retained)."""

    number: Count
    """A later order has a greater one."""
    state: Name
    """``running``: its nodes train; anything else: they rest."""
    train_when: Rules = ()
    """When a vehicle may train (``core.eligibility``)."""
    send_when: Rules = ()
    """When a vehicle may use its link."""
    signature: Signature = b""
    certificate: Certificate = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Asks a node for the end of its log; the control plane signs it."""

    node: Name
    number: Count
    """A later request has a greater one."""
    signature: Signature = b""
    certificate: Certificate = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """A node's answer: the end of its log, where its owner shares that."""

    node: Name
    number: Count
    """The request's."""
    is_shared: bool
    lines: Annotated[
        tuple[Annotated[str, Field(max_length=LOG_LINE_CHARACTERS_MAX)], ...],
        Field(max_length=LOG_LINES_MAX),
    ] = ()
    """The newest last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContent:
    """The head of an update; the payload is the encoded delta."""

    node: Name
    seq: Count
    base_version: Count
    examples: Count
    steps: Count
    layout: Digest
    lineage: Digest
    sync: Count | None
    integers: tuple[Integer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialContent:
    """The head of a partial; the payload is each group's sums, one after the other: int64, or
    encoded where ``group_bytes`` says how long each is.
    """

    node: Name
    seq: Count
    sync: Count | None
    groups: tuple[tuple[Count, Number], ...]
    """(base version, unit) in the order of the payload."""
    lineage: Digest
    integers: tuple[Integer, ...]
    contributions: tuple[tuple[Name, Count, Count, Count, Count, Count, Number], ...]
    group_bytes: tuple[Count, ...] = ()
    """Of each group's payload of the codec; empty: the sums are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleContent:
    """The head of updates that a gateway passes on one by one; the payload is their frames, one
    after the other.
    """

    node: Name
    seq: Count
    sync: Count | None
    lineage: Digest
    statistics: tuple[FrozenStatistics, ...]
    """Of the updates' base versions, as in a model: the cloud may have forgotten them meanwhile."""
    sizes: tuple[Count, ...]
    """Bytes of each frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContent:
    """The head of a version on its way down; the payload is the encoded model or difference."""

    version: Count
    sync: Count | None
    base: Digest
    """Digest of the model that the difference applies to; empty: the payload is the whole model."""
    model: Digest
    """Digest of the model that results."""
    layout: Digest
    lineage: Digest
    size: Annotated[int, Field(ge=1, lt=1 << 31)]
    """Number of parameters."""
    integers: tuple[Integer, ...]
    policy: SyncPolicy
    weights: WeightPolicy
    statistics: tuple[FrozenStatistics, ...]
    slowest: Count = 0
    """The clock of the slowest node."""
    return_seconds: Seconds = 0.0
    """After an outage nodes come back at random within this time, so that not all come at once."""
    local: Count = 0
    """Counts the models that a gateway without its cloud makes on a version; 0: the cloud's own."""
    signature: Signature = b""
    """The aggregator's, over all of this head; empty: it has no key."""
    certificate: Certificate = b""
    """Of the aggregator's key, DER."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorStatus:
    """What an aggregator does right now, for people who watch."""

    job: Name
    cell: Name
    version: Annotated[int, Field(ge=-1)]
    elapsed_seconds: Seconds
    sync: Count
    sync_in_seconds: Seconds | None
    is_syncing: bool
    active: Count
    open_updates: Count
    metrics: dict[str, float]
    updates_by_lag: dict[int, int]
    refused: dict[str, int]
    waiting_code: Name
    waiting_for: Text
    num_parameters: Count = 0
    """Of the job's model; 0: not said."""
    cut_in_seconds: Seconds | None = None
    """Until the open version is cut, however few its updates; None: it has none, or not said."""
    nodes_for_cut: Count = 0
    """How many nodes' updates cut it at once; 0: not said."""
    nodes_in_cut: Count = 0
    """How many have sent theirs."""
    uplink_bytes: Count = 0
    """Updates and partials that came (``wire.traffic``)."""
    uplink_dense_bytes: Count = 0
    """The same updates as float32 without compression."""
    downlink_bytes: Count = 0
    """Versions that went out, each once for all nodes of a tier."""
    downlink_dense_bytes: Count = 0
    """The same versions as float32 without compression."""
    local: Count = 0
    """Models that a gateway without its cloud has made on the version; 0: it serves the cloud's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node of a cell, as its gateway heard it last."""

    node: Name
    tier: Name
    doing: ShortText = ""
    waiting_for: Text = ""
    active: Count = 1
    version: Annotated[int, Field(ge=-1)] = -1
    updates: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    backlog_updates: Count = 0
    backlog_bytes: Count = 0
    seconds_ago: Seconds = 0.0
    """How long ago it was heard, when this was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellMembers:
    """Who is in a cell whose broker the cloud does not reach; large cells are told in parts."""

    job: Name
    cell: Name
    number: Count
    """Of the report; its parts have the same."""
    part: Annotated[int, Field(ge=0, lt=MEMBER_PARTS_MAX)]
    parts: Annotated[int, Field(ge=1, le=MEMBER_PARTS_MAX)]
    members: Annotated[tuple[Member, ...], Field(max_length=MEMBERS_PART_MAX)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """To a trainer process: train, from the start that stands in the payload or the shared memory,
    else from where it stands.
    """

    steps: Count
    is_fresh: bool
    measures: bool = False
    integers: tuple[Integer, ...] = ()
    """Of the start."""
    has_start: bool = False
    version: Annotated[int, Field(ge=-1)] = -1
    """The version that the node is on; -1: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptCommand:
    """To a trainer process: stop at the next step boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReady:
    """From a trainer process: the task is loaded."""

    examples: Count
    layout: Digest
    size: Count
    label: Text
    shares_memory: bool = False
    """It can take a vector's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShared:
    """To a trainer process: vectors of ``size`` floats stand in memory that is shared from now on;
    its descriptor follows this frame.
    """

    size: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedReport:
    """From a trainer process: stopped at a step boundary; the local vector is the payload, or
    stands in the shared memory.
    """

    steps: Count
    seconds: Seconds
    loss: Number
    integers: tuple[Integer, ...]
    metrics: Metrics = field(default_factory=dict)
    cpu_seconds: Seconds = 0.0
    """Processor time that the steps took, over all threads; 0: not measured."""
    examples: Count = 0
    """How many the node holds by now; 0: as many as before."""
    is_shared: bool = False
    """The vector stands in the shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFailed:
    """From a trainer process: the user's code failed."""

    error: Text
    message: Text
    peak_mib: Count = 0
    """The most memory that the process ever had."""


Message = (
    NodeState
    | Begin
    | Chunk
    | Missing
    | VerdictMessage
    | Flushed
    | Sync
    | Pull
    | TierConfirmed
    | JobOrder
    | LogRequest
    | LogLines
    | UpdateContent
    | PartialContent
    | BundleContent
    | ModelContent
    | AggregatorStatus
    | CellMembers
    | TrainCommand
    | InterruptCommand
    | TrainerReady
    | TrainedReport
    | TrainFailed
    | MemoryShared
)
