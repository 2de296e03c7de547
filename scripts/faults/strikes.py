"""Attacks on the drafter of a running server, and how long the server needs to get over them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from scripts.faults.load import psd_section

POLL_S = 0.02
SLOW_POLL_S = 0.5
# The one attack that leaves nobody at hand.
NO_STANDBY = "SIGKILL, standby killed first"
RECOVERY_TIMEOUT_S = 300.0


def send(number: int) -> Callable[[psutil.Process], None]:
    """An attack that sends one signal."""
    return lambda drafter: drafter.send_signal(number)


def stop_briefly(drafter: psutil.Process) -> None:
    """Longer than a round waits, shorter than a hung drafter lives."""
    drafter.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    drafter.send_signal(signal.SIGCONT)


def unlink_sockets(drafter: psutil.Process) -> None:
    """Remove the socket files, then kill: the successor needs new ones."""
    for name in socket_paths(drafter):
        os.unlink(name)
    drafter.kill()


def socket_paths(drafter: psutil.Process) -> list[str]:
    """Socket files of the drafter's channel: its scheduler listens on them."""
    listening = {item.laddr for item in psutil.Process(drafter.ppid()).net_connections(kind="unix")}
    return sorted(path for path in listening if f"{os.sep}sglang-psd-" in path and os.path.exists(path))


def standbys_of(drafter: psutil.Process) -> list[psutil.Process]:
    """Processes of the same server that wait to become the drafter."""
    siblings = [process for process in psutil.Process(drafter.ppid()).children() if process.pid != drafter.pid]
    return [process for process in siblings if {"sglang_psd::standby", "sglang_psd.drafter"} & set(process.cmdline())]


def kill_with_standby(drafter: psutil.Process) -> None:
    """The successor has to import everything first."""
    for standby in standbys_of(drafter):
        standby.kill()
    drafter.kill()


STRIKES: dict[str, Callable[[psutil.Process], None]] = {
    "SIGKILL": send(signal.SIGKILL),
    "SIGSEGV": send(signal.SIGSEGV),
    "SIGSTOP for good": send(signal.SIGSTOP),
    "SIGSTOP for 2 s": stop_briefly,
    "socket files removed, then SIGKILL": unlink_sockets,
    NO_STANDBY: kill_with_standby,
}


# What ``fault_matrix.py`` does to a drafter under load, in this order; the last while nothing runs.
LOSSES = (*STRIKES, "SIGKILL, idle")


@dataclass
class Recovery:
    """Seconds from the attack.

    Attributes
    ----------
    detected_s : float
        Until ``/server_info`` says that rounds run without drafts.
    recovered_s : float
        Until it says ``parallel`` again.
    load_s : float
        How long the new drafter's engine took to load; the rest of the time is back-off and, without a standby, the
        interpreter's start.
    """

    detected_s: float
    recovered_s: float
    load_s: float


def drafter_of(url: str) -> psutil.Process:
    """The drafter process of a running server."""
    return psutil.Process(psd_section(url)["drafter"]["pid"])


def wait_for(
    url: str, wanted: Callable[[dict[str, Any]], bool], since_s: float, poll_s: float = POLL_S
) -> tuple[float, dict[str, Any]]:
    """Poll ``/server_info`` until its ``psd`` section is ``wanted``; seconds since ``since_s``, and the section."""
    while True:
        section = psd_section(url)
        seconds = time.monotonic() - since_s
        if wanted(section):
            return seconds, section
        if seconds > RECOVERY_TIMEOUT_S:
            raise TimeoutError(f"mode is {section['mode']} after {seconds:.0f} s: {section['drafter']}")
        time.sleep(poll_s)


def drafts(section: dict[str, Any]) -> bool:
    """Whether the server expects drafts."""
    return section["mode"] != "off"


def wait_until_well(url: str) -> None:
    """Wait until the server drafts and has a standby at hand, without asking so often that it takes longer."""

    def well(section: dict[str, Any]) -> bool:
        return drafts(section) and section["drafter"]["standby"] == "ready"

    wait_for(url, well, time.monotonic(), SLOW_POLL_S)


def strike(url: str, attack: Callable[[psutil.Process], None]) -> Recovery:
    """Attack the drafter, watch the server notice and recover."""

    drafter = drafter_of(url)
    begin = time.monotonic()
    # A stop that ends by itself is watched while it lasts.
    attacker = threading.Thread(target=attack, args=(drafter,))
    attacker.start()
    detected_s, _ = wait_for(url, lambda section: not drafts(section), begin)
    recovered_s, section = wait_for(url, drafts, begin)
    attacker.join()
    return Recovery(round(detected_s, 3), round(recovered_s, 3), section["drafter"]["load_s"])
