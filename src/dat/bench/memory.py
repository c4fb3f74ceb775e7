"""How much memory this process has, and has had at most."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes in memory now; where the system does not tell, the most there ever were."""
    return _status("VmRSS") or _ever()


def peak() -> int:
    """The most bytes in memory since `reset_peak`, or ever."""
    return _status("VmHWM") or _ever()


def reset_peak() -> bool:
    """Count the peak anew; false where the system cannot."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def _status(name: str) -> int:
    if not STATUS.exists():
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), flags=re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _ever() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
