"""What the control plane refuses, and why: a stable code and an HTTP status each (RFC 9457)."""

from __future__ import annotations

from hetertrain.errors import HetertrainError


class ProblemError(HetertrainError):
    """A request that is refused; ``problem`` is the code that clients act on."""

    code = "control_refused"
    exit_code = 11

    def __init__(self, status: int, problem: str, detail: str, retry_seconds: int | None = None):
        super().__init__(detail)
        self.status = status
        self.problem = problem
        self.detail = detail
        self.retry_seconds = retry_seconds


def not_found(kind: str, name: object) -> ProblemError:
    """Say that there is no such thing."""
    return ProblemError(404, f"{kind}_unknown", f"there is no {kind} {name}")


def conflict(problem: str, detail: str) -> ProblemError:
    """Say that the thing's state does not allow it."""
    return ProblemError(409, problem, detail)
