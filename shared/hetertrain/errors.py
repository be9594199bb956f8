"""Every deliberate error, each with a stable code for logs, metrics, exit codes and API.

A message says what was expected, what was found and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class HetertrainError(Exception):
    """Root of all deliberate errors."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class SettingsError(HetertrainError):
    """A setting is missing or wrong; the message names flag, variable and file key."""

    code = "settings_invalid"
    exit_code = 2


class TaskError(HetertrainError):
    """The user's task cannot be loaded or broke its contract."""

    code = "task_invalid"
    exit_code = 3


class LayoutError(HetertrainError):
    """Tensors do not fit the job's parameter layout."""

    code = "layout_mismatch"
    exit_code = 4


class PayloadError(HetertrainError):
    """A codec payload is malformed, truncated, oversized or hostile."""

    code = "payload_invalid"
    exit_code = 5


class NonFiniteError(PayloadError):
    """A codec payload has values that are not numbers, or infinite."""


class FrameError(HetertrainError):
    """A frame is damaged, foreign, oversized or misplaced; ``reason`` labels the counter."""

    code = "frame_invalid"
    exit_code = 6

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class TransportError(HetertrainError):
    """A connection ended for good, as when another process took this node's session over."""

    code = "transport_failed"
    exit_code = 7


class StoreError(HetertrainError):
    """A durable store (outbox, inbox, checkpoints) cannot be read or written."""

    code = "store_failed"
    exit_code = 8


class TrainError(HetertrainError):
    """A local training step failed."""

    code = "train_failed"
    exit_code = 9


class CredentialError(HetertrainError):
    """A key, certificate, claim or password is wrong, expired or revoked."""

    code = "credential_refused"
    exit_code = 10


class ControlError(HetertrainError):
    """The control plane refused a request, or cannot be reached; ``problem`` is its own code."""

    code = "control_refused"
    exit_code = 11

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(f"{problem}: {message}")
        self.problem = problem


class AgentError(HetertrainError):
    """The agent of a session ended, or has nothing to say; ``agent_exit_code`` is its exit code
    (None: it has none yet), ``last_words`` the end of its log.
    """

    code = "agent_ended"
    exit_code = 12

    def __init__(
        self, message: str, agent_exit_code: int | None = None, last_words: str = ""
    ) -> None:
        super().__init__(message)
        self.agent_exit_code = agent_exit_code
        self.last_words = last_words
