"""A real scheduler, driven turn by turn, with a real drafter beside it.

Nothing of SGLang or of this package is faked: arguments, scheduler, pools, model, channel and drafter are what a server
runs. Only the edges differ: requests come in by a call instead of a socket, outputs are recorded instead of sent, and
the drafter is a fork (see ``drafter.py``). A ``Rig`` lives in a forked process (see ``fork.py``).
"""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_psd.errors import DrafterStartError
from sglang_psd.server_process import free_port
from tests.rig.drafter import ForkedDrafter
from tests.rig.proxy import Fault
from tests.rig.received import Output, Received, Recorder

Sabotage = Callable[[], None]
# Prompt, most new tokens, and what else ``Rig.submit`` takes.
Ask = tuple[list[int], int, dict[str, Any]]

# What a rig's scheduler is told unless a test says otherwise. Nothing here may depend on how fast the machine is.
# A standby would be a fresh interpreter; the drafters of a rig are forks.
RIG_CONFIG: dict[str, Any] = {
    "integrity_checks": True,
    "restart": False,
    "standby": False,
    "draft_timeout_s": 30.0,
}
KV_TOKENS = 4096
MAX_RUNNING = 16
RANDOM_SEED = 1234


@dataclass
class Row:
    """One request in one verify: drafts it had, tokens it gained, and whether it ended there."""

    rid: str
    drafts: int
    gained: int
    finished: bool


