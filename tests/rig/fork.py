"""Run a function in a forked process and bring its result back.

Importing SGLang takes half a minute, building a scheduler one second. So the test process imports once and every case
gets a fork of it: a fresh world of process groups, pools and global settings, at the price of the second only.
"""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

POLL_S = 0.05
PR_SET_PDEATHSIG = 1


class CaseFailed(AssertionError):
    """The forked process raised, died or took too long; the text says which, with its traceback."""


def run_forked(function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> Any:
    """Call ``function`` in a fork of this process and return its (picklable) result.

    Raises
    ------
    CaseFailed
        Whatever goes wrong in the child, its traceback included. The child and its children are gone then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    receiver, sender = Pipe(duplex=False)
    with warnings.catch_warnings():
        # The allocator's own thread is the only other one, and it is made for forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _child_main(sender, function, args, kwargs)
    sender.close()
    try:
        kind, payload = _wait(pid, receiver, timeout_s)
    finally:
        receiver.close()
        _end_group(pid)
    if kind == "error":
        raise CaseFailed("in the forked process:\n" + payload)
    return payload


def _child_main(sender: multiprocessing.connection.Connection, function, args, kwargs) -> None:
    # A group of its own: whatever it starts can be ended together with it, and nothing else.
    os.setpgid(0, 0)
    _die_with_parent()
    try:
        try:
            answer = ("ok", function(*args, **kwargs))
        except BaseException:
            answer = ("error", traceback.format_exc())
        try:
            sender.send(answer)
        except Exception:
            sender.send(("error", traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # No interpreter teardown: the parent's atexit handlers and fixtures are not this process's business.
        os._exit(0)


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the test process is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(pid: int, receiver: multiprocessing.connection.Connection, timeout_s: float) -> tuple[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not receiver.poll(POLL_S):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended and not receiver.poll(0):
            return "error", f"the process ended without a result (status {status}); its output says why"
        if time.monotonic() > deadline:
            return "error", f"no result within {timeout_s:.0f} s"
    try:
        return receiver.recv()
    except EOFError:
        return "error", "the process closed its pipe without a result"


def _end_group(pid: int) -> None:
    """End what is left of the child's process group, then reap the child."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
