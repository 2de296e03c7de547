"""What the drafter does with its model: prefill, catch-up and the k-step loop.

Rolling back costs nothing: wrong drafts are overwritten in place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
import torch

from sglang_psd.channel.messages import (
    SCHEMA_VERSION,
    TOKEN,
    Close,
    Hello,
    Load,
    Loaded,
    Open,
    Proposals,
    Round,
    RoundRow,
    Stats,
)
from sglang_psd.drafter.answer import Laws, make_proposals
from sglang_psd.drafter.chain import CATCH_UP, HostChain
from sglang_psd.drafter.layout import lay_out
from sglang_psd.drafter.model import DraftModel
from sglang_psd.drafter.packed import SAMPLED, kind_of
from sglang_psd.drafter.rows import DraftState, Pooled
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.errors import ProtocolError

logger = logging.getLogger(__name__)

# Most prompt tokens of one prefill forward: rounds are served in between.
PREFILL_CHUNK = 4096
# Slots for the next round are taken ahead while at least this share of the pool is free.
FREE_SHARE = 1 / 8
# For how many rounds slots are taken at once where taking them interrupts somebody: the target on the same device, or a
# drafter that is not done with a round before the next one comes.
ROUNDS_AHEAD = 16


class DraftEngine:
    """Keeps the open requests and drafts for them.

    Parameters
    ----------
    spec : DrafterSpec
        Of the model that is loaded here; errors as in ``DraftModel``.
    """

    def __init__(self, spec: DrafterSpec):
        started = time.monotonic()
        self.spec = spec
        self._model = self._load(spec)
        self._states: dict[str, DraftState] = {}
        # The chain drafted last, until a slot is given to another request: its last drafts can still be fed.
        self._last: tuple[list[DraftState], HostChain] | None = None
        # Requests of a chain whose states have not been told yet what it has fed.
        self._untold: tuple[list[DraftState], HostChain] | None = None
        # Whether slots may be held that nobody needs now.
        self._holds_spare = False
        self._rounds = 0
        self._drafted_tokens = 0
        self.load_s = time.monotonic() - started

    def _load(self, spec: DrafterSpec) -> DraftModel:
        return DraftModel(spec)

    # --- requests -------------------------------------------------------------------------------

    def open(self, message: Open) -> None:
        """Take over a request; a known id is replaced. Its KV is built when there is time."""
        self.close(Close([message.rid]))
        tokens = np.frombuffer(message.tokens, TOKEN).tolist()
        if max(tokens) >= self._model.vocab_size:
            raise ProtocolError(f"The prompt of {message.rid} holds a token that the draft model does not have.")
        self._states[message.rid] = self._new_state(message, tokens)

    def _new_state(self, message: Open, tokens: list[int]) -> DraftState:
        return DraftState(message.rid, message.sampling, tokens)

    def close(self, message: Close) -> None:
        """Forget requests and free their KV; unknown ids are ignored."""
        self._tell()
        for rid in message.rids:
            state = self._states.pop(rid, None)
            if state is not None:
                self._model.release(state)

    def reset(self) -> None:
        """Forget every request."""
        self._last = None
        self.close(Close(list(self._states)))

    def load(self, message: Load) -> Loaded:
        """Take new weights; KV of the old ones is worthless."""
        self.reset()
        return Loaded(self._model.load_weights(message.path))

    def commit(self, row: RoundRow) -> DraftState | None:
        """Take over a row's new tokens; a request that is out of step is forgotten. None: unknown from now on."""
        self._tell()
        state = self._states.get(row.rid)
        sound = max(row.new_tokens, default=0) < self._model.vocab_size
        if state is not None and not (sound and state.commit(row.new_tokens, row.base_len)):
            self.close(Close([row.rid]))
            return None
        return state

    def backlog(self, rid: str) -> int:
        """Tokens of ``rid`` that still need KV, beyond what a round catches up by itself."""
        self._tell()
        state = self._states.get(rid)
        return 0 if state is None else max(0, state.missing - CATCH_UP)

    def prefill_some(self) -> bool:
        """Build KV of one batch of waiting requests; False when nothing is left to do."""
        self._tell()
        waiting = [s for s in self._states.values() if s.missing > CATCH_UP and self._usable(s, 0)]
        if not waiting:
            return False
        return self._extend(waiting, PREFILL_CHUNK)

    # --- drafting -------------------------------------------------------------------------------

    @torch.inference_mode()
    def draft_known(self, message: Round, received_s: float) -> Proposals | None:
        """As ``draft``, for a round whose requests all go on as expected; None, and nothing done, for any other.

        Nothing is looked at request by request on the way to the device and back that can wait: what the requests have
        gained is written down while it works, what the chain has fed when the round is answered.
        """
        started, rows, num_steps = time.monotonic(), message.rows, message.num_steps
        if not 0 < num_steps <= self.spec.num_steps or len({row.rid for row in rows}) < len(rows):
            return None
        self._tell()
        states = [self._states.get(row.rid) for row in rows]
        layout = lay_out(states, rows, num_steps, self._model.context_len, self._model.vocab_size)
        if layout is None:
            return None
        known, sampled = cast("list[DraftState]", states), list[int]()

        def follow() -> None:
            for state, row in zip(known, rows):
                if not state.commit(row.new_tokens, row.base_len):
                    raise RuntimeError(f"{row.rid} is out of step with what its round was laid out for.")
            sampled.extend(i for i, state in enumerate(known) if kind_of(state.sampling) == SAMPLED)

        drafts = self._model.draft_laid_out(len(rows), layout.fill, layout.width, num_steps, follow)
        self._last = self._untold = known, drafts
        if self.spec.integrity_checks and (fault := self.fault()) is not None:
            raise RuntimeError(f"after round {message.round_id}: {fault}")
        laws, counts = Laws(drafts, sampled, sampled), [num_steps] * len(rows)
        times = (received_s, started)
        return self._counted(make_proposals(message.round_id, rows, counts, drafts.tokens, laws, times))

    def _tell(self) -> None:
        """Let states know what the chain of ``draft_known`` has fed; whoever looks at them calls this first."""
        untold, self._untold = self._untold, None
        if untold is not None:
            for state, drafts in zip(untold[0], untold[1].tokens.tolist()):
                state.note_chain(drafts)

    @torch.inference_mode()
    def draft(self, round_id: int, rows: Sequence[RoundRow], num_steps: int, received_s: float) -> Proposals:
        """Commit the rows' new tokens and draft ``num_steps`` tokens for each.

        A row that cannot be served (unknown, out of step, context or pool exhausted) gets no drafts; the others are not
        affected.
        """
        started = time.monotonic()
        self._tell()
        num_steps = min(num_steps, self.spec.num_steps)
        known = {row.rid: state for row in rows if (state := self.commit(row)) is not None}
        # A second row of one name may have taken the first one's request out of step: it is gone then.
        known = {rid: state for rid, state in known.items() if self._states.get(rid) is state}
        ready = self._make_ready(list(known.values()), num_steps)
        drafts = self._model.draft_chain(ready, num_steps) if ready and num_steps else None
        self._last = None if drafts is None else (ready, drafts)
        answer = self._pack(round_id, rows, ready, drafts, num_steps, received_s, started)
        unknown = [i for i, row in enumerate(rows) if row.rid not in known]
        if self.spec.integrity_checks and (fault := self.fault()) is not None:
            raise RuntimeError(f"after round {round_id}: {fault}")
        return msgspec.structs.replace(answer, unknown=unknown) if unknown else answer

    def _make_ready(self, states: list[DraftState], num_steps: int) -> list[DraftState]:
        """Those that ``num_steps`` drafts can be made for: within context and pool, caught up."""
        ready = self._caught_up([state for state in states if self._usable(state, num_steps)])
        needed = [len(state.tokens) + num_steps for state in ready]
        granted = self._reserve(ready, self._with_spare(ready, needed, num_steps))
        return [state for state, has_room in zip(ready, granted) if has_room]

    def _reserve(self, states: Sequence[Pooled], lengths: Sequence[int]) -> list[bool]:
        """As ``DraftModel.reserve_all``; what nobody needs now gives way."""
        granted = self._model.reserve_all(states, lengths)
        while not all(granted) and self._make_room():
            granted = self._model.reserve_all(states, lengths)
        return granted

    def _make_room(self) -> bool:
        """Give the slots back that were taken ahead; False when there are none."""
        if not self._holds_spare:
            return False
        self._holds_spare = False
        self._last = None  # the last draft of each chain loses the slot that it would be fed to
        given_back = [self._model.trim(s, max(self._num_positions(s), s.num_fed)) for s in self._holders()]
        return any(given_back)

    def _holders(self) -> list[DraftState]:
        """All that hold rows and slots."""
        return list(self._states.values())

    def _with_spare(self, states: Sequence[Pooled], needed: Sequence[int], num_steps: int) -> Sequence[int]:
        """Slots of many rounds where ``needed`` are not there: a busy drafter has no pause to take the next in."""
        spare = ROUNDS_AHEAD * (num_steps + 1)
        most = self._model.context_len
        lengths = [n if s.num_slots >= n else max(n, min(n + spare, most)) for s, n in zip(states, needed)]
        missing = sum(max(0, length - state.num_slots) for state, length in zip(states, lengths))
        if missing >= self._surplus:
            return needed
        self._holds_spare = True
        return lengths

    @torch.inference_mode()
    def use_pause(self) -> None:
        """Do ahead what the next rounds would have to wait for; after a round, while the target verifies.

        The last draft of each chain is fed to the model: where the whole chain is accepted nothing is missing then.
        Slots for the next chain are taken while there are plenty. On the target's own device both would come at the
        verify's expense: the next chain's first step feeds that draft, too, and slots are taken rarely.
        """
        self._tell()
        last, self._last = self._last, None
        if last is None:
            return
        num_steps = last[1].tokens.shape[1]
        if not self.spec.shares_device:
            self._model.feed_last(len(last[0]), num_steps)
        # Some may have ended or gone on since.
        standing = [
            (state, int(drafts[-1]))
            for state, drafts in zip(last[0], last[1].tokens)
            if self._states.get(state.rid) is state and state.num_fed == len(state.tokens) + num_steps - 1
        ]
        if self._surplus > 0:
            self._take_slots_ahead([state for state, _ in standing], 2 * num_steps + 1)
        if not self.spec.shares_device:
            for state, draft in standing:
                state.note_last(draft)

    @property
    def _surplus(self) -> float:
        """How many slots may be taken that nobody needs yet; not above 0 where there are none."""
        return self._model.free_kv_tokens - FREE_SHARE * self._model.kv_tokens

    def _num_positions(self, state: DraftState) -> int:
        """Slots that a request's tokens take when all have KV."""
        return len(state.tokens)

    def _take_slots_ahead(self, states: Sequence[DraftState], needed: int) -> None:
        """Make sure that each request has ``needed`` slots behind its tokens, as far as there is context and pool."""
        taken, lengths = needed, [self._num_positions(state) for state in states]
        if self.spec.shares_device:
            short = [i for i, state in enumerate(states) if state.num_slots < lengths[i] + needed]
            states, lengths = [states[i] for i in short], [lengths[i] for i in short]
            taken = needed * ROUNDS_AHEAD
        self._model.reserve_all(states, [min(length + taken, self._model.context_len) for length in lengths])
        self._holds_spare = True

    def _usable(self, state: Pooled, num_steps: int) -> bool:
        return len(state.tokens) + num_steps <= self._model.context_len

    def _caught_up(self, states: list[DraftState]) -> list[DraftState]:
        """Feed what states miss by more than a chain's first step can take, as far as one forward goes.

        Those that miss more go without drafts now: the other rounds would have to wait for them.
        """
        behind = [state for state in states if state.missing > CATCH_UP]
        if behind:
            self._extend(behind, PREFILL_CHUNK)
        return [state for state in states if state.missing <= CATCH_UP]

    def _pack(
        self,
        round_id: int,
        rows: Sequence[RoundRow],
        ready: list[DraftState],
        drafts: HostChain | None,
        num_steps: int,
        received_s: float,
        started_s: float,
    ) -> Proposals:
        """Note which tokens now have KV, and build the message."""
        index = {state.rid: i for i, state in enumerate(ready)}
        places = [index.get(row.rid, -1) for row in rows] if drafts is not None else [-1] * len(rows)
        tokens = np.zeros((len(rows), num_steps), TOKEN)
        sampled: list[int] = []
        if drafts is not None:
            served = [i for i, at in enumerate(places) if at >= 0]
            tokens[served] = drafts.tokens[[places[i] for i in served]]
            for state, chain in zip(ready, drafts.tokens.tolist()):
                state.note_chain(chain)
            sampled = [i for i in served if kind_of(ready[places[i]].sampling) == SAMPLED]
        counts = [num_steps if at >= 0 else 0 for at in places]
        laws = Laws(drafts, sampled, [places[i] for i in sampled])
        return self._counted(make_proposals(round_id, rows, counts, tokens, laws, (received_s, started_s)))

    def _counted(self, answer: Proposals) -> Proposals:
        self._rounds += 1
        self._drafted_tokens += sum(answer.counts)
        return answer

    @torch.inference_mode()
    def _extend(self, states: list[DraftState], budget: int) -> bool:
        """Prefill all but the last committed token of the given requests, ``budget`` tokens at most."""
        chosen: list[tuple[DraftState, int]] = []
        for state in states:
            take = min(state.missing - 1, budget)
            if take <= 0 or not self._reserve([state], [len(state.fed) + take])[0]:
                continue
            chosen.append((state, take))
            budget -= take
        if not chosen:
            return False
        prefix = [len(state.fed) for state, _ in chosen]
        takes = [take for _, take in chosen]
        ids = [t for state, take in chosen for t in state.tokens[len(state.fed) : len(state.fed) + take]]
        self._last = None  # its last drafts' slots may be another's by now
        self._model.extend([s.pool_row for s, _ in chosen], ids, prefix, takes)
        for state, take in chosen:
            state.note_fed(take)
        return True

    # --- reports --------------------------------------------------------------------------------

    def hello(self, pid: int) -> Hello:
        """First message to the scheduler."""
        return Hello(
            schema_version=SCHEMA_VERSION,
            pid=pid,
            device=self.spec.device_label,
            vocab_size=self._model.vocab_size,
            context_len=self._model.context_len,
            kv_tokens=self._model.kv_tokens,
            max_requests=self.spec.max_requests,
            weight_gb=self._model.weight_gb,
            kv_gb=self._model.kv_gb,
            load_s=self.load_s,
        )

    def stats(self, ping_id: int) -> Stats:
        """Accounting: with no request open, every KV slot must be free."""
        return Stats(
            ping_id=ping_id,
            open_requests=len(self._states),
            free_kv_tokens=self._model.free_kv_tokens,
            kv_tokens=self._model.kv_tokens,
            rounds=self._rounds,
            drafted_tokens=self._drafted_tokens,
            fault=self.fault(),
        )

    def fault(self) -> str | None:
        """What is wrong with the pools; None when every slot and row is free or held once, by an open request."""
        self._tell()
        return self._model.fault(self._holders())
