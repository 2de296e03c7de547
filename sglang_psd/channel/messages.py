"""Messages between the scheduler (rank 0) and the drafter.

The drafter is a pure function of committed tokens: everything it needs to know about a request is in
``Open`` and in the ``Round`` rows that follow, so it can be re-opened at any time. Arrays travel as raw
little-endian bytes; the wire never carries logits, tensors or pickles.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglang_psd.channel.arrays import PROB as PROB
from sglang_psd.channel.arrays import TOKEN as TOKEN
from sglang_psd.channel.arrays import Count
from sglang_psd.channel.checks import check_open, check_proposals
from sglang_psd.errors import ProtocolError

SCHEMA_VERSION = 3


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the drafter samples for one request.

    ``greedy`` rows propose the argmax. Rows with a ``seed`` share the target's noise (see
    ``sglang_psd.noise``). All others sample from their ``proposal_top_m`` most likely tokens.
    """

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None


class Open(msgspec.Struct, frozen=True, tag="open"):
    """A request was admitted (or re-admitted): build its KV from ``tokens`` (``int32`` bytes)."""

    rid: str
    tokens: bytes
    sampling: Sampling


class RoundRow(msgspec.Struct, frozen=True, array_like=True):
    """One request of a round: tokens committed since the last one, and the length they lead to."""

    rid: str
    base_len: Count
    new_tokens: list[Count]


class Round(msgspec.Struct, frozen=True, tag="round"):
    """Commit ``new_tokens`` of each row, then draft ``num_steps`` tokens for it."""

    round_id: int
    rows: list[RoundRow]
    num_steps: Annotated[int, msgspec.Meta(ge=0, le=256)]


class FeatureRow(msgspec.Struct, frozen=True, array_like=True):
    """Hidden states of one request in the mailbox: ``count`` rows, for the tokens from position ``first`` on.

    ``tokens`` are those gained with them. They are not committed yet, and never are when the request ends with them.
    """

    rid: str
    first: Count
    count: Count
    tokens: list[Count] = []


class Features(msgspec.Struct, frozen=True, tag="features"):
    """The mailbox holds rows for the drafter, request after request, from index ``offset`` on.

    ``end`` is what ``Credit`` gives back once they have been read.
    """

    offset: Count
    end: int
    rows: list[FeatureRow]


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """Everything in the mailbox before position ``end`` has been read and may be overwritten."""

    end: int


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """A CUDA allocation as another process opens it (``torch.UntypedStorage._share_cuda_``, without the device)."""

    memory: bytes
    size_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    wait_for_event: bool

    def arguments(self) -> tuple:
        """What ``torch.UntypedStorage._new_shared_cuda`` takes after the device."""
        return tuple(getattr(self, name) for name in self.__struct_fields__)


class MailboxHandle(msgspec.Struct, frozen=True):
    """How the target's process opens the drafter's mailbox: a file to map, or memory of the drafter's GPU."""

    rows: Count
    width: Count
    dtype: str
    path: str = ""
    cuda: CudaHandle | None = None


class Proposals(msgspec.Struct, frozen=True, tag="proposals"):
    """Drafts for rows of one ``Round``.

    ``base_lens[i]`` is the committed length that row ``i`` continues; the scheduler drops a row whose
    length has moved on. ``tokens`` is ``[rows, num_steps] int32``; a row without drafts (request unknown,
    context or pool exhausted) has ``counts[i] == 0``. ``sampled`` lists the row numbers that carry a
    law: ``law_ids`` and ``law_probs`` are ``[len(sampled), num_steps, top_m]``, ``int32`` and ``float32``,
    padded with probability 0. Rows not listed were proposed with certainty (one-hot law). ``unknown`` lists rows
    that the drafter does not hold, or not at this length: they have to be opened again.
    Times are seconds of ``time.monotonic``, one clock for all processes of a host.
    """

    round_id: int
    rids: list[str]
    base_lens: list[int]
    counts: list[int]
    num_steps: Count
    tokens: bytes
    sampled: list[int]
    top_m: Count
    law_ids: bytes
    law_probs: bytes
    received_s: float
    started_s: float
    finished_s: float
    unknown: list[int] = []


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Requests that ended, were retracted or left: forget them and free their KV."""

    rids: list[str]


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Forget every request: the two sides disagree on what is open."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Take new weights from a checkpoint of the same shape, and forget every request."""

    path: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Answer to ``Load``: ``error`` says why the weights are still the old ones, if they are."""

    error: str | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of the drafter: it is ready, and this is what it holds."""

    schema_version: int
    pid: int
    device: str
    vocab_size: int
    context_len: int
    kv_tokens: int
    max_requests: int
    weight_gb: float
    kv_gb: float
    load_s: float
    mailbox: MailboxHandle | None = None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask for ``Stats``."""

    ping_id: int


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """What the drafter holds now: its accounting. ``fault`` says what is wrong with it, if anything is."""

    ping_id: int
    open_requests: int
    free_kv_tokens: int
    kv_tokens: int
    rounds: int
    drafted_tokens: int
    fault: str | None = None


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The drafter cannot go on (``fatal``) or could not serve one message."""

    message: str
    fatal: bool


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave."""


_Calls = Open | Round | Features | Close | Reset | Load | Ping | Shutdown
Message = _Calls | Credit | Proposals | Loaded | Hello | Stats | Failure

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Serialise one message to msgpack."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Parse one message.

    Raises
    ------
    ProtocolError
        The bytes are not a valid message of this schema.
    """
    try:
        message = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        _check_version(_version_of(data))
        raise ProtocolError(f"The drafter channel carried a malformed message ({error}).") from None
    if isinstance(message, Proposals):
        check_proposals(message)
    elif isinstance(message, Open):
        check_open(message)
    elif isinstance(message, Hello):
        _check_version(message.schema_version)
    return message


def _version_of(data: bytes) -> int:
    """Schema version of a greeting that is no greeting of this schema; ours when it is something else."""
    try:
        found = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return SCHEMA_VERSION
    version = found.get("schema_version") if isinstance(found, dict) and found.get("type") == "hello" else None
    return version if isinstance(version, int) else SCHEMA_VERSION


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise ProtocolError(
            f"The drafter speaks schema {version}, this server {SCHEMA_VERSION}; "
            "install the same sglang-psd on both sides."
        )
