"""Tables of the control laws that have a name: laws of temperature, and laws that schedule sequences."""

from .scheduling import (
    FirstComeFirstServed,
    PaperScheduling,
    Scheduling,
    ShortestJob,
    ShortestRemaining,
)
from .temperature import EDT, DynaTemp, Exact, Integral, Mirostat, Normalised, Paper

LAWS: dict[str, type] = {
    "paper": Paper,
    "integral": Integral,
    "normalised": Normalised,
    "exact": Exact,
    "mirostat": Mirostat,
    "edt": EDT,
    "dynatemp": DynaTemp,
}
"""The temperature laws; their names are `TEMPERATURE_LAWS` in `parameter_tables/control_gains.py`."""

SCHEDULES: dict[str, type] = {
    "entropic": Scheduling,
    "paper": PaperScheduling,
    "fcfs": FirstComeFirstServed,
    "shortest-job": ShortestJob,
    "shortest-remaining": ShortestRemaining,
}
"""The scheduling laws; their names are `SCHEDULES` in `parameter_tables/control_gains.py`."""
