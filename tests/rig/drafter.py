"""The real drafter in a forked process instead of a fresh interpreter: a second instead of half a minute."""

from __future__ import annotations

import os
import signal
import sys
import traceback

import msgspec

from sglang_psd.channel.transport import Channel, PrivateEndpoint
from sglang_psd.drafter.process import DrafterProcess
from sglang_psd.drafter.spec import DrafterSpec


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

    It must be made before this process has created a process group, threads or a published server configuration.
    """

    def __init__(self, spec: DrafterSpec):
        self._endpoint = PrivateEndpoint()
        self.spec = msgspec.structs.replace(spec, endpoint=self._endpoint.address)
        pid = os.fork()
        if pid == 0:
            _child_main(self.spec)
        self._process = ForkedChild(pid)  # type: ignore[assignment]
        self.channel = Channel(self._endpoint.address, bind=True)
        self.hello = None

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
