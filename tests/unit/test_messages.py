"""The wire: every message survives it, and nothing else gets through."""

from __future__ import annotations

import contextlib
import os

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.channel import messages as m
from sglang_psd.channel.draft_rows import DraftBatch, DraftRow, ProposalTable
from sglang_psd.channel.endpoints import PrivateEndpoint
from sglang_psd.channel.transport import Channel
from sglang_psd.errors import ProtocolError, UnsendableError

PROPOSAL_FIELDS = sorted({*m.Proposals.__struct_fields__} - {"round_id", "received_s", "started_s", "finished_s"})
EXAMPLES = settings(max_examples=200, deadline=None)


def proposals(
    counts: tuple[int, ...] = (2, 0), steps: int = 2, sampled: tuple[int, ...] = (0,), top_m: int = 3
) -> m.Proposals:
    """Well-formed drafts for ``len(counts)`` requests."""
    rows = len(counts)
    ids = np.arange(len(sampled) * steps * top_m, dtype=m.TOKEN)
    return m.Proposals(
        round_id=7,
        rids=[f"r{i}" for i in range(rows)],
        base_lens=[10 + i for i in range(rows)],
        counts=list(counts),
        num_steps=steps,
        tokens=np.arange(rows * steps, dtype=m.TOKEN).tobytes(),
        sampled=list(sampled),
        top_m=top_m,
        law_ids=ids.tobytes(),
        law_probs=(ids / 10).astype(m.PROB).tobytes(),
        received_s=1.0,
        started_s=2.0,
        finished_s=3.0,
    )


