"""Life cycle of the drafter process, seen from the scheduler: spawn early, join late, leave nothing behind."""

from __future__ import annotations

import atexit
import logging
import signal
import subprocess
import time
from collections.abc import Mapping

import msgspec
import zmq

from sglang_psd.channel.endpoints import PrivateEndpoint
from sglang_psd.channel.lanes import make_lanes, supported
from sglang_psd.channel.messages import SCHEMA_VERSION, Failure, Hello, Message, Shutdown
from sglang_psd.channel.pulse import PulseReader
from sglang_psd.channel.transport import Channel, spin_time
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.drafter.standby import StandbyProcess, start_interpreter
from sglang_psd.errors import DrafterStartError, EndpointError, ProtocolError

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 3.0
ALIVE_SLICE_S = 0.05


class DrafterProcess:
    """A child process and the channel to it.

    Parameters
    ----------
    spec : DrafterSpec
        Its endpoints are filled in here.
    environment : mapping of str to str
        Of the child, complete.
    standby : StandbyProcess, optional
        Becomes the child, in place of a new process; it was started with the same specification and environment.

    Raises
    ------
    OSError
        No process can be started, or there is no place for its sockets.
    """

    def __init__(self, spec: DrafterSpec, environment: Mapping[str, str], standby: StandbyProcess | None = None):
        self._endpoint = PrivateEndpoint()
        spin_s = spin_time(spec.device)
        self.spec = msgspec.structs.replace(
            spec,
            endpoint=self._endpoint.address,
            pulse_endpoint=self._endpoint.pulse_address,
            lanes=self._make_lanes() if spin_s > 0 else "",
            spin_s=spin_s,
            schema_version=SCHEMA_VERSION,
        )
        self.hello: Hello | None = None
        self._released = False
        self._process = self._spawn(environment, standby)
        try:
            self._open_sockets()
        except (OSError, zmq.ZMQError, ProtocolError) as error:
            self._process.kill()
            if hasattr(self, "channel"):
                self.channel.close()
            self._endpoint.cleanup()
            raise EndpointError(f"The drafter's sockets cannot be opened ({error}).") from None
        atexit.register(self.stop)

    def _make_lanes(self) -> str:
        """Shared memory for two processes that spin; where there can be none the sockets carry everything."""
        try:
            if supported():
                make_lanes(self._endpoint.lanes_path)
                return self._endpoint.lanes_path
            reason = "This machine's processor does not order its stores as the drafter channel needs it."
        except EndpointError as error:
            reason = str(error)
        logger.warning("PSD: %s Messages take a quarter of a millisecond longer.", reason)
        return ""

    def _open_sockets(self) -> None:
        """The child connects whenever they are there."""
        self.channel = Channel(self._endpoint.address, bind=True, spin_s=self.spec.spin_s, lanes=self.spec.lanes)
        self.pulse = PulseReader(self._endpoint.pulse_address)

    def _spawn(self, environment: Mapping[str, str], standby: StandbyProcess | None) -> subprocess.Popen:
        if standby is not None:
            try:
                return standby.begin(self.spec)
            except OSError as error:
                logger.warning("PSD: the standby is of no use (%s); a new process is started.", error)
                standby.end()
        try:
            return start_interpreter(self.spec, environment)
        except OSError:
            self._endpoint.cleanup()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def can_answer(self) -> bool:
        """Whether there is any sense in waiting for its greeting."""
        return self.alive() and self._endpoint.exists()

    def join(self, timeout_s: float) -> Hello:
        """Wait until the drafter is ready.

        Raises
        ------
        DrafterStartError
            It failed, died, or took longer than ``timeout_s`` seconds.
        """
        if self.hello is not None:
            return self.hello
        message: Message | None
        try:
            message = self.channel.receive_within(timeout_s, ALIVE_SLICE_S, self.can_answer)
        except ProtocolError as error:
            self.stop()
            raise DrafterStartError(str(error)) from None
        if isinstance(message, Hello):
            self.hello = message
            return message
        alive, code, reachable = self.alive(), self._process.poll(), self._endpoint.exists()
        self.stop()
        where = f"The drafter ({self.spec.model_path} on {self.spec.device_label})"
        if isinstance(message, Failure):
            raise DrafterStartError(f"{where} could not start: {message.message}")
        if not alive:
            raise DrafterStartError(f"{where} died while loading (exit code {code}); its log above says why.")
        if not reachable:
            raise DrafterStartError(
                f"{where} can no longer connect: its socket file {self._endpoint.path} was removed; "
                "let TMPDIR name a folder that nobody cleans up."
            )
        raise DrafterStartError(
            f"{where} was not ready within {timeout_s:.0f} s; raise 'start_timeout_s' in --psd-config."
        )

    def abandon(self) -> None:
        """Kill the process without waiting for it: it is lost or of no use."""
        atexit.unregister(self.stop)
        if self.alive():
            self._process.kill()
        self._release()

    def stop(self) -> None:
        """End the process: ask, then terminate, then kill. Safe to call again."""
        atexit.unregister(self.stop)
        if self.alive() and not self._released:
            try:
                self.channel.send(Shutdown())
                _wait(self._process, EXIT_GRACE_S)
            except ProtocolError:
                pass
        for sig in (signal.SIGTERM, signal.SIGKILL):
            if self.alive():
                self._process.send_signal(sig)
                _wait(self._process, EXIT_GRACE_S)
        self._release()

    def _release(self) -> None:
        self._released = True
        self.channel.close()
        self.pulse.close()
        self._endpoint.cleanup()


def _wait(process: subprocess.Popen, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
