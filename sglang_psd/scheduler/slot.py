"""One of the batches that take turns, and a view over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_psd.scheduler.answers import Taken
    from sglang_psd.scheduler.commits import Prospect
    from sglang_psd.scheduler.stops import ChunkEnds
    from sglang_psd.target.hidden_states import TargetFeatures
    from sglang_psd.target.processors import ChunkCalls


@dataclass
class InFlight:
    """A launched forward whose result has not been processed; filled in while it is launched.

    Attributes
    ----------
    sizes : tuple of int
        Slot sizes at launch.
    batch : ScheduleBatch
        Copy of the batch as launched.
    result : GenerationBatchResult
    ends : ChunkEnds
        What its chunks may end with.
    prospects : list of Prospect or None
        What is known about its requests before their tokens are there; only on rank 0.
    launch_s : float
        ``time.monotonic`` when everything was there, drafts included.
    taken : Taken or None
        Drafts that went into it; None for a prefill.
    timer : object
        Handle of ``ForwardTimer`` for the forward's begin and end.
    collected : bool
        Whether the result is on the host and has been sent to the drafter; what follows is known from then on.
    result_s, commit_s : float
        When that happened.
    tokens : list of list of int
        What each request gains.
    may_end : bool
        Whether one of them may end its request before its length does.
    lengths_before : dict of str to int
        Output length of each request before these tokens.
    committed : set of str
        Requests whose new tokens have been sent to the drafter.
    features : TargetFeatures or None
        Hidden states for an EAGLE head, until they have been handed over.
    calls : ChunkCalls or None
        What custom logit processors did, drafts that may be rejected included.
    """

    sizes: tuple[int, ...]
    batch: ScheduleBatch = field(init=False)
    result: GenerationBatchResult = field(init=False)
    ends: ChunkEnds = field(init=False)
    prospects: list[Prospect | None] = field(default_factory=list)
    launch_s: float = 0.0
    taken: Taken | None = None
    timer: Any = None
    collected: bool = False
    result_s: float = 0.0
    commit_s: float = 0.0
    lengths_before: dict[str, int] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)
    may_end: bool = True
    committed: set[str] = field(default_factory=set)
    features: TargetFeatures | None = None
    calls: ChunkCalls | None = None

    @property
    def needs_device(self) -> bool:
        """Whether collecting it asks more of the device than its tokens, which are on their way.

        Hidden states are handed over; custom logit processors may ask for anything.
        """
        return self.features is not None or self.calls is not None


@dataclass
class Slot:
    """What SGLang's scheduler keeps once, kept per slot.

    Attributes
    ----------
    index : int
    running : ScheduleBatch
        Requests that decode (SGLang's ``running_batch``).
    last : ScheduleBatch or None
        What this slot launched at its last turn (SGLang's ``last_batch``).
    in_flight : InFlight or None
    """

    index: int
    running: ScheduleBatch
    last: ScheduleBatch | None = None
    in_flight: InFlight | None = None

    def live_requests(self) -> list[Req]:
        """Unfinished requests of this slot, each once."""
        seen: dict[int, Req] = {id(req): req for req in self.running.reqs if not req.finished()}
        if self.last is not None and self.last.forward_mode.is_extend():
            seen.update({id(req): req for req in self.last.reqs if not req.finished() and not req.is_retracted})
        return list(seen.values())

    def all_requests(self) -> list[Req]:
        """Every request this slot refers to, finished or not, those in flight included."""
        batches = [self.running, self.last, self.in_flight.batch if self.in_flight else None]
        seen: dict[int, Req] = {id(req): req for batch in batches if batch is not None for req in batch.reqs}
        return list(seen.values())

    def drained(self) -> bool:
        """Whether nothing runs here and nothing is in flight."""
        return self.in_flight is None and self.running.is_empty() and (self.last is None or self.last.is_empty())


@dataclass
class UnionView:
    """All slots as SGLang's observers expect one batch: ``reqs``, ``batch_size``, ``is_empty``.

    ``scheduler`` is read late, so the view follows whatever the slots hold now.
    """

    scheduler: Any = field(repr=False)

    @property
    def reqs(self) -> list[Req]:
        """Unfinished requests of all slots."""
        return list(self._live())

    def _live(self) -> Iterator[Req]:
        for slot in self.scheduler.psd_slots:
            yield from slot.live_requests()

    def batch_size(self) -> int:
        """Number of unfinished requests."""
        return len(self.reqs)

    def is_empty(self) -> bool:
        """Whether no request is unfinished."""
        return not self.reqs


@dataclass
class EmptyView:
    """A batch without requests: the union above already counts everybody once."""

    reqs: tuple = ()

    def batch_size(self) -> int:
        """Always 0."""
        return 0

    def is_empty(self) -> bool:
        """Always true."""
        return True
