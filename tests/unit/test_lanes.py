"""Shared memory between the two ends of the channel: order, wrap-around, what does not fit, sleep, damage."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq

from sglang_psd.channel import lanes, wires
from sglang_psd.channel import messages as m
from sglang_psd.channel.endpoints import PrivateEndpoint
from sglang_psd.channel.transport import Channel
from sglang_psd.drafter import process as process_module
from sglang_psd.errors import ChannelDamagedError, EndpointError, ProtocolError
from sglang_psd.scheduler.drafts import DraftClient
from sglang_psd.scheduler.vitals import Vitals
from tests.unit.test_endpoints import SPEC, Sleeper

GREEDY = m.Sampling(greedy=True, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=None)


@pytest.fixture
def endpoint() -> Iterator[PrivateEndpoint]:
    made = PrivateEndpoint()
    lanes.make_lanes(made.lanes_path)
    yield made
    made.cleanup()


def open_end(endpoint: PrivateEndpoint, *, bind: bool, spin_s: float = 0.05) -> Channel:
    return Channel(endpoint.address, bind=bind, spin_s=spin_s, lanes=endpoint.lanes_path)


@pytest.fixture
def pair(endpoint) -> Iterator[tuple[Channel, Channel]]:
    """Both ends, connected: each has said its first message, which goes over the sockets."""
    scheduler, drafter = open_end(endpoint, bind=True), open_end(endpoint, bind=False)
    drafter.send(m.Ping(0))
    assert scheduler.receive(5.0) == m.Ping(0)
    scheduler.send(m.Ping(0))
    assert drafter.receive(5.0) == m.Ping(0)
    yield scheduler, drafter
    scheduler.close()
    drafter.close()


class Frames:
    """Counts what goes over a channel's socket."""

    def __init__(self, channel: Channel, monkeypatch) -> None:
        self.sent: list[tuple[bytes, ...]] = []
        wire = channel._wire
        original = wire._send
        monkeypatch.setattr(wire, "_send", lambda *parts: self.sent.append(parts) or original(*parts))


# --- two processes -------------------------------------------------------------------------------


def echo(address: str, path: str, spin_s: float) -> None:
    """Send back whatever comes."""
    channel = Channel(address, bind=False, spin_s=spin_s, lanes=path)
    channel.send(m.Ping(0))
    while not isinstance(message := channel.receive(30.0), m.Shutdown):
        assert message is not None
        assert channel.send_patiently(message, 0.01, lambda: True)
    channel.close()


