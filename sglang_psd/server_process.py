"""A ``sglang`` server as a child process: start, wait until it serves, stop without leaving anything behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from sglang_psd.errors import PSDError

# "ValueError: …", "torch.OutOfMemoryError: …": as a traceback ends.
_RAISED = re.compile(r"[\w.]*(Error|Exception): \S")


class ServerStartError(PSDError, RuntimeError):
    """The server process ended, or did not answer, before it was ready."""


# Below what systems hand out by themselves: a server binds its ports only when all is loaded.
PORTS = range(20_000, 32_000)
# Whatever a program or a test seeds, processes that choose at the same time choose differently.
_RANDOM = random.SystemRandom()


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now.

    Raises
    ------
    PSDError
        There is none among a few hundred of ``PORTS``.
    """
    for port in _RANDOM.sample(PORTS, 300):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise PSDError(f"No TCP port from {PORTS.start} to {PORTS.stop - 1} is free on the loopback interface.")


def ports_of(arguments: Sequence[str]) -> dict[str, int]:
    """Flags and ports for a server with these arguments.

    SGLang itself takes a port for its ranks from those that the system hands out, and binds it when the processes are
    up, seconds later: until then any connection may get it. With data parallelism it needs one per replica, and
    chooses all of them.
    """
    given = {argument.split("=")[0] for argument in arguments}
    left_alone = given & {"--nccl-port", "--dp", "--dp-size", "--data-parallel-size"}
    return {flag: free_port() for flag in (["--port"] if left_alone else ["--port", "--nccl-port"])}


def cause_in(log: str) -> str:
    """The message of the last exception that a log shows, else its last line; a parent's clean-up comes after it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or lines or [""])[-1]


class ServerProcess:
    """Runs a server command with ``--host`` and ports added (``ports_of``).

    Parameters
    ----------
    arguments : sequence of str
        Flags of the server, ``--model-path`` included.
    log_path : Path
        Receives stdout and stderr.
    command : sequence of str, optional
        What to run; default ``python -m sglang.launch_server``.
    environment : dict, optional
        Added to this process's environment.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        command: Sequence[str] | None = None,
        environment: dict[str, str] | None = None,
    ):
        ports = ports_of(arguments)
        self.port = ports["--port"]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        base = list(command or (sys.executable, "-m", "sglang.launch_server"))
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                [*base, *arguments, "--host", "127.0.0.1", *(str(part) for pair in ports.items() for part in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    def running(self) -> bool:
        """Whether the launcher still runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float, on_tick: Callable[[float], None] | None = None) -> float:
        """Wait until ``/health_generate`` answers; returns the seconds it took.

        Raises
        ------
        ServerStartError
            The process ended or the time is up; the message carries the end of its log.
        """
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if not self.running():
                raise ServerStartError(f"The server ended with code {self._process.returncode}:\n{self.log_tail()}")
            if self._healthy():
                return time.monotonic() - started
            if on_tick is not None:
                on_tick(time.monotonic() - started)
            time.sleep(0.25)
        raise ServerStartError(f"The server was not ready within {timeout_s:.0f} s:\n{self.log_tail()}")

    def recovers(self, timeout_s: float) -> bool:
        """Whether the server answers within this time; False as soon as it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline:
            if self._healthy():
                return True
            time.sleep(0.25)
        return False

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health_generate", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self, lines: int = 25) -> str:
        """Last lines of the server's log."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def cause(self) -> str:
        """The line of the log that says why the server ended: its last exception, else its last line."""
        return cause_in(self.log_tail(200))

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the launcher and every process below it, by their own pids."""
        try:
            tree = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            tree = []
        for process in tree:
            _signal(process, "terminate")
        _, left = psutil.wait_procs(tree, timeout=timeout_s / 2)
        for process in left:
            _signal(process, "kill")
        psutil.wait_procs(left, timeout=timeout_s / 2)
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info) -> None:
        self.stop()


def _signal(process: psutil.Process, method: str) -> None:
    try:
        getattr(process, method)()
    except psutil.NoSuchProcess:
        pass
