"""Who can reach the wire, and the drafter's pulse on it."""

from __future__ import annotations

import ast
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

import sglang_psd
from sglang_psd.channel import messages as m
from sglang_psd.channel import pulse, transport
from sglang_psd.channel.endpoints import CurveKeys, PrivateEndpoint, check_endpoint
from sglang_psd.channel.pulse import PulseReader, PulseSender
from sglang_psd.channel.transport import Channel
from sglang_psd.drafter import process as process_module
from sglang_psd.drafter.process import DrafterProcess
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.errors import DrafterStartError, EndpointError, UnsendableError
from sglang_psd.server_process import free_port

SPEC = DrafterSpec("", os.getpid(), "draft", "cpu", "cpu", "float32", "torch_native", 0.5, 4, 100, 3, 8, 1)


@pytest.fixture
def endpoint():
    found = PrivateEndpoint()
    yield found
    found.cleanup()


# --- addresses -----------------------------------------------------------------------------------


def test_files_are_the_users_own(endpoint) -> None:
    channel, reader = Channel(endpoint.address, bind=True), PulseReader(endpoint.pulse_address)
    try:
        assert stat.S_IMODE(os.stat(endpoint.folder).st_mode) == 0o700
        for path in (endpoint.path, endpoint.pulse_path):
            assert stat.S_ISSOCK(os.stat(path).st_mode) and stat.S_IMODE(os.stat(path).st_mode) == 0o600
    finally:
        channel.close()
        reader.close()


def test_names_cannot_be_guessed_and_do_not_collide() -> None:
    made = [PrivateEndpoint() for _ in range(20)]
    try:
        names = [path for endpoint in made for path in (endpoint.path, endpoint.pulse_path)]
        assert len(set(names)) == 40 and all(len(os.path.basename(name)) == 16 for name in names)
    finally:
        for endpoint in made:
            endpoint.cleanup()


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://127.0.0.1:5", "tcp://127.8.0.1:*", "tcp://[::1]:5"])
def test_local_addresses_need_no_key(address: str) -> None:
    check_endpoint(address, None)


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5", "tcp://*:5", "tcp://10.0.0.1:5", "tcp://localhost:5", "tcp://[::]:5", "tcp://:5", "x"],
)
def test_others_are_refused_without_a_key(address: str) -> None:
    with pytest.raises(EndpointError, match="CURVE"):
        Channel(address, bind=True)
    check_endpoint(address, CurveKeys.generate())


def test_a_key_lets_in_who_knows_it_and_nobody_else() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    server = CurveKeys.generate()
    scheduler = Channel(address, bind=True, keys=server)
    stranger = Channel(address, bind=False, keys=CurveKeys.generate(peer=CurveKeys.generate().public))
    plain = Channel(address, bind=False)
    try:
        for uninvited in (stranger, plain):
            uninvited.send_patiently(m.Ping(666), 0.1, lambda: False)
        drafter = Channel(address, bind=False, keys=CurveKeys.generate(peer=server.public))
        drafter.send_patiently(m.Ping(1), 0.05, lambda: True)
        assert scheduler.receive(5.0) == m.Ping(1)
        scheduler.send(m.Ping(2))
        assert drafter.receive(5.0) == m.Ping(2)
        assert scheduler.receive(0.0) is None, "a stranger's message came through"
        drafter.close()
    finally:
        for channel in (scheduler, stranger, plain):
            channel.close()