def sizes_that_meet_every_edge(rng: random.Random) -> Iterator[int]:
    """Small ones, odd ones, some that only just fit into the ring, and some that do not."""
    for _ in range(300):
        kind = rng.random()
        if kind < 0.8:
            yield rng.randrange(1, 5000)
        elif kind < 0.97:
            yield rng.randrange(1, lanes.CAPACITY // 3)
        else:
            yield lanes.CAPACITY + rng.randrange(-lanes.RESERVED_BYTES - 100, 100_000)


@pytest.mark.parametrize("spin_s", [0.05, 0.0], ids=["spinning", "sleeping"])
def test_everything_arrives_once_and_in_order(endpoint, spin_s) -> None:
    """Tens of megabytes through a ring of two, both ways, without waiting for answers."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=echo, args=(endpoint.address, endpoint.lanes_path, spin_s))
    child.start()
    channel = open_end(endpoint, bind=True, spin_s=spin_s)
    rng = random.Random(7)
    sent = [
        m.Open(str(i), rng.randbytes(4 * -(-n // 4)), GREEDY) for i, n in enumerate(sizes_that_meet_every_edge(rng))
    ]
    # Tokens are not negative.
    sent = [msgspec.structs.replace(x, tokens=(np.frombuffer(x.tokens, m.TOKEN) & 0x7FFFFFFF).tobytes()) for x in sent]
    assert sum(len(message.tokens) for message in sent) > 8 * lanes.CAPACITY
    assert channel.receive(60.0) == m.Ping(0)
    received: list[m.Message | None] = []
    for message in sent:
        while not channel.send_patiently(message, 0.001, lambda: False):
            received.append(channel.receive(30.0))
        if rng.random() < 0.5 and (back := channel.receive(0.0)) is not None:
            received.append(back)
    while len(received) < len(sent):
        received.append(channel.receive(30.0))
    channel.send(m.Shutdown())
    child.join(30)
    channel.close()
    assert received == sent and child.exitcode == 0


def test_small_messages_do_not_touch_the_sockets(pair, monkeypatch) -> None:
    scheduler, drafter = pair
    frames = Frames(scheduler, monkeypatch)
    for number in range(50_000):  # around the ring a few times: 64 bytes each at least
        scheduler.send(m.Close([f"{number:048}"]))
        assert drafter.receive(0.0) == m.Close([f"{number:048}"])
    assert not frames.sent


def test_what_does_not_fit_keeps_its_place(pair, monkeypatch) -> None:
    scheduler, drafter = pair
    frames = Frames(scheduler, monkeypatch)
    long = m.Open("long", bytes(2 * lanes.CAPACITY), GREEDY)
    sent: list[m.Message] = [m.Ping(1), long, m.Ping(2), long, long, m.Ping(3)]
    for message in sent:
        scheduler.send(message)
    assert [drafter.receive(5.0) for _ in sent] == sent
    assert drafter.receive(0.0) is None
    assert len(frames.sent) == 3


# --- full ----------------------------------------------------------------------------------------


def test_a_full_ring_overflows_into_the_sockets_and_then_is_an_error(pair) -> None:
    """As many messages as before fit in between; then it is the same error, and nothing is lost."""
    scheduler, drafter = pair
    filler, count = m.Close(["r" * 5000]), 0
    with pytest.raises(ProtocolError, match="stopped reading"):
        while True:
            scheduler.send(filler)
            count += 1
    assert count > lanes.CAPACITY // 5100 + 4000
    assert not scheduler.send_patiently(filler, 0.001, lambda: False)
    received = 0
    while drafter.receive(1.0) == filler:
        received += 1
    assert received == count
    scheduler.send(m.Ping(9))
    assert drafter.receive(5.0) == m.Ping(9)


def test_a_patient_sender_waits_for_room(pair) -> None:
    scheduler, drafter = pair
    # The sockets' threads carry on what has been queued: it is full once it has been for a while.
    refused = 0
    while refused < 20:
        refused = 0 if scheduler.send_patiently(m.Close(["r" * 5000]), 0.001, lambda: False) else refused + 1
        time.sleep(0.005 if refused else 0)
    waits = threading.Event()

    def worth_waiting() -> bool:
        waits.set()
        return True

    def read_on() -> None:
        waits.wait()
        while drafter.receive(0.0) is not None:
            pass

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        assert scheduler.send_patiently(m.Ping(1), 0.01, worth_waiting)
        assert waits.is_set()
    finally:
        waits.set()
        reader.join()


# --- sleep ---------------------------------------------------------------------------------------


def test_a_sleeper_is_woken(endpoint, monkeypatch) -> None:
    """It sleeps on the socket, so that whoever writes into the ring has to wake it; once."""
    monkeypatch.setattr(wires, "SLEEP_SLICE_S", 30.0)
    scheduler, drafter = open_end(endpoint, bind=True), open_end(endpoint, bind=False, spin_s=0.0)
    drafter.send(m.Ping(0))
    assert scheduler.receive(5.0) == m.Ping(0)
    scheduler.send(m.Ping(0))
    assert drafter.receive(5.0) == m.Ping(0)
    frames = Frames(scheduler, monkeypatch)
    asleep = scheduler._wire._writer
    for number in range(20):
        got: list[m.Message | None] = []
        thread = threading.Thread(target=lambda got=got: got.append(drafter.receive(20.0)))
        thread.start()
        while not asleep._words[asleep._asleep_at]:
            time.sleep(0)
        scheduler.send(m.Ping(number))
        scheduler.send(m.Ping(-1))
        thread.join(10.0)
        assert got == [m.Ping(number)]
        assert drafter.receive(0.0) == m.Ping(-1)
    assert frames.sent == [(b"",)] * 20
    scheduler.close()
    drafter.close()


def test_a_wake_up_that_is_lost_costs_a_slice_only(pair, monkeypatch) -> None:
    scheduler, drafter = pair
    monkeypatch.setattr(scheduler._wire._writer, "reader_sleeps", lambda: False)
    drafter.spin_s = 0.0
    sender = threading.Timer(0.02, lambda: scheduler.send(m.Ping(1)))
    sender.start()
    assert drafter.receive(10 * wires.SLEEP_SLICE_S) == m.Ping(1)
    sender.join()


def test_waiting_ends(pair) -> None:
    scheduler, _ = pair
    for spin_s in (0.0, 0.05):
        scheduler.spin_s = spin_s
        started = time.monotonic()
        assert scheduler.receive(0.12) is None
        assert time.monotonic() - started >= 0.12


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_an_error_and_never_more(endpoint, seed) -> None:
    """Random bytes over header and ring: messages, silence, or the one error; no crash, no endless loop."""
    scheduler, drafter = open_end(endpoint, bind=True), open_end(endpoint, bind=False)
    rng = random.Random(seed)
    drafter.send(m.Ping(0))
    scheduler.receive(5.0)
    scheduler.send(m.Ping(0))
    drafter.receive(5.0)
    for number in range(5):
        scheduler.send(m.Ping(number))
    with open(endpoint.lanes_path, "r+b") as file:
        for _ in range(rng.randrange(1, 30)):
            # Lines of the counters, and the beginning of the ring that is read next.
            file.seek(rng.choice([rng.randrange(64, 512), 4096 + lanes.CAPACITY + rng.randrange(256)]))
            file.write(rng.choice([rng.randbytes(1), rng.randbytes(8), b"\xff" * 8]))
    for channel in (drafter, scheduler):
        for _ in range(10):
            try:
                channel.receive(0.001)
                channel.send_patiently(m.Ping(1), 0.001, lambda: False)
            except ProtocolError:
                pass
    scheduler.close()
    drafter.close()


def write_word(endpoint: PrivateEndpoint, line: int, value: int) -> None:
    with open(endpoint.lanes_path, "r+b") as file:
        file.seek(64 * line)
        file.write((value % 2**64).to_bytes(8, "little"))


# Lines 1 to 3 belong to what the drafter writes (written, read, asleep), 4 to 6 to what the scheduler writes.
@pytest.mark.parametrize("value", [-1, 8, 16, lanes.CAPACITY, 10 * lanes.CAPACITY, 2**63])
def test_the_clients_drafter_is_lost_when_the_memory_is_damaged(pair, endpoint, value) -> None:
    """What the scheduler reads is wrong: the drafter counts as lost, so that a new one gets new memory."""
    scheduler, _ = pair

    class Process:
        channel = scheduler

        def alive(self) -> bool:
            return True

    client = DraftClient(Process(), 3, 100, Vitals(0.2), lambda answer: None)  # type: ignore[arg-type]
    client.open("a", [1, 2], GREEDY)
    client.commit([m.RoundRow("a", 3, [1])])
    read = scheduler._wire._reader._read
    write_word(endpoint, 1, read + value)
    taken = client.take([("a", 3, 3)])
    assert taken.rows == [None]
    assert not client.usable and "damaged" in str(client.failure) and client.open_requests == 0


def test_a_reader_that_claims_the_impossible_is_found_out(pair, endpoint) -> None:
    scheduler, _ = pair
    write_word(endpoint, 5, 1 << 40)
    with pytest.raises(ChannelDamagedError):
        scheduler.send(m.Ping(1))


def test_a_message_that_never_came_over_the_socket_is_noticed(pair) -> None:
    scheduler, drafter = pair
    scheduler._wire._writer.put_marker()
    assert drafter.receive(0.02) is None, "it may still come"
    long = m.Open("long", bytes(2 * lanes.CAPACITY), GREEDY)
    scheduler.send(long)
    with pytest.raises(ChannelDamagedError, match="lost"):
        drafter.receive(5.0)


def test_a_stranger_on_the_socket_is_noticed(endpoint) -> None:
    scheduler = open_end(endpoint, bind=True, spin_s=0.0)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.PAIR)
        socket.connect(endpoint.address)
        socket.send(b"no message")
        with pytest.raises(ChannelDamagedError, match="no message"):
            scheduler.receive(5.0)
    finally:
        context.destroy(linger=0)
        scheduler.close()


def test_a_file_that_is_none_or_in_use_is_refused(endpoint, tmp_path) -> None:
    for content in (b"", b"x" * 100, bytes(os.path.getsize(endpoint.lanes_path))):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(ChannelDamagedError):
            Channel(endpoint.address, bind=True, lanes=str(path))
    with pytest.raises(ChannelDamagedError, match="mapped"):
        Channel(endpoint.address, bind=True, lanes=str(tmp_path / "nothing"))
    first = open_end(endpoint, bind=False)
    first.send(m.Ping(0))
    with pytest.raises(ChannelDamagedError, match="another process"):
        open_end(endpoint, bind=False)
    first.close()


# --- life cycle ----------------------------------------------------------------------------------


def test_only_processes_that_spin_get_shared_memory(monkeypatch) -> None:
    process = Sleeper(SPEC, None)
    assert process.spec.lanes == "" and isinstance(process.channel._wire, wires.SocketWire)
    process.stop()
    monkeypatch.setattr(process_module, "spin_time", lambda device: 0.01)
    first, second = Sleeper(SPEC, None), Sleeper(SPEC, None)
    paths = [p.spec.lanes for p in (first, second)]
    assert len(set(paths)) == 2, "a successor begins with memory of its own"
    for process, path in zip((first, second), paths):
        assert isinstance(process.channel._wire, wires.LaneWire) and process.spec.spin_s == 0.01
        assert os.stat(path).st_mode & 0o777 == 0o600
        process.stop()
        process.stop()
        assert not os.path.exists(path)


def test_another_processor_or_a_full_disk_leaves_the_sockets(monkeypatch, caplog) -> None:
    monkeypatch.setattr(process_module, "spin_time", lambda device: 0.01)
    monkeypatch.setattr(lanes.platform, "machine", lambda: "aarch64")
    process = Sleeper(SPEC, None)
    process.stop()
    assert process.spec.lanes == "" and "order its stores" in caplog.text

    def full(path: str) -> None:
        raise EndpointError("No shared memory for the drafter channel (no space left).")

    monkeypatch.setattr(lanes.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(process_module, "make_lanes", full)
    process = Sleeper(SPEC, None)
    process.stop()
    assert process.spec.lanes == "" and "no space left" in caplog.text
