"""Plays a ``Scenario`` of the fuzzer, with drafts and without."""

from __future__ import annotations

import copy
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.fuzz import Call, Scenario
from tests.rig.proxy import FAULTS
from tests.rig.received import Output
from tests.rig.rig import Rig, Row
from tests.rig.test_eagle import Draft, record_drafts

# What a plain server has to share with the one it is compared with.
SHARED = (
    "grammar_backend",
    "reasoning_parser",
    "context_length",
    "allow_auto_truncate",
    "enable_custom_logit_processor",
    "return_hidden_states_mode",
    "enable_streaming_session",
)
# Weights that the target of a scenario can take.
FITTING = ("T", "D_mid", "D_bad")
# Drafts that are held against the replica of an EAGLE head.
REPLICATED = 24


@dataclass
class Served:
    """What came of a scenario.

    Attributes
    ----------
    outputs : list of Output
    seeded : dict of int to Output
        Of the seeded calls again, on the same server, without a drafter.
    prompts : dict of int to list of int
        Prompts of turns of a session, as the server put them together.
    ended : set of int
        Calls that were unfinished when everything was aborted.
    rows : list of list of Row
        Each call's rounds.
    drafts : list of (int, Draft)
        Some of the drafts that were made, with their calls.
    """

    outputs: list[Output]
    seeded: dict[int, Output] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    rows: list[list[Row]] = field(default_factory=list)
    drafts: list[tuple[int, Draft]] = field(default_factory=list)


def weights_of(scenario: Scenario) -> list[str]:
    """The target's weights at each call."""
    weights, current = [], scenario.target
    for number in range(len(scenario.calls)):
        for name, *arguments in scenario.events.get(number, ()):
            if name == "target" and arguments[0] in FITTING:
                current = arguments[0]
        weights.append(current)
    return weights


