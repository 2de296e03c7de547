"""Servers that cannot start: what the user sees, and what is left behind."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_psd.resources import TINY_DRAFT, TINY_TARGET
from sglang_psd.server_process import free_port
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, PSD_FLAGS

ROOT = Path(__file__).resolve().parents[2]
EXIT_TIMEOUT_S = 300.0
GONE_WITHIN_S = 20.0


@dataclass
class FailedStart:
    """One attempt.

    Attributes
    ----------
    exit_code : int
    seconds : float
        From the command to its end.
    sentence : str
        The line of the log that says why.
    processes_left : int
        Of all processes that belonged to the server.
    """

    exit_code: int
    seconds: float
    sentence: str
    processes_left: int


def try_start(flags: list[str], port: int, environment: dict[str, str], needle: str) -> FailedStart:
    """Run a server that is bound to fail; ``needle`` marks the sentence in its log."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TINY_TARGET), *BASE_FLAGS, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(free_port())]
    started, seen = time.monotonic(), {}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        launcher = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while launcher.poll() is None:
            if time.monotonic() - started > EXIT_TIMEOUT_S:
                break
            try:
                seen.update({p.pid: p for p in psutil.Process(launcher.pid).children(recursive=True)})
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.1)
        seconds = time.monotonic() - started
        _, left = psutil.wait_procs(list(seen.values()), timeout=GONE_WITHIN_S)
        left = [process for process in left if runs(process)]
        for process in left:
            process.kill()
        if launcher.poll() is None:
            launcher.kill()
        code = launcher.wait()
        log.seek(0)
        lines = [line.strip() for line in log if needle in line]
    return FailedStart(code, round(seconds, 1), portable_sentence(lines[-1]) if lines else "", len(left))


def portable_sentence(line: str) -> str:
    """The end of a line without this machine's folders: paths begin at the project, or at ``$TMPDIR``."""
    line = line[-400:].replace(f"{ROOT}/", "")
    return re.sub(rf"(?<![\w.-]){re.escape(tempfile.gettempdir())}(?=/)", "$TMPDIR", line)


def runs(process: psutil.Process) -> bool:
    """Whether a process does more than wait to be reaped."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def broken_draft() -> Iterator[tuple[list[str], int, dict[str, str]]]:
    """A checkpoint without weights."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            Path(folder, name).write_bytes(Path(TINY_DRAFT, name).read_bytes())
        flags = [folder if flag == str(TINY_DRAFT) else flag for flag in PSD_FLAGS]
        yield flags, free_port(), ENVIRONMENT


@contextmanager
def removed_socket() -> Iterator[tuple[list[str], int, dict[str, str]]]:
    """Somebody tidies up TMPDIR while the drafter loads.

    A quick drafter connects before anybody could remove anything; so it is held, like one that loads slowly, until its
    socket files are gone.
    """
    ended, port = threading.Event(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=tidy_up, args=(Path(folder), port, ended))
        thread.start()
        try:
            yield PSD_FLAGS, port, {**ENVIRONMENT, "TMPDIR": folder}
        finally:
            ended.set()
            thread.join()


def tidy_up(folder: Path, port: int, ended: threading.Event) -> None:
    """Hold the drafter of the server on ``port``, remove its socket files, let it go on; gives up once ``ended``."""
    launcher = drafter = None
    while not ended.wait(0.02):
        # Found early and kept: both get another title later on.
        launcher = launcher or find_child(psutil.Process(), f"--port {port}")
        if drafter is None and launcher is not None:
            drafter = find_child(launcher, "sglang_psd.drafter")
            if drafter is not None:
                drafter.suspend()
        # Two, for messages and for the sign of life; private once nothing is done to them any more.
        sockets = [path for path in folder.glob("sglang-psd-*/*") if path.is_socket()]
        if drafter is not None and [path.stat().st_mode & 0o777 for path in sockets] == [0o600] * 2:
            for path in sockets:
                path.unlink()
            break
    if drafter is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            drafter.resume()


def find_child(process: psutil.Process, words: str) -> psutil.Process | None:
    """The process below ``process`` whose command line has ``words``; None while there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if words in " ".join(child.cmdline()):
                    return child
    return None


@contextmanager
def unwritable_trace() -> Iterator[tuple[list[str], int, dict[str, str]]]:
    """The trace's folder does not exist."""
    yield [*PSD_FLAGS, "--psd-trace", "/no/such/folder/trace.jsonl"], free_port(), ENVIRONMENT


STARTS: dict[str, tuple[Callable, str]] = {
    "drafter cannot load": (broken_draft, "DrafterStartError"),
    "socket file removed while loading": (removed_socket, "socket file"),
    "trace cannot be written": (unwritable_trace, "--psd-trace"),
}
