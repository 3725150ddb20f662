"""Points at which a test can have the daemon killed, as a power cut would: in the middle of a write.

Armed by the environment only, when the process starts: `KVSTORE_CRASH_AT=nvme.after_sync` kills at the first passing
of that point, `KVSTORE_CRASH_AT=nvme.after_sync:7` at the seventh. Otherwise a point costs one comparison.
"""

from __future__ import annotations

import itertools
import os
import signal

from kvstore.errors import InvalidArgumentError

CRASH_VARIABLE = "KVSTORE_CRASH_AT"

CRASH_POINTS = (
    "nvme.before_data",
    "nvme.mid_data",
    "nvme.after_data",
    "nvme.after_sync",
    "nvme.in_index",
    "nvme.after_index",
    "nvme.before_segment_header",
    "nvme.after_segment_header",
    "nvme.after_create",
)
"""In the order in which a write passes them; the last three where a segment is made or given away."""

_setting = os.environ.get(CRASH_VARIABLE, "")
_armed_name, _, _armed_count = _setting.partition(":")
_passings = itertools.count(1)


def crash_point(name: str) -> None:
    """Kills this process with SIGKILL if this point is armed and it is its turn."""
    if not _setting:
        return
    assert name in CRASH_POINTS, f"{name} is no crash point"
    if name == _armed_name and next(_passings) == int(_armed_count or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def check_armed() -> str | None:
    """What is armed, for the log; raises `InvalidArgumentError` for what would never kill."""
    if not _setting:
        return None
    has_count = ":" in _setting
    is_count = _armed_count.isascii() and _armed_count.isdecimal() and int(_armed_count) > 0
    if _armed_name not in CRASH_POINTS or (has_count and not is_count):
        raise InvalidArgumentError.of(
            CRASH_VARIABLE, _setting, f"one of {', '.join(CRASH_POINTS)}; behind it, if wanted, a colon and 1 or more"
        )
    return _setting
