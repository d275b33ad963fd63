"""Seconds of work outstanding at a replica, and how many replicas they call for."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

METRIC = "seconds_of_work"
RATES = 30  # recent rates of which the highest counts


class WorkMeter:
    """Turns the work of an engine's snapshots, in decode steps, into seconds.

    The rate is the highest of recent intervals: an engine with few requests works more slowly than it could.

    Args:
        clock: seconds since any point.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=RATES)
        self._latest: tuple[float, float] | None = None  # time, and work done until then

    def seconds(self, snapshot: Mapping[str, Any]) -> float:
        """Seconds until the requests of a snapshot are done; 0 until work has been seen to be done.

        >>> times = iter([0.0, 2.0])
        >>> meter = WorkMeter(lambda: next(times))
        >>> meter.seconds({"work_done": 0, "work_left": 500})
        0.0
        >>> meter.seconds({"work_done": 200, "work_left": 300})
        3.0
        """
        timestamp, done = self._clock(), float(snapshot["work_done"])
        if self._latest is not None and timestamp > self._latest[0] and done > self._latest[1]:
            self._rates.append((done - self._latest[1]) / (timestamp - self._latest[0]))
        self._latest = timestamp, done
        return float(snapshot["work_left"]) / max(self._rates) if self._rates else 0.0


class SecondsOfWork:
    """The autoscaling policy: as many replicas as have `target` seconds of work each.

    Args:
        target: seconds of work outstanding for each replica.
    """

    def __init__(self, target: float) -> None:
        self.target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas for the state of a deployment (`ray.serve.config.AutoscalingContext`)."""
        reported = (context.aggregated_metrics or {}).get(METRIC, {})
        wanted_replicas = math.ceil(sum(reported.values()) / self.target)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted_replicas, low), high), {}
