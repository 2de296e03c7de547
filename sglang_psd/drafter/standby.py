"""A drafter in waiting: a process that has imported everything, loaded nothing, and becomes the drafter when told.

Importing torch and SGLang takes much longer than loading a small draft model. A lost drafter is therefore replaced by a
process that has its imports behind it. Standby and drafter are the same command in the same environment; what a standby
is started with names no endpoints, and it waits for the specification that does. Both ends of that conversation are
here: a socket in the place of the standby's stdin, with ``READY`` one way and a ``DrafterSpec`` as a line of JSON the
other.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sglang_psd.drafter.spec import DrafterSpec

logger = logging.getLogger(__name__)

READY = b"r"
# What SGLang imports while it loads a model, besides what its worker's module needs.
LATE_IMPORTS = (
    "sglang.srt.managers.tp_worker",
    "sglang.srt.models.registry",
    "sglang.srt.server_args",
)


def start_interpreter(
    spec: DrafterSpec, environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen:
    """Start ``python -m sglang_psd.drafter``, in a fresh interpreter: neither a fork after CUDA and gloo started, nor a
    re-import of the user's ``__main__``."""
    command = [sys.executable, "-m", "sglang_psd.drafter", msgspec.json.encode(spec).decode()]
    return subprocess.Popen(command, env=dict(environment), stdin=stdin)


class StandbyProcess:
    """The scheduler's end.

    Parameters
    ----------
    spec : DrafterSpec
        Without endpoints.
    environment : mapping of str to str
        Of the process, complete.

    Raises
    ------
    OSError
        No process can be started.
    """

    def __init__(self, spec: DrafterSpec, environment: Mapping[str, str]):
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = self._start(spec, environment, theirs)
        except OSError:
            self._control.close()
            raise
        self._control.setblocking(False)
        self._imported = False

    def _start(self, spec: DrafterSpec, environment: Mapping[str, str], control: socket.socket) -> subprocess.Popen:
        return start_interpreter(spec, environment, control.fileno())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    @property
    def ready(self) -> bool:
        """Whether it has imported everything and can be told to begin."""
        if not self._imported:
            try:
                self._imported = self._control.recv(len(READY)) == READY
            except OSError:  # nothing said yet
                pass
        return self._imported and self.exit_code is None and not _stopped(self.pid)

    def begin(self, spec: DrafterSpec) -> subprocess.Popen:
        """Make it the drafter that ``spec`` describes; the process is the caller's from now on.

        Raises
        ------
        OSError
            It has ended.
        """
        with self._control:
            self._control.sendall(msgspec.json.encode(spec) + b"\n")
        return self._process

    def end(self) -> None:
        """End it without waiting: it holds nothing."""
        self._control.close()
        if self.exit_code is None:
            self._process.kill()


def _stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP; False where that cannot be found out."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def await_spec(spec: DrafterSpec) -> DrafterSpec:
    """The standby's end: import, say so, and wait for the specification to load; ends the process if none comes.

    The imports run in a thread of lower priority: to raise a priority again takes a privilege, and the thread that is
    going to draft needs the usual one.
    """
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    importer = threading.Thread(target=_import_all, args=(spec, control), name="psd-imports")
    importer.start()
    with control.makefile("rb") as lines:
        told = lines.readline()
    if not told.endswith(b"\n"):
        os._exit(0)  # the scheduler is gone, or has no use for a standby any more
    importer.join()
    logger.info("The standby becomes the drafter.")
    control.close()
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), sys.stdin.fileno())
    return msgspec.json.decode(told, type=DrafterSpec)


def _import_all(spec: DrafterSpec, control: socket.socket) -> None:
    try:
        if sys.platform == "linux":
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + spec.import_niceness
            os.setpriority(os.PRIO_PROCESS, thread, min(19, niceness))
        # A quarter of the time would go into looking for garbage among modules that stay.
        gc.disable()
        for name in (engine_module(spec), *LATE_IMPORTS):
            importlib.import_module(name)
        gc.enable()
    except BaseException:
        logger.exception("The standby of the drafter could not import what it needs.")
        os._exit(1)
    with contextlib.suppress(OSError):  # nobody listens any more: the other thread ends the process
        control.sendall(READY)


def engine_module(spec: DrafterSpec) -> str:
    """Where the engine for ``spec`` is."""
    return "sglang_psd.drafter.engine" if spec.head is None else "sglang_psd.drafter.eagle"
