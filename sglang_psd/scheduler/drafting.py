"""The scheduler's dealings with the drafter: open, take, commit, close."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils import broadcast_pyobj

from sglang_psd.channel.draft_rows import DraftBatch
from sglang_psd.scheduler.answers import DraftAnswer, Taken
from sglang_psd.scheduler.commits import Prospect, certain_rows, commit_row, sequence_len, wire_sampling
from sglang_psd.scheduler.drafts import DraftClient
from sglang_psd.scheduler.handoff import FeatureSender, Wanted
from sglang_psd.scheduler.slot import InFlight
from sglang_psd.scheduler.stops import end_of_text, may_end_with, remaining_tokens, settled_len
from sglang_psd.scheduler.vitals import Vitals
from sglang_psd.target.requests import default_seed, needs_plain_step

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler as _Base

    from sglang_psd.drafter.process import DrafterProcess
else:
    _Base = object

# Attribute of a request that no drafter would take: it is looked at every round.
_REFUSED = "_psd_refused_by_drafter"


class DraftingMixin(_Base):
    """What a round needs from the drafter and what it tells it."""

    psd_client: DraftClient | None
    psd_process: DrafterProcess | None
    psd_handoff: FeatureSender | None = None
    _psd_answers: list[DraftAnswer]

    def _psd_adopt(self, process: DrafterProcess) -> None:
        """Draft with ``process``, which is ready, from now on.

        Raises
        ------
        ChannelDamagedError
            Its mailbox cannot be opened; nothing has changed then.
        """
        assert process.hello is not None
        steps = self.server_args.speculative_num_steps
        vitals = Vitals(
            self.psd.draft_timeout_s, self.psd.hung_after_s, self.psd.start_timeout_s, process.pulse.silence_s
        )
        client = DraftClient(process, steps, process.spec.vocab_limit, vitals, self._psd_answers.append)
        handoff = None
        if process.hello.mailbox is not None:
            handoff = FeatureSender(process.hello.mailbox, self.psd_device.index, client.tell)
            client.on_credit = handoff.release
        self.psd_process, self.psd_client, self.psd_handoff = process, client, handoff
        self.psd_drafter_context = process.hello.context_len

    def _psd_open(self, reqs: list[Req]) -> None:
        """Hand requests to the drafter: at admission, so that it reads the prompt while the target does.

        A running request that it does not know (it was started again) is handed over with all its tokens.
        """
        client = self.psd_client
        if client is None or not client.usable:
            return
        # A request of one token needs no drafts. A head reads it all the same: it cannot make up later for the hidden
        # states of a prompt that the target will find in its prefix cache.
        least = 2 if self.psd_handoff is None else 1
        for req in reqs:
            if client.is_open(req.rid) or needs_plain_step(req) or req.finished() or req.to_finish is not None:
                continue
            if getattr(req, _REFUSED, False):
                continue
            if req.input_embeds is not None or req.multimodal_inputs is not None or remaining_tokens(req) < least:
                continue
            if sequence_len(req) < self.psd_drafter_context:
                sampling = wire_sampling(req, default_seed(self.server_args))
                opened = client.open(req.rid, [*req.origin_input_ids, *req.output_ids], sampling)
                setattr(req, _REFUSED, not opened)

    def _psd_take(self, reqs: list[Req], watch: Callable[[], bool]) -> Taken:
        """Drafts for the next verify; rank 0 shares what it has. ``watch`` runs while they are awaited."""
        taken = None
        if self.psd_client is not None:
            wanted = [
                (req.rid, sequence_len(req), remaining_tokens(req) - 1) if self.psd_client.is_open(req.rid) else None
                for req in reqs
            ]
            taken = self.psd_client.take(wanted, watch)
        if self.ps.tp_size > 1:
            shared = broadcast_pyobj([taken], self.tp_group.rank, self.tp_cpu_group, src=self.tp_group.ranks[0])
            taken = shared[0]
        return (
            taken if taken is not None else Taken(DraftBatch.empty(len(reqs), self.server_args.speculative_num_steps))
        )

    def _psd_settle(self, flight: InFlight) -> None:
        """Fill ``flight.tokens``; cut accepted runs where the plain server would have stopped."""
        flight.tokens, flight.may_end = self._psd_new_tokens(flight)
        if flight.taken is None:
            self._psd_settle_calls(flight)
        if flight.taken is None or not flight.may_end:
            return
        # A view: SGLang reads the same memory.
        reqs, lengths = flight.batch.reqs, flight.result.accept_lens.numpy()
        for i, (req, tokens) in enumerate(zip(reqs, flight.tokens)):
            lengths[i] = settled_len(req, tokens)
        self._psd_settle_calls(flight, lengths)
        # Grammars move on now, over what is left; SGLang's book-keeping finds that done.
        self.batch_result_processor.advance_grammar_fsm(flight.result, flight.batch)
        retained = flight.result.grammar_retained_tokens
        for i, (req, tokens) in enumerate(zip(reqs, flight.tokens)):
            legal = retained[i] if retained is not None else None
            length = int(lengths[i]) if legal is None else len(legal)
            failed = flight.calls if flight.calls is not None and i in flight.calls.failures else None
            length = end_of_text(req, tokens[:length], least=2 if failed is None else 1)
            # A token that its grammar refuses ends the request with an error; SGLang counts the round all the same.
            lengths[i] = max(1, length)
            del tokens[length:]
            if failed is not None and not may_end_with(req, tokens):
                failed.blame(i, req, length)
            if legal is not None:
                del legal[length:]

    def _psd_settle_calls(self, flight: InFlight, lengths: Any = None) -> None:
        """Forget what custom logit processors did for drafts that do not count."""
        if flight.calls is None:
            return
        for i, req in enumerate(flight.batch.reqs):
            if req.custom_logit_processor:
                length = flight.calls.settle(i, req, 1 if lengths is None else int(lengths[i]))
                if lengths is not None:
                    lengths[i] = length
        if self.psd_client is not None:
            self.psd_client.close([flight.batch.reqs[i].rid for i in flight.calls.lost])

    def _psd_hand_over(self, flight: InFlight) -> None:
        """Give the drafter the hidden states of the tokens that a forward has read and that stay."""
        features, flight.features = flight.features, None
        client, handoff = self.psd_client, self.psd_handoff
        if features is None or client is None or handoff is None or not client.usable:
            return
        counts = features.counts or [len(tokens) for tokens in flight.tokens]
        handoff.hand_over(
            features,
            [
                Wanted(i, req.rid, counts[i], flight.tokens[i])
                for i, req in enumerate(flight.batch.reqs)
                if client.is_open(req.rid) and not req.finished()
            ],
        )

    def _psd_prospects(self, reqs: list[Req]) -> list[Prospect | None]:
        """What ``_psd_commit_early`` needs, while the device works."""
        client = self.psd_client
        return [] if client is None else Prospect.of(reqs, client.is_open)

    def _psd_commit_early(self, flight: InFlight) -> float:
        """Send the tokens of requests that will certainly go on; the drafter starts while we book-keep."""
        client = self.psd_client
        if client is None or not client.usable:
            return time.monotonic()
        rows = certain_rows(flight.prospects, flight.tokens, may_stop=flight.may_end)
        commit_s = client.commit(rows)
        flight.committed = {row.rid for row in rows}
        return commit_s

    def _psd_commit_rest(self, flight: InFlight) -> None:
        """Close what has ended; commit what looked like ending and did not."""
        client = self.psd_client
        if client is None:
            return
        before = flight.lengths_before
        client.close([req.rid for req in flight.batch.reqs if req.finished()])
        rows = [
            commit_row(req, req.output_ids[before[req.rid] :], counted=True)
            for req in flight.batch.reqs
            if not req.finished()
            and req.rid not in flight.committed
            and client.is_open(req.rid)
            and len(req.output_ids) > before[req.rid]
        ]
        client.commit(rows)

    def _psd_new_tokens(self, flight: InFlight) -> tuple[list[list[int]], bool]:
        """Tokens each request of a finished forward gains, before SGLang's book-keeping; whether any may end one."""
        result, batch = flight.result, flight.batch
        ids = result.next_token_ids.tolist()
        may_end = flight.ends.possible(ids)
        if flight.taken is None:
            return [[] if req.inflight_middle_chunks > 0 else [token] for req, token in zip(batch.reqs, ids)], may_end
        stride = result.speculative_num_draft_tokens
        lengths = result.accept_lens.tolist()
        starts = range(0, len(ids), stride)
        return [ids[start : start + length] for start, length in zip(starts, lengths)], may_end
