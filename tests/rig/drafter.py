"""The real drafter in a forked process instead of a fresh interpreter: a second instead of half a minute."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

import msgspec

from sglang_psd.channel.endpoints import PrivateEndpoint
from sglang_psd.drafter.process import DrafterProcess
from sglang_psd.drafter.spec import DrafterSpec
from tests.rig.proxy import Fault, FaultyProxy


class ForkedChild:
    """The part of ``subprocess.Popen`` that ``DrafterProcess`` uses, over a forked process."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, or None while the process runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class ForkedDrafter(DrafterProcess):
    """``DrafterProcess`` whose child is a fork of this process, running the real entry point.

    It must be made before this process has created a process group, threads or a published server configuration. A
    spare is made then, too, and waits for ``begin``.

    Parameters
    ----------
    spec : DrafterSpec
    spare : bool
        Wait for ``begin`` before loading anything.
    sabotage : callable, optional
        Called in the child before its entry point: breaks what the test wants broken.
    fault : (Fault, int), optional
        What its wire does to messages, and the seed.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        *,
        spare: bool = False,
        sabotage: Callable[[], None] | None = None,
        fault: tuple[Fault, int] | None = None,
    ):
        self._spare = spare
        self._sabotage = sabotage
        self._fault = fault
        self._front = PrivateEndpoint() if fault is not None else None
        self.proxy: FaultyProxy | None = None
        super().__init__(spec, os.environ)

    def _spawn(self, environment, standby):
        if self._front is not None:
            # What the proxy is to see must not pass beside it.
            self.spec = msgspec.structs.replace(self.spec, endpoint=self._front.address, lanes="")
        waits, self._go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(self._go)
            if self._spare and not os.read(waits, 1):
                os._exit(0)  # the test ended without needing it
            if self._sabotage is not None:
                self._sabotage()
            _child_main(self.spec)
        os.close(waits)
        return ForkedChild(pid)

    def _open_sockets(self) -> None:
        if self._spare:
            return
        super()._open_sockets()
        if self._front is not None and self._fault is not None:
            self.proxy = FaultyProxy(self._front, self._endpoint.address, *self._fault)

    def stop(self) -> None:
        """A spare that nobody needed has no sockets yet."""
        if self._spare:
            self.child.kill()
            self._endpoint.cleanup()
        else:
            super().stop()

    def _release(self) -> None:
        if self.proxy is not None and self._front is not None:
            self.proxy.close()
            self._front.cleanup()
        super()._release()

    def begin(self) -> ForkedDrafter:
        """Let a spare start, as the supervisor's ``spawn``."""
        self._spare = False
        self._open_sockets()
        os.write(self._go, b"g")
        return self

    @property
    def child(self) -> ForkedChild:
        """The drafter's process."""
        return self._process  # type: ignore[return-value]


def _child_main(spec: DrafterSpec) -> None:
    code = 1
    try:
        from sglang_psd.drafter.serve import main

        code = main([msgspec.json.encode(spec).decode()])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
