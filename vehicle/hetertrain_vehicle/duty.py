"""Holds a process to a share of one core, by rests between its steps: no right or cgroup needed."""

from __future__ import annotations


class DutyCycle:
    """Work of ``cpu`` seconds of processor time earns a rest until ``cpu / share`` seconds have
    passed since it began. What is rested longer is not saved up. Without a share there is no rest.
    """

    def __init__(self, share: float | None, now: float, cpu_now: float) -> None:
        self._share = share
        self._cpu = cpu_now
        """Processor time that is accounted for."""
        self._free_at = now

    def rest_seconds(self, now: float, cpu_now: float) -> float:
        """Account for the processor time up to ``cpu_now``; return how long to rest at ``now``."""
        if self._share is None:
            return 0.0
        spent, self._cpu = cpu_now - self._cpu, cpu_now
        began = max(self._free_at, now - spent)
        self._free_at = began + spent / self._share
        return max(0.0, self._free_at - now)
