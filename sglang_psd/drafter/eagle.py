"""What the drafter does with an EAGLE head: take hidden states in, feed them, and draft chains.

A round feeds the hidden states of the tokens that were accepted, whose last position proposes the first draft; the
others come from decode steps that feed the head's own hidden states back. What these steps leave in the pool is
overwritten by the next round. Chains only: a tree would take several candidates of a step, and a row for each.
"""

from __future__ import annotations

import os

import msgspec
import torch

from sglang_psd.channel.mailbox import Mailbox
from sglang_psd.channel.messages import Close, Credit, Features, Hello, Load, Loaded, Open, Round, Stats
from sglang_psd.drafter.engine import PREFILL_CHUNK, DraftEngine
from sglang_psd.drafter.head_cache import EndedRequests
from sglang_psd.drafter.head_model import HeadModel
from sglang_psd.drafter.head_rows import HeadState
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.errors import ProtocolError


class EagleEngine(DraftEngine):
    """Keeps the open requests of an EAGLE head and drafts for them.

    Parameters
    ----------
    spec : DrafterSpec
        With ``head``; errors as in ``HeadModel``.
    """

    _model: HeadModel
    _states: dict[str, HeadState]  # type: ignore[assignment]

    def __init__(self, spec: DrafterSpec):
        assert spec.head is not None
        super().__init__(spec)
        folder = os.path.dirname(spec.endpoint.removeprefix("ipc://"))
        shape = (spec.head.mailbox_rows, spec.head.feature_size)
        self._mailbox = Mailbox(*shape, self._model.dtype, self._model.device, folder)
        self._ended = EndedRequests(self._model.release)

    def _load(self, spec: DrafterSpec) -> HeadModel:
        return HeadModel(spec)

    # --- requests -------------------------------------------------------------------------------

    def _new_state(self, message: Open, tokens: list[int]) -> HeadState:  # type: ignore[override]
        return HeadState(message.rid, message.sampling, tokens)

    def reset(self) -> None:
        """Forget every request, what is kept of ended ones included."""
        super().reset()
        self._ended.clear()

    def load(self, message: Load) -> Loaded:
        """Not for a head: the scheduler does not ask."""
        self.reset()
        return Loaded("an EAGLE head keeps its weights.")

    @torch.inference_mode()
    def take_features(self, message: Features) -> Credit:
        """Copy rows out of the mailbox; those of unknown requests are passed over.

        Raises
        ------
        ProtocolError
            The message points past the mailbox.
        """
        counts = [row.count for row in message.rows]
        if min(counts, default=0) < 0 or message.offset + sum(counts) > self._mailbox.rows:
            raise ProtocolError("The drafter channel announced hidden states that the mailbox has no room for.")
        copies = self._mailbox.read(message.offset, sum(counts)).split(counts)
        waiting = self._num_waiting()
        for row, features in zip(message.rows, copies):
            state = self._states.get(row.rid)
            if state is not None and row.count and self._usable(state, 0):
                waiting = self._receive(state, row.first, features, waiting)
                state.ahead = list(row.tokens)
        if self._model.device != "cpu":
            torch.cuda.current_stream().synchronize()  # the writer must not be told before the copies are made
        return Credit(message.end)

    def _num_waiting(self) -> int:
        """Hidden states received and not fed, of all open requests."""
        return sum(state.num_waiting for state in self._states.values())

    def _receive(self, state: HeadState, first: int, rows: torch.Tensor, waiting: int) -> int:
        """Take over a request's rows; ``waiting`` and what is returned are ``_num_waiting`` before and after."""
        # Rows wait on the device: a request that finds no room in the pool must not pile them up there.
        crowded = waiting > self._mailbox.rows
        before = state.num_waiting
        if crowded:
            state.begin_anew(first)
        elif not state.known and first and self._inherit(state, first):
            waiting, before = self._num_waiting(), state.num_waiting
        if not state.receive(first, rows) or crowded:
            self._model.release(state)
        return waiting + state.num_waiting - before

    def _inherit(self, state: HeadState, length: int) -> bool:
        """Begin a context at position ``length`` with the KV of a request that began alike; whether there is one."""
        found = self._ended.find(state, length, self._states.values())
        if found is None:
            return False
        source, usable = found
        keep = 1 if self._states.get(source.rid) is source else 0
        with self._ended.in_use(source):
            while (missing := usable - source.start - source.fed) > 0:
                if not self._feed([source], min(PREFILL_CHUNK, missing), keep):
                    break
            # The last position of a request that runs may have to wait for its chain.
            usable = min(usable, source.start + source.fed)
            count = usable - source.start
            if count > 0 and usable >= source.solid and self._reserve([state], [count])[0]:
                self._model.copy_kv(source, state, count)
                state.solid = source.solid if usable == length else length
                state.start, state.known, state.fed = length - count, count, count
        return True

    @torch.inference_mode()
    def close(self, message: Close) -> None:
        """Forget requests; their KV stays until the room is needed.

        A prompt that was read for a single token ends before there was time to feed it: it is fed now, within the
        budget of one forward, because the target will find it in its prefix cache.
        """
        states = [self._states.pop(rid) for rid in dict.fromkeys(message.rids) if rid in self._states]
        most_waiting = self.spec.num_steps + 1
        behind = [state for state in states if state.feedable > most_waiting and self._usable(state, 0)]
        if behind:
            self._feed(behind, PREFILL_CHUNK)
        for state in states:
            self._ended.keep(state, most_waiting)

    def _holders(self) -> list[HeadState]:  # type: ignore[override]
        """Ended requests are among them."""
        return [*self._states.values(), *self._ended.states]

    def _make_room(self) -> bool:
        """Ended requests give way, too."""
        return super()._make_room() or self._ended.evict()

    def backlog(self, rid: str) -> int:
        """Hidden states of ``rid`` that a round would have to feed beyond its own chunk."""
        state = self._states.get(rid)
        return 0 if state is None else max(0, state.feedable - (self.spec.num_steps + 1))

    def prefill_some(self) -> bool:
        """Feed prompts as far as their hidden states have come; False when nothing is left to do."""
        waiting = [s for s in self._states.values() if self.backlog(s.rid) and self._usable(s, 0)]
        return bool(waiting) and self._feed(waiting, PREFILL_CHUNK)

    # --- drafting -------------------------------------------------------------------------------

    def draft_known(self, message: Round, received_s: float) -> None:
        """No round goes on by itself: each waits for hidden states."""

    def _make_ready(self, states: list[HeadState], num_steps: int) -> list[HeadState]:  # type: ignore[override]
        ready = [state for state in states if state.complete and self._usable(state, num_steps)]
        if behind := [state for state in ready if self.backlog(state.rid)]:
            self._feed(behind, PREFILL_CHUNK)
            ready = [state for state in ready if not self.backlog(state.rid)]
        needed = [self._num_positions(state) + num_steps - 2 for state in ready]
        granted = self._reserve(ready, self._with_spare(ready, needed, num_steps))
        return [state for state, has_room in zip(ready, granted) if has_room]

    def _num_positions(self, state: HeadState) -> int:  # type: ignore[override]
        return len(state.tokens) - state.start

    @torch.inference_mode()
    def use_pause(self) -> None:
        """Take slots for the next chain; everything else of it needs the target's hidden states.

        Ended requests give way: a round that finds no room would have to wait for that.
        """
        last, self._last = self._last, None
        if last is None:
            return
        while self._surplus <= 0 and self._ended.evict():
            pass
        if self._surplus > 0:
            standing = [state for state in last[0] if self._states.get(state.rid) is state]
            self._take_slots_ahead(standing, 2 * last[1].tokens.shape[1] + 1)

    @torch.inference_mode()
    def _feed(self, states: list[HeadState], budget: int, keep: int = 1) -> bool:
        """Feed waiting hidden states, ``budget`` at most, all but the last ``keep`` of each request.

        The last one of a running request belongs to the chain. False: nothing was fed, for want of room.
        """
        chosen, takes, pieces = [], [], []
        for state in states:
            take = min(state.feedable - keep, budget)
            if take > 0 and self._reserve([state], [state.fed + take])[0]:
                chosen.append(state)
                takes.append(take)
                pieces += state.take(take)
                budget -= take
        if chosen:
            self._model.feed(chosen, takes, torch.cat(pieces))
        return bool(chosen)

    # --- reports --------------------------------------------------------------------------------

    def stats(self, ping_id: int) -> Stats:
        """What ended requests hold counts as free: it can be had back at any time."""
        stats = super().stats(ping_id)
        return msgspec.structs.replace(stats, free_kv_tokens=stats.free_kv_tokens + self._ended.slots)

    def hello(self, pid: int) -> Hello:
        """First message to the scheduler; it says where the mailbox is."""
        return msgspec.structs.replace(super().hello(pid), mailbox=self._mailbox.handle())