def test_a_long_tmpdir_is_named(monkeypatch, tmp_path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(EndpointError, match="TMPDIR"):
        PrivateEndpoint()
    assert not list(folder.iterdir())


def test_no_place_for_a_socket_is_named(monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(EndpointError, match="TMPDIR"):
        PrivateEndpoint()


def test_nothing_on_either_side_unpickles() -> None:
    root = Path(sglang_psd.__file__).parent
    for path in [*(root / "channel").glob("*.py"), *(root / "drafter").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            assert not {"pickle", "marshal", "dill", "recv_pyobj", "send_pyobj"}.intersection(names), path


def test_a_spinning_reader_sees_what_comes_early_and_late(endpoint) -> None:
    reader = Channel(endpoint.address, bind=True, spin_s=0.05)
    sender = Channel(endpoint.address, bind=False)
    try:
        for delay_s in (0.0, 0.02, 0.2):
            timer = threading.Timer(delay_s, lambda: sender.send_patiently(m.Ping(7), 0.05, lambda: True))
            timer.start()
            assert reader.receive(10.0) == m.Ping(7)
            timer.join()
        started = time.monotonic()
        assert reader.receive(0.1) is None
        assert time.monotonic() - started >= 0.1
    finally:
        reader.close()
        sender.close()


def test_nobody_spins_on_an_idle_channel(endpoint, monkeypatch) -> None:
    """A look takes microseconds: hundreds of them while messages come and go, one for each sleep afterwards."""
    reader, sender = Channel(endpoint.address, bind=True, spin_s=0.2), Channel(endpoint.address, bind=False)
    looks: list[float] = []
    take = reader._wire.take
    monkeypatch.setattr(reader._wire, "take", lambda: looks.append(time.monotonic()) or take())
    try:
        for expected_busy in (True, False):
            if expected_busy:
                sender.send(m.Ping(7))
                assert reader.receive(10.0) == m.Ping(7)
            else:
                reader._last_message_s -= 10.0
            looks.clear()
            assert reader.receive(0.1) is None
            assert (len(looks) > 50) == expected_busy, len(looks)
    finally:
        reader.close()
        sender.close()


def test_only_a_gpu_host_with_many_cores_spins(monkeypatch) -> None:
    monkeypatch.setattr(transport.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert transport.spin_time("cuda") > 0 == transport.spin_time("cpu")
    monkeypatch.setattr(transport.os, "sched_getaffinity", lambda pid: {0, 1})
    assert transport.spin_time("cuda") == 0


# --- size ----------------------------------------------------------------------------------------


def test_a_message_too_long_is_refused_where_it_is_made(endpoint, monkeypatch) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 1000)
    scheduler, drafter = Channel(endpoint.address, bind=True), Channel(endpoint.address, bind=False)
    try:
        drafter.send_patiently(m.Ping(0), 0.05, lambda: True)
        assert scheduler.receive(5.0) == m.Ping(0)
        with pytest.raises(UnsendableError, match="1000 at most"):
            scheduler.send(m.Close(["r" * 2000]))
        scheduler.send(m.Ping(1))
        assert drafter.receive(5.0) == m.Ping(1)
    finally:
        scheduler.close()
        drafter.close()


def test_a_flood_from_a_stranger_is_cut_off(endpoint, monkeypatch) -> None:
    """A frame beyond the limit never reaches the reader, and the reader lives on."""
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 1000)
    reader = Channel(endpoint.address, bind=True)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.PAIR)
        socket.connect(endpoint.address)
        socket.send(b"x" * 100_000)
        assert reader.receive(0.3) is None
        context.destroy(linger=0)
        # A pair takes one peer: whoever comes before the stranger's end has been noticed is turned away.
        for _ in range(20):
            good = Channel(endpoint.address, bind=False)
            good.send_patiently(m.Ping(1), 0.05, lambda: True)
            received = reader.receive(1.0)
            good.close()
            if received is not None:
                break
        assert received == m.Ping(1)
    finally:
        context.destroy(linger=0)
        reader.close()


def test_a_patient_sender_waits_for_room_and_gives_up_when_told(endpoint, monkeypatch) -> None:
    monkeypatch.setattr(transport, "QUEUE_MESSAGES", 8)
    reader, sender = Channel(endpoint.address, bind=True), Channel(endpoint.address, bind=False)
    try:
        count = 0
        # Sockets of the system buffer some, too: fill everything.
        filler = m.Close(["r" * 100_000])
        while sender.send_patiently(filler, 0.01, lambda: False):
            count += 1
        assert reader.receive(1.0) == filler
        assert sender.send_patiently(m.Ping(1), 0.05, lambda: True)
        received = 1
        while (message := reader.receive(1.0)) == filler:
            received += 1
        assert message == m.Ping(1) and received == count
    finally:
        reader.close()
        sender.close()


# --- pulse ---------------------------------------------------------------------------------------


def test_the_pulse_of_a_process_that_is_stopped_stops() -> None:
    endpoint = PrivateEndpoint()
    reader = PulseReader(endpoint.pulse_address)
    code = (
        "import sys, time; from sglang_psd.channel.pulse import PulseSender; PulseSender(sys.argv[1]); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, endpoint.pulse_address])

    def wait_for(condition) -> None:
        deadline = time.monotonic() + 30
        while not condition(reader.silence_s()):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    try:
        assert reader.silence_s() == 0.0, "nothing can be said before the first beat"
        wait_for(lambda silence: 0.0 < silence < 0.5)
        child.send_signal(19)  # SIGSTOP
        wait_for(lambda silence: silence > 1.0)
        child.send_signal(18)  # SIGCONT
        wait_for(lambda silence: silence < 0.5)
    finally:
        child.kill()
        child.wait()
        reader.close()
        endpoint.cleanup()


def test_the_first_beat_comes_at_once(monkeypatch) -> None:
    """A drafter that stops right after its greeting would otherwise be waited for as one that is well."""
    monkeypatch.setattr(pulse, "BEAT_S", 3600.0)
    endpoint = PrivateEndpoint()
    reader, sender = PulseReader(endpoint.pulse_address), PulseSender(endpoint.pulse_address)
    try:
        deadline = time.monotonic() + 30
        while reader.silence_s() == 0.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        sender.stop()
        reader.close()
        endpoint.cleanup()


def test_a_sender_ends(endpoint) -> None:
    sender = PulseSender(endpoint.pulse_address)
    sender.stop()
    assert not sender._thread.is_alive()


# --- start ---------------------------------------------------------------------------------------


class Sleeper(DrafterProcess):
    """A drafter that never says anything."""

    def _spawn(self, environment, standby):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda process: os.unlink(process._endpoint.path), "socket file .* was removed"),
        (lambda process: process._process.kill(), "died while loading"),
        (lambda process: None, "not ready within 1 s"),
    ],
)
def test_a_drafter_that_does_not_come_up_is_named_and_gone(action, words) -> None:
    process = Sleeper(SPEC, os.environ)
    action(process)
    with pytest.raises(DrafterStartError, match=words):
        process.join(1.0)
    assert not process.alive() and not os.path.exists(process._endpoint.folder)
    process.stop()


