"""A process that does not outlive the one that started it. Standard library only: used while interpreters start."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends; end now if ``parent_pid`` is its parent no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died while this interpreter was starting
        os._exit(0)