class Player:
    """Sends a scenario's calls to a rig, and does between them what the scenario says.

    Parameters
    ----------
    rig : Rig
    models : Path
    scenario : Scenario
    """

    def __init__(self, rig: Rig, models: Path, scenario: Scenario):
        from tests.rig.test_processors import processors

        self.rig, self._models, self._scenario = rig, models, scenario
        self._code = processors() if scenario.options.get("enable_custom_logit_processor") else {}
        self.rids: dict[int, str] = {}
        self.prompts: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.weights = scenario.target
        self._due: dict[str, int] = {}
        self._last: dict[str, str] = {}
        self._stopped = False

    # --- requests -------------------------------------------------------------------------------

    def send(self, number: int) -> str:
        """Submit a call; a turn of a session once the last one there has ended."""
        call = self._scenario.calls[number]
        ids, length, wish = call.ask
        wish = copy.deepcopy(wish)  # SGLang writes into custom_params
        fields = wish.setdefault("fields", {})
        if "custom_logit_processor" in fields:
            fields["custom_logit_processor"] = self._code[fields["custom_logit_processor"]]
        if call.session is not None:
            fields["session_params"] = self._turn_of(call.session)
        rid = self.rids[number] = self.rig.submit(ids, length, **wish)
        if call.session is not None:
            self._last[call.session] = rid
            self.prompts[number] = list(self.rig.request(rid).origin_input_ids)
        if call.abort is not None:
            self._due[rid] = call.abort
        return rid

    def _turn_of(self, session: str) -> Any:
        from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

        streaming = bool(self._scenario.options.get("enable_streaming_session"))
        if session not in self._last:
            message = OpenSessionReqInput(capacity_of_str_len=10_000, session_id=session, streaming=streaming)
            self.rig.tell(message)
            return SessionParams(id=session)
        last = self._last[session]
        self.resume()
        for _ in range(20_000):
            if self.rig.request(last).finished():
                break
            self.rig.turn()
        return SessionParams(id=session, rid=None if streaming else last)

    def close_sessions(self) -> None:
        """End the conversations, whose KV the server keeps."""
        from sglang.srt.managers.io_struct import CloseSessionReqInput

        for session in self._last:
            self.rig.tell(CloseSessionReqInput(session_id=session))

    def play(self) -> None:
        """All calls and events, until everything has ended."""
        for number, call in enumerate(self._scenario.calls):
            self.rig.turns(call.wait)
            if number in self._scenario.pauses:
                self.pause(self._scenario.pauses[number])
                self.rig.turns(2)
                self.resume()
            for name, *arguments in self._scenario.events.get(number, ()):
                getattr(self, f"do_{name}")(*arguments)
            self.send(number)
            for rid in [rid for rid, turns in self._due.items() if turns <= 0]:
                self.rig.abort(rid)
                del self._due[rid]
            self._due = {rid: turns - call.wait - 1 for rid, turns in self._due.items()}
        self.do_go_on()
        self.resume()
        self.rig.run_until_done()

    # --- events ---------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Pause the server."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.rig.tell(PauseGenerationReqInput(mode=mode))

    def resume(self) -> None:
        """Let a paused server go on; one that runs notices nothing."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self.rig.tell(ContinueGenerationReqInput())

    do_pause, do_continue = pause, resume

    def do_flush(self) -> None:
        """Ask for the cache to be flushed, which a busy server refuses."""
        self.rig.scheduler.flush_cache()

    def do_idle(self) -> None:
        """Wait until everything has ended."""
        self.resume()
        self.rig.run_until_done()

    def do_abort_all(self) -> None:
        """End whatever runs or waits."""
        unfinished = set(self.rig.unfinished())
        self.ended |= {number for number, rid in self.rids.items() if rid in unfinished}
        self.rig.abort(everyone=True)

    def _update(self, target: str, draft: str | None = None, *, flush: bool = True) -> bool:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        manifest = None if draft is None else {"draft_model_path": str(self._models / draft)}
        request = UpdateWeightFromDiskReqInput(
            model_path=str(self._models / target), load_format="auto", manifest=manifest, flush_cache=flush
        )
        return self.rig.scheduler.weight_updater.update_weights_from_disk(request).success

    def do_target(self, name: str) -> None:
        """New weights for the target, once everything has ended; those that do not fit are refused."""
        self.do_idle()
        assert self._update(name) == (name in FITTING), f"weights of {name}"
        self.weights = name if name in FITTING else self.weights

    def do_draft(self, name: str) -> None:
        """New weights for the draft model while requests run; they may be refused."""
        self.do_go_on()
        self._update(self.weights, name, flush=False)

    def do_same_weights(self, flush: bool) -> None:
        """The target's own weights again: refused by a busy server that is to flush its cache."""
        self._update(self.weights, flush=flush)

    def do_kill(self) -> None:
        """The drafter dies."""
        assert self.rig.drafter is not None
        self.rig.drafter.child.kill()

    def do_lose(self) -> None:
        """The scheduler gives its drafter up."""
        self.rig.scheduler.psd_client.give_up("the test wants none")

    def do_await_drafter(self) -> None:
        """Turn until there is a drafter again."""
        self.resume()
        scheduler = self.rig.scheduler
        self.rig.run_until(
            lambda: scheduler.psd_client.drafting and scheduler.psd_supervisor.state == "up", "a drafter"
        )

    def do_stop(self) -> None:
        """The drafter stands still."""
        assert self.rig.drafter is not None
        self.rig.drafter.child.send_signal(signal.SIGSTOP)
        self._stopped = True

    def do_go_on(self) -> None:
        """It goes on."""
        if self._stopped and self.rig.drafter is not None:
            self.rig.drafter.child.send_signal(signal.SIGCONT)
        self._stopped = False

    def do_reset(self) -> None:
        """Everything is handed to the drafter again."""
        self.rig.scheduler.psd_client.reset()

    def do_reopen(self) -> None:
        """The drafter forgets everything."""
        self.rig.scheduler.psd_client.close_all()


def _spoil(scenario: Scenario) -> dict[str, Any]:
    """Do to this process what is wrong in the scenario; the rest is for ``Rig``."""
    from sglang.srt.managers import scheduler

    from sglang_psd.scheduler import launch, vitals

    if scenario.retract_every:
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, scenario.retract_every

    drafter, options = dict(scenario.drafter), {}
    config: dict[str, Any] = {**scenario.config, "restart": bool(drafter.get("spares"))}
    if "kv_tokens" in drafter:
        launch.draft_kv_tokens = lambda args: drafter["kv_tokens"]
    if "wire" in drafter:
        name, seed = drafter["wire"]
        options["fault"] = (FAULTS[name], seed)
        vitals.PING_EVERY_S = 0.1
        config.update(draft_timeout_s=0.15)
    return {"config": config, "spares": drafter.get("spares", 0), "target": scenario.target, **options}