SAMPLING = m.Sampling(greedy=False, temperature=0.7, top_k=5, top_p=0.9, min_p=0.0, seed=2**40)
HELLO = m.Hello(m.SCHEMA_VERSION, 1, "cpu", 320, 512, 4096, 8, 0.1, 0.2, 0.3)
ALL = [
    m.Open("r", np.array([1, 2, 3], m.TOKEN).tobytes(), SAMPLING),
    m.Round(1, [m.RoundRow("r", 5, [7, 8])], 3),
    proposals(),
    m.Close(["r", "s"]),
    m.Reset(),
    m.Load("/models/draft"),
    m.Loaded(),
    m.Loaded("no such file"),
    HELLO,
    m.Ping(3),
    m.Stats(3, 0, 10, 10, 1, 2),
    m.Failure("out of memory", True),
    m.Shutdown(),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_round_trip(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


def unpack(message: m.Proposals) -> dict[str, DraftRow | None]:
    """All drafts of a message, by request."""
    rows = np.arange(len(message.rids))
    batch = DraftBatch.empty(len(rows), message.num_steps)
    if len(rows):
        batch.put(rows, ProposalTable(message), rows, np.full(len(rows), message.num_steps))
    return {rid: batch.row(row) for row, rid in enumerate(message.rids)}


def test_rows_are_split() -> None:
    rows = unpack(proposals())
    first = rows["r0"]
    assert first is not None and first.base_len == 10 and first.tokens.tolist() == [0, 1]
    assert first.law_ids is not None and first.law_ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rows["r1"] is None


@given(st.binary(max_size=200))
@EXAMPLES
def test_random_bytes(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        m.decode(data)


@given(st.sampled_from(ALL), st.data())
@EXAMPLES
def test_damaged_messages(message: m.Message, data) -> None:
    """Flipped, cut or grown: it parses or it is refused by name."""
    raw = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] + data.draw(st.binary(max_size=4))
    try:
        decoded = m.decode(bytes(raw))
    except ProtocolError:
        return
    if isinstance(decoded, m.Proposals):
        unpack(decoded)


@given(st.sampled_from(PROPOSAL_FIELDS), st.data())
@EXAMPLES
def test_proposals_with_wrong_header(field: str, data) -> None:
    """No header can make the reader look outside the arrays."""
    good = proposals((2, 1, 2), 2, (0, 2), 3)
    value = getattr(good, field)
    if isinstance(value, bytes):
        wrong = data.draw(st.binary(max_size=64))
    elif isinstance(value, int):
        wrong = data.draw(st.integers(-5, 50))
    elif field == "rids":
        wrong = data.draw(st.lists(st.text(max_size=3), max_size=5))
    else:
        wrong = data.draw(st.lists(st.integers(-4, 6), max_size=5))
    try:
        decoded = m.decode(m.encode(msgspec.structs.replace(good, **{field: wrong})))
    except ProtocolError:
        return
    assert isinstance(decoded, m.Proposals)
    unpack(decoded)


def test_other_schema_is_refused() -> None:
    hello = msgspec.structs.replace(HELLO, schema_version=m.SCHEMA_VERSION + 1)
    with pytest.raises(ProtocolError, match="install the same sglang-psd"):
        m.decode(m.encode(hello))


def test_a_greeting_of_another_shape_is_told_from_garbage() -> None:
    """A later schema may have other fields: the sentence is about versions all the same."""
    raw = msgspec.msgpack.encode({"type": "hello", "schema_version": 77, "novelty": [1, 2]})
    with pytest.raises(ProtocolError, match="speaks schema 77"):
        m.decode(raw)


BAD_SAMPLING = [
    {"temperature": 0.0},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_k": 0},
    {"top_k": -3},
    {"top_k": 2**63},
    {"top_p": float("nan")},
    {"top_p": 1.5},
    {"min_p": -0.1},
    {"seed": 2**63},
]


@pytest.mark.parametrize("change", BAD_SAMPLING, ids=str)
def test_sampling_that_would_upset_the_drafter_is_refused(change: dict) -> None:
    sampling = msgspec.structs.replace(SAMPLING, **change)
    with pytest.raises(ProtocolError):
        m.decode(m.encode(m.Open("r", bytes(4), sampling)))


@pytest.mark.parametrize(
    "message",
    [
        m.Open("r", b"", SAMPLING),
        m.Open("r", b"\0\0\0", SAMPLING),
        m.Open("r", np.array([5, -1], m.TOKEN).tobytes(), SAMPLING),
        m.Round(1, [m.RoundRow("r", -1, [])], 3),
        m.Round(1, [m.RoundRow("r", 5, [-7])], 3),
        m.Round(1, [m.RoundRow("r", 5, [2**31])], 3),
        m.Round(1, [], -1),
        m.Round(1, [], 100_000),
        msgspec.structs.replace(proposals(), top_m=0, law_ids=b"", law_probs=b""),
        msgspec.structs.replace(proposals(), unknown=[2]),
        msgspec.structs.replace(proposals(), started_s=float("nan")),
        msgspec.structs.replace(proposals(), finished_s=1e300),
        msgspec.structs.replace(proposals(), received_s=-1.0),
    ],
)
def test_values_out_of_range_are_refused(message: m.Message) -> None:
    with pytest.raises(ProtocolError):
        m.decode(m.encode(message))


NESTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
TAGS = ("open", "round", "proposals", "close", "hello", "stats", "ping", "failure", "reset", "shutdown", "other")
FIELDS = sorted({field for message in ALL for field in message.__struct_fields__})


@given(st.sampled_from(TAGS), st.dictionaries(st.sampled_from(FIELDS), NESTED, max_size=12))
@EXAMPLES
def test_well_formed_msgpack_of_any_shape(tag: str, fields: dict) -> None:
    """Right tags and field names, anything in them."""
    with contextlib.suppress(ProtocolError):
        m.decode(msgspec.msgpack.encode({"type": tag, **fields}))


def test_deep_nesting_is_no_stack_overflow() -> None:
    with pytest.raises(ProtocolError):
        m.decode(b"\x91" * 200_000)


# --- transport -----------------------------------------------------------------------------------


@pytest.fixture
def pair():
    endpoint = PrivateEndpoint()
    scheduler, drafter = Channel(endpoint.address, bind=True), Channel(endpoint.address, bind=False)
    # As in a server: the drafter speaks first, so the scheduler never sends into nothing.
    drafter.send(HELLO)
    assert scheduler.receive(5.0) == HELLO
    yield scheduler, drafter
    scheduler.close()
    drafter.close()
    endpoint.cleanup()
    assert not os.path.exists(endpoint.folder)


def test_messages_arrive_in_order(pair) -> None:
    scheduler, drafter = pair
    for message in ALL:
        scheduler.send(message)
    assert [drafter.receive(2.0) for _ in ALL] == ALL
    assert drafter.receive(0.0) is None
    drafter.send(ALL[2])
    assert scheduler.receive(2.0) == ALL[2]


def test_waiting_ends(pair) -> None:
    scheduler, _ = pair
    assert scheduler.receive(0.02) is None
    assert scheduler.receive_within(5.0, 0.01, alive=lambda: False) is None


def test_a_full_queue_is_an_error_not_a_wait(pair) -> None:
    scheduler, _ = pair
    with pytest.raises(ProtocolError, match="stopped reading"):
        for _ in range(100_000):
            scheduler.send(m.Ping(0))


def test_what_msgpack_cannot_hold_is_an_error_of_that_message(pair) -> None:
    """Ids come from clients: a lone surrogate is valid JSON."""
    scheduler, drafter = pair
    for message in (m.Close(["\ud800"]), m.Open("r", bytes(4), msgspec.structs.replace(SAMPLING, seed=2**70))):
        with pytest.raises(UnsendableError):
            scheduler.send(message)
    scheduler.send(m.Ping(1))
    assert drafter.receive(2.0) == m.Ping(1)


def test_no_peer_is_an_error_not_a_wait() -> None:
    endpoint = PrivateEndpoint()
    channel = Channel(endpoint.address, bind=True)
    try:
        with pytest.raises(ProtocolError):
            channel.send(m.Ping(0))
    finally:
        channel.close()
        endpoint.cleanup()


def test_the_endpoint_is_private() -> None:
    endpoint = PrivateEndpoint()
    try:
        assert os.stat(endpoint.folder).st_mode & 0o077 == 0
    finally:
        endpoint.cleanup()
