"""The memory of this process: now, and at its peak."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident() -> int:
    """Resident bytes now; without /proc, the peak since the process started."""
    return _status("VmRSS") or _lifetime_peak()


def peak() -> int:
    """Peak resident bytes since `reset_peak`, or since the process started."""
    return _status("VmHWM") or _lifetime_peak()


def reset_peak() -> bool:
    """Reset the peak; return whether the system supports that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def _status(name: str) -> int:
    if not STATUS.exists():
        return 0
    match = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), flags=re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def _lifetime_peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
