"""Sends the calls of a ``Scenario`` to a rig, and does between them what it says."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

from tests.rig.fuzz import Scenario
from tests.rig.rig import Rig

# Weights that the target of a scenario can take.
FITTING = ("T", "D_mid", "D_bad")


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