def serve(models: Path, scenario: Scenario) -> Served:
    """With drafts."""
    spoiled = _spoil(scenario)
    with Rig(models, scenario.draft, scenario.k, scenario.mode, scenario.loop, **spoiled, **scenario.options) as rig:
        if "mailbox" in scenario.drafter:
            from sglang_psd.channel.ring import RowRing

            rig.scheduler.psd_handoff._ring = RowRing(scenario.drafter["mailbox"])
        player, taken = Player(rig, models, scenario), record_drafts(rig)
        player.play()
        player.close_sessions()
        _end_well(rig, scenario)
        served = Served([rig.output(player.rids[i]) for i in range(len(scenario.calls))])
        served.prompts, served.ended = player.prompts, player.ended
        served.rows = [rig.rounds_of(player.rids[i]) for i in range(len(scenario.calls))]
        greedy = {player.rids[i]: i for i, call in enumerate(scenario.calls) if call.kind == "greedy"}
        made = [(greedy[draft.rid], draft) for draft in taken if draft.rid in greedy and draft.drafts]
        served.drafts = made[:: max(1, len(made) // REPLICATED)]
        rig.scheduler.psd_client.give_up("the test wants none")
        rig.scheduler.psd_supervisor.give_up("the test wants none")
        served.seeded = _again(rig, player, scenario)
        return served


def _again(rig: Rig, player: Player, scenario: Scenario) -> dict[int, Output]:
    """Seeded calls once more, if the target still has the weights that they met."""
    weights = weights_of(scenario)
    numbers = [i for i, call in enumerate(scenario.calls) if call.kind == "seeded" and weights[i] == weights[-1]]
    rids = [player.send(i) for i in numbers]
    rig.run_until_done()
    return {i: rig.output(rid) for i, rid in zip(numbers, rids)}


def _end_well(rig: Rig, scenario: Scenario) -> None:
    """Nothing is held on either side, where there still are two."""
    drafter = rig.drafter
    assert drafter is not None
    if drafter.proxy is not None:
        drafter.proxy.active = False
    client, supervisor = rig.scheduler.psd_client, rig.scheduler.psd_supervisor
    rig.run_until(lambda: rig.scheduler.psd_client.drafting or supervisor.given_up, "a drafter or none for good")
    if not supervisor.given_up and "wire" in scenario.drafter and client is rig.scheduler.psd_client:
        rig.ask_drafter()  # at this point of the stream both sides compare what is open
    # A busy machine lets the drafter be late: its drafts are missed then, and nothing else.
    rig.idle_check(late_allowed=True, drafter=not supervisor.given_up)


def plain(models: Path, scenario: Scenario, numbers: list[int], target: str, alone: bool) -> tuple[dict, dict]:
    """Without: outputs of the given calls, and the prompts of turns of sessions, on a server with these weights."""
    options = {name: scenario.options[name] for name in SHARED if name in scenario.options}
    # Sessions that stream keep KV in the prefix cache.
    options["disable_radix_cache"] = not options.get("enable_streaming_session")
    with Rig(models, None, target=target, **options) as rig:
        player = Player(rig, models, scenario)
        for number in numbers:
            # SGLang's scheduler ends of a batch in which some ask for ``token_ids_logprob`` and others do not: these
            # get a list where ``move_logprobs_to_cpu`` and ``_normalize_decode_outputs`` of its
            # ``BatchResultProcessor`` want a tensor.
            by_itself = alone or "token_ids_logprob" in scenario.calls[number].wish.get("fields", {})
            if by_itself:
                rig.run_until_done()
            player.send(number)
            if by_itself:
                rig.run_until_done()
        rig.run_until_done()
        return {i: rig.output(player.rids[i]) for i in numbers}, player.prompts


def is_free(call: Call) -> bool:
    """Whether nothing but its length shapes a call's text: a right draft is accepted."""
    shapes = {"frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_new_tokens", "regex"}
    shapes |= {"json_schema", "ebnf", "structural_tag", "stop", "stop_regex", "custom_params"}
    return call.kind == "greedy" and not shapes & call.wish.keys()