class Rig:
    """One scheduler on the CPU.

    Parameters
    ----------
    models : Path
        Folder made by ``build_models``.
    draft : str or None
        Draft model; None drives SGLang's own scheduler class without speculation.
    k : int
        Drafts per request and round.
    mode, loop : str
        As in ``PSDConfig``.
    target : str
        Target model.
    config : dict, optional
        More keys for ``--psd-config``.
    spares : int
        Drafters to start when one is lost; with none, a restart fails.
    sabotage : callable or list of callable, optional
        Runs in the process of the first drafter (of each, in order) before its entry point.
    fault : (Fault, int), optional
        What the first drafter's wire does to messages (see ``proxy.py``), and the seed of its moods.
    **server_args
        Passed to ``ServerArgs``.
    """

    def __init__(
        self,
        models: Path,
        draft: str | None = "D_mid",
        k: int = 3,
        mode: str = "parallel",
        loop: str = "synchronous",
        *,
        target: str = "T",
        config: dict[str, Any] | None = None,
        spares: int = 0,
        sabotage: Sabotage | list[Sabotage | None] | None = None,
        fault: tuple[Fault, int] | None = None,
        **server_args: Any,
    ):
        self._num_spares, self._fault = spares, fault
        self._sabotage = sabotage if isinstance(sabotage, list) else [sabotage]
        self._numbers = itertools.count()
        self._requests: dict[str, Any] = {}
        self._received: dict[str, Received] = {}
        self._dropped: set[str] = set()
        self.rows: list[list[Row]] = []
        self.drafter: ForkedDrafter | None = None
        options = {
            "model_path": str(models / target),
            "max_total_tokens": KV_TOKENS,
            "max_running_requests": MAX_RUNNING,
            "random_seed": RANDOM_SEED,
            "nccl_port": free_port(),
            "log_level": "warning",
        }
        if draft is not None:
            options.update(
                speculative_algorithm="PSD",
                speculative_draft_model_path=str(models / draft),
                speculative_num_steps=k,
                psd_mode=mode,
                psd_config=json.dumps({"loop": loop, **RIG_CONFIG, **(config or {})}),
            )
        options.update(server_args)
        self.scheduler = self._build(options, speculative=draft is not None)
        self.tokenizer = self.scheduler.tokenizer
        self._record_outputs()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # --- construction ---------------------------------------------------------------------------

    def _build(self, options: dict[str, Any], speculative: bool):
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs

        from sglang_psd.scheduler.psd_scheduler import PSDScheduler, Scheduler
        from sglang_psd.server_args import PSDServerArgs

        args = PSDServerArgs(**options)
        if speculative:
            self._fork_drafter(args)
        publish(args, role="scheduler")
        scheduler = (PSDScheduler if speculative else Scheduler)(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)
        if speculative:
            scheduler.psd_init_slots()
            self._record_rounds(scheduler)
        return scheduler

    def _fork_drafter(self, args) -> None:
        """Start the drafter while this process is still clean, and hand it out when the scheduler asks for it."""
        from sglang_psd.compat import vocab_limit
        from sglang_psd.scheduler import mixin
        from sglang_psd.scheduler.launch import drafter_spec, visible_drafter_device

        config = args.psd()
        device = visible_drafter_device(args, config, 0)
        spec = drafter_spec(args, config, device, vocab_limit(args))
        # Sockets have threads, so whatever is forked is forked before the first one opens.
        first, *others = itertools.chain(self._sabotage, [None] * (self._num_spares + 1 - len(self._sabotage)))
        spares = [ForkedDrafter(spec, spare=True, sabotage=sabotage) for sabotage in others]
        self.drafter = ForkedDrafter(spec, sabotage=first, fault=self._fault)
        ready = itertools.chain([lambda: self.drafter], (spare.begin for spare in spares))

        def launch(*_: Any) -> ForkedDrafter:
            begin = next(ready, None)
            if begin is None:
                raise DrafterStartError("this rig has no more spare drafters")
            self.drafter = begin()
            return self.drafter

        stock = mixin.DrafterLauncher

        def launcher(*args: Any) -> Any:
            made = stock(*args)
            made.launch = launch
            return made

        mixin.DrafterLauncher = launcher

    def _record_outputs(self) -> None:
        recorder = Recorder()
        self.sent = recorder.sent
        channels = self.scheduler.ipc_channels
        for name in ("send_to_tokenizer", "send_to_detokenizer"):
            object.__setattr__(channels, name, recorder)
        self.scheduler.output_streamer.send_to_detokenizer = recorder
        # Load snapshots are for a tokenizer process that does not exist here.
        self.scheduler.load_snapshot_writer = None
        # An idle server naps until a socket wakes it; here nobody writes to that socket.
        self.scheduler.idle_sleeper = None

    def _record_rounds(self, scheduler) -> None:
        original = scheduler._psd_note

        def record(slot, flight, *args: Any) -> None:
            if flight.taken is not None:
                lengths = flight.result.accept_lens.tolist()
                drafts = [0 if row is None else len(row.tokens) for row in flight.taken.rows]
                reqs = flight.batch.reqs
                self.rows.append([Row(req.rid, d, n, req.finished()) for req, d, n in zip(reqs, drafts, lengths)])
            original(slot, flight, *args)

        scheduler._psd_note = record

    # --- requests -------------------------------------------------------------------------------

    def submit(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        *,
        rid: str | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        fields: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """Send a request; greedy and deaf to end-of-text unless told otherwise. Returns its id.

        ``fields`` are further ones of ``TokenizedGenerateReqInput``.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        # The dash keeps an abort of r1 from hitting r10: SGLang matches prefixes.
        rid = rid or f"r{next(self._numbers)}-"
        params = SamplingParams(max_new_tokens=max_new_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})
        params.normalize(self.tokenizer)
        params.verify(self.scheduler.model_config.vocab_size)
        parts = {
            "input_text": None,
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "return_logprob": logprobs,
            "logprob_start_len": -1,
            "top_logprobs_num": top_logprobs,
            "token_ids_logprob": None,
            "stream": False,
            **(fields or {}),
        }
        request = TokenizedGenerateReqInput(rid=rid, input_ids=array("q", ids), sampling_params=params, **parts)
        self.scheduler.process_input_requests([request])
        # A constrained request waits for its grammar first.
        queues = [*self.scheduler.waiting_queue, *self.scheduler.grammar_manager.grammar_queue]
        self._requests[rid] = next(req for req in queues if req.rid == rid)
        return rid

    def abort(self, rid: str = "", everyone: bool = False) -> None:
        """Abort one request, or all."""
        from sglang.srt.managers.io_struct import AbortReq

        self.tell(AbortReq(rid=rid, abort_all=everyone))

    def tell(self, message: Any) -> None:
        """Hand any of SGLang's control messages to the scheduler."""
        self.scheduler.process_input_requests([message])
        self._read_sent()

    def request(self, rid: str):
        """SGLang's ``Req`` object."""
        return self._requests[rid]

    # --- driving --------------------------------------------------------------------------------

    def turn(self) -> None:
        """One pass of the event loop: of the slot whose turn it is, or of SGLang's normal loop."""
        from sglang.srt.utils import DynamicGradMode

        with DynamicGradMode():
            if self.drafter is None:
                self._stock_turn()
            else:
                self._psd_turn()
        self._read_sent()

    def _psd_turn(self) -> None:
        from sglang_psd.scheduler.slots import next_turn

        scheduler = self.scheduler
        scheduler.process_input_requests([])
        if scheduler._engine_paused:
            return
        scheduler.psd_turn_of(scheduler.psd_slots[scheduler.psd_turn])
        scheduler.psd_turn = next_turn(scheduler.psd_turn, len(scheduler.psd_slots))

    def _stock_turn(self) -> None:
        """The body of ``Scheduler.event_loop_normal``."""
        scheduler = self.scheduler
        scheduler.process_input_requests([])
        if scheduler._engine_paused:
            return
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch

    def unfinished(self) -> list[str]:
        """Ids of requests that have not ended."""
        return [rid for rid, req in self._requests.items() if not req.finished() and rid not in self._dropped]

    def turns(self, count: int) -> None:
        """``count`` turns."""
        for _ in range(count):
            self.turn()

    def run_until_done(self, max_turns: int = 20_000) -> None:
        """Turn until every request has ended and nothing is in flight."""
        for _ in range(max_turns):
            if not self.unfinished() and self.scheduler.is_fully_idle():
                return
            self.turn()
        stuck = self.unfinished()
        raise AssertionError(f"not idle after {max_turns} turns; unfinished: {stuck}")

    def run_until(self, reached: Callable[[], bool], what: str, within_s: float = 60.0) -> float:
        """Turn until ``reached()``: for what other processes have to do meanwhile. Returns the seconds it took."""
        started = time.monotonic()
        while not reached():
            assert time.monotonic() - started < within_s, f"{what}: not within {within_s:.0f} s"
            self.turn()
        return time.monotonic() - started

    def run(self, asks: Iterable[Ask]) -> list[Output]:
        """Submit together, run until done, and return the outputs in order."""
        rids = [self.submit(ids, length, **options) for ids, length, options in asks]
        self.run_until_done()
        return [self.output(rid) for rid in rids]

    def run_each(self, asks: Iterable[Ask]) -> list[Output]:
        """As ``run``, one request at a time."""
        return [self.run([ask])[0] for ask in asks]

    # --- results --------------------------------------------------------------------------------

    def output(self, rid: str) -> Output:
        """What the client of ``rid`` has by now."""
        req = self._requests[rid]
        return Output(
            ids=list(req.output_ids_through_stop),
            finish=self._finish_of(rid),
            rounds=req.spec_verify_ct,
            accepted=req.spec_num_correct_drafts,
            retractions=req.retraction_count,
            cached=req.cached_tokens,
            **asdict(self._received.get(rid, Received())),
        )

    def forget(self) -> None:
        """Drop what is kept of ended requests, for tests with thousands of them."""
        assert not self.unfinished()
        self._requests.clear()
        self._received.clear()
        self.rows.clear()

    def outputs(self) -> dict[str, Output]:
        """Outputs of all requests so far, by id."""
        return {rid: self.output(rid) for rid in self._requests}

    def _finish_of(self, rid: str) -> dict | None:
        reason = self._requests[rid].finished_reason
        if reason is not None:
            return reason.to_json()
        return {"type": "abort"} if rid in self._dropped else None

    def _read_sent(self) -> None:
        """Go through the messages to the client: aborts of waiting requests, and what belongs to tokens."""
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

        for message in self.sent:
            if isinstance(message, AbortReq):
                self._dropped.add(message.rid)
            elif isinstance(message, BatchTokenIDOutput):
                for i, rid in enumerate(message.rids):
                    self._received.setdefault(rid, Received()).add(message, i)
        self.sent.clear()

    def rounds_of(self, rid: str) -> list[Row]:
        """The rounds of one request, in order."""
        return [row for rows in self.rows for row in rows if row.rid == rid]

    @property
    def open_in_drafter(self) -> int:
        """Requests the scheduler believes the drafter holds."""
        return self.scheduler.psd_client.open_requests

    # --- checks ---------------------------------------------------------------------------------

    def idle_check(self, late_allowed: bool = False, *, drafter: bool = True) -> dict[str, int]:
        """Nothing runs, and nothing is held on either side; returns what is held, by name: zeros.

        Parameters
        ----------
        late_allowed : bool
            The test made the drafter late.
        drafter : bool
            Whether there is one; the test may have lost it for good.

        Raises
        ------
        AssertionError
            A request, KV slot or pool row is still held by the target or by the drafter.
        """
        scheduler, held = self.scheduler, {}
        self.turns(2)
        assert scheduler.is_fully_idle(), "the scheduler is not idle"
        scheduler.on_idle()
        if self.drafter is not None and drafter:
            client = scheduler.psd_client
            assert client.usable, f"the drafter was lost: {client.failure}"
            assert client.open_requests == 0, f"{client.open_requests} requests are still open"
            late = scheduler.psd_stats.late_rows
            assert late_allowed or late == 0, f"{late} drafts were awaited in vain"
            stats = self.ask_drafter()
            assert stats.fault is None, stats.fault
            assert stats.open_requests == 0, f"the drafter still holds {stats.open_requests} requests"
            assert stats.free_kv_tokens == stats.kv_tokens, f"the drafter leaks KV: {stats}"
            held["drafter_requests"] = stats.open_requests
            held["drafter_kv_tokens"] = stats.kv_tokens - stats.free_kv_tokens
        assert scheduler.flush_cache(), "an idle server refused to flush its cache"
        free, total = scheduler.token_to_kv_pool_allocator.available_size(), scheduler.max_total_num_tokens
        assert free == total, f"the target leaks KV: {free} of {total} tokens free"
        rows = scheduler.req_to_token_pool
        held["target_kv_tokens"], held["target_rows"] = total - free, rows.size - len(rows.free_slots)
        assert held["target_rows"] == 0, f"the target leaks rows: {held}"
        return held

    def ask_drafter(self) -> Any:
        """The drafter's accounting as of now (``Stats``)."""
        client = self.scheduler.psd_client
        number = client.ping()

        def answered() -> bool:
            nonlocal client, number
            if client is not self.scheduler.psd_client:  # the drafter was lost meanwhile
                client = self.scheduler.psd_client
                number = client.ping()
            # On a busy machine the answer to an earlier ping may still be on its way, or a later one be there already.
            return client.stats is not None and client.stats.ping_id >= number

        self.run_until(answered, "an answer of the drafter", within_s=20)
        return client.stats

    def close(self) -> None:
        """Stop the drafter."""
        if self.drafter is not None:
            self.scheduler.psd_shutdown()
