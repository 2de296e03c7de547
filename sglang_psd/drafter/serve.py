"""Main loop of the drafter process: rounds first, prefill when there is time."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import os
import signal
import time
from collections import deque

import msgspec

from sglang_psd.channel.messages import (
    SCHEMA_VERSION,
    Close,
    Failure,
    Features,
    Load,
    Message,
    Open,
    Ping,
    Reset,
    Round,
    Shutdown,
)
from sglang_psd.channel.pulse import PulseSender
from sglang_psd.channel.transport import Channel
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.drafter.standby import await_spec, engine_module
from sglang_psd.errors import ChannelDamagedError, ProtocolError
from sglang_psd.lifeline import die_with_parent

logger = logging.getLogger(__name__)

PARENT_CHECK_S = 1.0
# Messages read ahead of the one being served; more stay in the queue, whose sender notices when it is full.
INBOX_MESSAGES = 4096
# How many of them are looked through for rounds that overtake the one being served: each slot's next is among them.
LOOK_AHEAD = 16


class DrafterLoop:
    """Serves one channel until ``Shutdown`` or until the parent is gone.

    Parameters
    ----------
    engine : DraftEngine
        Anything with its methods; the unit tests pass a stand-in.
    channel : Channel
    parent_pid : int
        The scheduler; the loop ends when it is no longer this process's parent.
    """

    def __init__(self, engine, channel: Channel, parent_pid: int):
        self._engine = engine
        self._channel = channel
        self._parent_pid = parent_pid
        self._inbox: deque[tuple[float, Message]] = deque()

    def run(self) -> None:
        """Serve until told to leave."""
        answered = False
        while self._has_parent():
            self._drain(PARENT_CHECK_S)
            while self._inbox:
                received_s, message = self._inbox.popleft()
                if isinstance(message, Shutdown):
                    return
                self._handle(message, received_s)
                self._drain(0.0)
                answered = answered or isinstance(message, Round)
                if answered and not self._inbox:
                    answered = False
                    self._engine.use_pause()
                    self._drain(0.0)
            while not self._inbox and self._engine.prefill_some():
                self._drain(0.0)

    def _has_parent(self) -> bool:
        return os.getppid() == self._parent_pid

    def _send(self, message: Message) -> None:
        """Wait for a scheduler that does not read at the moment; without one, nobody misses the message."""
        self._channel.send_patiently(message, PARENT_CHECK_S, self._has_parent)

    def _refuse(self, error: ProtocolError) -> None:
        logger.warning("%s", error)
        self._send(Failure(str(error), fatal=False))

    def _drain(self, timeout_s: float) -> None:
        while len(self._inbox) < INBOX_MESSAGES:
            try:
                message = self._channel.receive(timeout_s)
            except ChannelDamagedError:
                raise
            except ProtocolError as error:
                self._refuse(error)
                continue
            if message is None:
                return
            self._inbox.append((time.monotonic(), message))
            timeout_s = 0.0

    def _handle(self, message: Message, received_s: float) -> None:
        if isinstance(message, Open):
            try:
                self._engine.open(message)
            except ProtocolError as error:
                self._refuse(error)
        elif isinstance(message, Close):
            self._engine.close(message)
        elif isinstance(message, Features):
            self._take_features(message)
        elif isinstance(message, Round):
            self._draft(message, received_s)
        elif isinstance(message, Reset):
            self._engine.reset()
        elif isinstance(message, Load):
            self._send(self._engine.load(message))
        elif isinstance(message, Ping):
            self._send(self._engine.stats(message.ping_id))

    def _take_features(self, message: Features) -> None:
        try:
            self._send(self._engine.take_features(message))
        except ProtocolError as error:
            self._refuse(error)

    def _draft(self, message: Round, received_s: float) -> None:
        """Answer rows that only need decode steps first; rows whose prompt is still to be read come after.

        A row that a later round overtakes is only committed: nobody waits for its drafts any more.
        """
        ahead = itertools.islice(self._inbox, LOOK_AHEAD)
        overtaken = {row.rid for _, later in ahead if isinstance(later, Round) for row in later.rows}
        if not overtaken and (answer := self._engine.draft_known(message, received_s)) is not None:
            self._send(answer)
            return
        rows = message.rows
        if overtaken:
            for row in rows:
                if row.rid in overtaken:
                    self._engine.commit(row)
            rows = [row for row in rows if row.rid not in overtaken]
        behind = [self._engine.backlog(row.rid) > 0 for row in rows]
        warm = [row for row, late in zip(rows, behind) if not late]
        cold = [row for row, late in zip(rows, behind) if late]
        for group in (warm, cold):
            if group:
                self._send(self._engine.draft(message.round_id, group, message.num_steps, received_s))


def make_engine(spec: DrafterSpec):
    """Load what ``spec`` names."""
    module = importlib.import_module(engine_module(spec))
    return module.DraftEngine(spec) if spec.head is None else module.EagleEngine(spec)


def bind_life_to_parent(parent_pid: int) -> None:
    """Die with the parent and leave Ctrl-C to it.

    The scheduler ends this process (``Shutdown``, then SIGTERM); a Ctrl-C that reaches the whole process group must
    not race with that. If the parent is killed outright the kernel sends SIGKILL here.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _last_words(channel: Channel, error: BaseException) -> None:
    """Say why this process ends, if anybody listens."""
    with contextlib.suppress(ChannelDamagedError):
        if channel.send_patiently(Failure(f"{type(error).__name__}: {error}", fatal=True), 0.1, lambda: False):
            time.sleep(0.5)  # let the message leave before the socket goes


def _name_process(name: str) -> None:
    try:
        import setproctitle

        setproctitle.setproctitle(name)
    except ImportError:
        pass


def main(argv: list[str]) -> int:
    """Entry point of the child process; ``argv[0]`` is a ``DrafterSpec`` as JSON, without endpoint for a standby."""
    spec = msgspec.json.decode(argv[0], type=DrafterSpec)
    bind_life_to_parent(spec.parent_pid)
    logging.basicConfig(
        level=spec.log_level.upper(), format="[%(asctime)s DRAFTER] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    if not spec.endpoint:
        _name_process("sglang_psd::standby")
        spec = await_spec(spec)
    _name_process("sglang_psd::drafter")
    channel = Channel(spec.endpoint, bind=False, spin_s=spec.spin_s, lanes=spec.lanes)
    PulseSender(spec.pulse_endpoint)
    try:
        if spec.schema_version != SCHEMA_VERSION:
            raise ProtocolError(
                f"this drafter speaks schema {SCHEMA_VERSION}, its server {spec.schema_version}; "
                "install the same sglang-psd on both sides."
            )
        engine = make_engine(spec)
    except BaseException as error:
        logger.exception("The drafter could not start.")
        _last_words(channel, error)
        return 1
    # A round takes milliseconds: no pause for looking through everything that was imported.
    gc.collect()
    gc.freeze()
    hello = engine.hello(os.getpid())
    channel.send(hello)
    logger.info(
        "Drafter ready in %.1f s on %s: %d KV tokens, weights %.2f GB, KV %.2f GB.",
        hello.load_s,
        hello.device,
        hello.kv_tokens,
        hello.weight_gb,
        hello.kv_gb,
    )
    try:
        DrafterLoop(engine, channel, spec.parent_pid).run()
    except Exception as error:
        logger.exception("The drafter failed.")
        _last_words(channel, error)
        return 1
    finally:
        channel.close()
    return 0
