"""The drafter's imports begin with the scheduler's, not after them.

Scheduler and drafter both import torch and SGLang before they load anything, which takes longer than the rest. A
scheduler can start the drafter only when its own imports are over, so a start would take both, one after the other.
Therefore the launching process, which knows the arguments, leaves an offer in the environment of the next process that
it spawns, the scheduler. That takes it while its interpreter starts (``cpu/bootstrap.py``), and starts a standby
(``drafter/standby.py``), its own child. When the scheduler is ready to start its drafter, that standby becomes it.
Without the offer, or when what it says is not what the scheduler would start, nothing is lost but time, and the log
says why. Nothing heavy may be imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.drafter.standby import StandbyProcess
from sglang_psd.lifeline import die_with_parent

VARIABLE = "SGLANG_PSD_EARLY_START"
# What children of ``multiprocessing`` are started with; its own helpers are not.
_SPAWNED = "--multiprocessing-fork"


@dataclass
class EarlyStart:
    """A standby that was started while the interpreter was.

    Attributes
    ----------
    standby : StandbyProcess
    spec : DrafterSpec
        What it was started with.
    visible_device : str or None
        ``CUDA_VISIBLE_DEVICES`` as it was set for it; None: left alone.
    """

    standby: StandbyProcess
    spec: DrafterSpec
    visible_device: str | None


class _Declined(Exception):
    """The offer is not for this process; says why."""


_start_plain = Popen.__init__
_pending: str | None = None  # the offer for the process that is spawned next
_started: EarlyStart | None = None
_absence = "it found no offer when its interpreter started"


def offer(spec: DrafterSpec, visible_device: str | None) -> None:
    """Let the next process that this one spawns start a drafter's imports, and no other.

    SGLang spawns its detokenizer right after the scheduler: if both had the offer, it would be a matter of luck who
    takes it.

    Parameters
    ----------
    spec : DrafterSpec
        Without endpoints; its ``parent_pid`` is filled in by who takes the offer.
    visible_device : str or None
        Value of ``CUDA_VISIBLE_DEVICES`` for it; None leaves the environment alone.
    """
    global _pending
    # An offer that nobody was spawned for (the server did not come that far) is out of date: it names another drafter.
    _pending = write_offer(spec, visible_device)
    if Popen.__init__ is not _start_with_offer:
        Popen.__init__ = _start_with_offer  # type: ignore[assignment, method-assign]


def _start_with_offer(self: Any, process: BaseProcess) -> None:
    """``Popen.__init__`` for the next process only."""
    global _pending
    Popen.__init__ = _start_plain  # type: ignore[method-assign]
    text, _pending = _pending, None
    if text is None:  # another thread was quicker
        return _start_plain(self, process)
    os.environ[VARIABLE] = text
    try:
        _start_plain(self, process)
    finally:
        os.environ.pop(VARIABLE, None)


def write_offer(spec: DrafterSpec, visible_device: str | None) -> str:
    """The offer as ``VARIABLE`` holds it. One process can take it: there is one file to remove."""
    file, token = tempfile.mkstemp(prefix="sglang-psd-")
    os.close(file)
    atexit.register(_withdraw, token)
    offered = {"token": token, "by": os.getpid(), "spec": spec, "visible_device": visible_device}
    return msgspec.json.encode(offered).decode()


def _withdraw(token: str) -> None:
    with contextlib.suppress(OSError):  # it has been taken
        os.unlink(token)


def accept() -> None:
    """Take the offer, if there is one and nobody has; called when an interpreter starts.

    Never fails: where there is no early start in the end, ``why_none`` says so.
    """
    global _started, _absence
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return
    try:
        _started = _accept(msgspec.json.decode(text))
    except _Declined as reason:
        _absence = str(reason)
    except Exception as error:
        _absence = f"taking the offer failed with {type(error).__name__}: {error}"


def _accept(offered: dict[str, Any]) -> EarlyStart:
    if _SPAWNED not in sys.orig_argv:
        raise _Declined("it was not spawned by multiprocessing")
    if offered["by"] != os.getppid():
        raise _Declined(f"the offer was for children of process {offered['by']}, and it is one of {os.getppid()}")
    try:
        os.unlink(offered["token"])
    except FileNotFoundError:
        raise _Declined("another process had taken the offer") from None
    # As SGLang's schedulers do later on: a launcher that is told to stop would leave one that still imports.
    die_with_parent(offered["by"])
    return _start(msgspec.convert(offered["spec"], DrafterSpec), offered["visible_device"])


def _start(spec: DrafterSpec, visible_device: str | None) -> EarlyStart:
    spec = msgspec.structs.replace(spec, parent_pid=os.getpid(), import_niceness=0)
    visible = {} if visible_device is None else {"CUDA_VISIBLE_DEVICES": visible_device}
    return EarlyStart(StandbyProcess(spec, {**os.environ, **visible}), spec, visible_device)


def take() -> EarlyStart | None:
    """The standby that this process started, for the caller to keep or to discard; once."""
    global _started, _absence
    started, _started = _started, None
    if started is not None:
        _absence = "it has been taken"
    return started


def why_none() -> str:
    """Why ``take`` gives None in this process, as the end of a sentence about it."""
    return _absence