def test_a_stopped_process_ends_too() -> None:
    """SIGSTOP holds SIGTERM back; stop() does not wait for it for ever."""
    process = Sleeper(SPEC, os.environ)
    process._process.send_signal(19)
    process.stop()
    assert not process.alive()


def test_a_drafter_without_room_for_its_sockets_is_named_and_gone() -> None:
    """A full disk, say: the error is one that the supervisor answers with another attempt."""
    started: list[subprocess.Popen] = []

    class Homeless(Sleeper):
        def _spawn(self, environment, standby):
            started.append(super()._spawn(environment, standby))
            return started[-1]

        def _open_sockets(self) -> None:
            raise zmq.ZMQError(errno.ENOSPC)

    with pytest.raises(EndpointError, match=r"sockets cannot be opened .*[Nn]o space"):
        Homeless(SPEC, os.environ)
    assert started[0].wait(10) == -9


def test_a_socket_is_closed_when_there_is_no_room_for_the_other(monkeypatch) -> None:
    opened: list[Channel] = []

    class Kept(Channel):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            opened.append(self)

    def full(*_: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(process_module, "Channel", Kept)
    monkeypatch.setattr(process_module, "PulseReader", full)
    with pytest.raises(EndpointError, match="sockets cannot be opened"):
        Sleeper(SPEC, os.environ)
    assert len(opened) == 1 and opened[0]._socket.closed
