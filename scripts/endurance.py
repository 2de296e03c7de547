"""Thousands of requests through one scheduler, with everything that may happen to them and to the drafter.

    python scripts/endurance.py --requests 10000 --kills 20 --out docs/results/endurance_cpu.json

A real scheduler and a real drafter on the CPU (the test rig), driven turn by turn. Requests have random prompts,
lengths and sampling parameters; 5 % are aborted at a random moment; the KV pool is too small for all, and now and then
everything is retracted at once by pause and continue; the drafter is killed or stopped at random moments. Every greedy
text is compared with that of SGLang without PSD; accounting of both sides is checked on every round, and every thousand
requests the server is drained and all pools have to be back at zero.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Before torch: the rig forks, and a forked thread pool never wakes up.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil

from scripts.record_result import provenance, write_result
from tests.rig.oracle import LONGEST, make_prompts
from tests.rig.rig import Output, Rig

NUM_PROMPTS = 96
WINDOW = 1000
ABORT_SHARE = 0.05
SAMPLED_SHARE = 0.2
# Waiting and running together; more than may run at once.
IN_FLIGHT = 24
# Less than the running requests need in the end; admission is told not to care (see ``endure``).
POOL_TOKENS = 420
PAUSE_SHARE = 1 / 300  # of all turns
RSS_EVERY = 50


@dataclass
class Window:
    """What one thousand requests showed.

    Attributes
    ----------
    requests, aborted, retractions : int
    seconds : float
    accept_length : float
        Tokens per round of the requests that had drafts in it.
    held : dict of str to int
        What target and drafter still hold when all requests are gone.
    rss_mb, drafter_rss_mb : float
        Resident memory after the window.
    """

    requests: int
    aborted: int
    retractions: int
    seconds: float
    accept_length: float
    held: dict[str, int]
    rss_mb: float
    drafter_rss_mb: float


@dataclass
class Strike:
    """One attack on the drafter: after which request, how, and the seconds until that was noticed and mended."""

    at_request: int
    kind: str
    noticed_s: float | None = None
    recovery_s: float | None = None


@dataclass
class Endurance:
    """The run: a rig, its load, and what has been seen so far."""

    rig: Rig
    truth: list[list[int]]
    prompts: list[list[int]]
    total: int
    strikes: list[Strike]
    rng: random.Random
    submitted: int = 0
    aborted: int = 0
    windows: list[Window] = field(default_factory=list)
    rss: list[tuple[int, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _live: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    _hit: set[str] = field(default_factory=set)
    pauses: int = 0
    rounds: int = 0
    slot_moves: int = 0
    _struck: tuple[Strike, float] | None = None

    def run(self) -> None:
        """Serve all requests, window by window."""
        while self.submitted < self.total:
            self._window(min(WINDOW, self.total - self.submitted))

    def _window(self, count: int) -> None:
        started, until, retracted = time.monotonic(), self.submitted + count, 0
        aborted_before, gained, rounds = self.aborted, 0, 0
        while self.submitted < until or self._live:
            while self.submitted < until and len(self._live) < IN_FLIGHT:
                self._submit()
            self.rig.turn()
            self._maybe_abort()
            self._maybe_pause()
            self._strike_when_due()
            for rid in [rid for rid in self._live if self.rig.output(rid).finish is not None]:
                output = self.rig.output(rid)
                retracted += output.retractions
                self._judge(rid, output)
            # All of it is kept for tests: a run of this length has to let go.
            for rows in self.rig.rows:
                with_drafts = [row for row in rows if row.drafts]
                gained, rounds = gained + sum(row.gained for row in with_drafts), rounds + len(with_drafts)
            self.rig.rows.clear()
        self._await_drafter()
        self.rig.run_until_done()
        stats = self.rig.scheduler.psd_stats
        self.rounds, self.slot_moves = self.rounds + stats.rounds, self.slot_moves + stats.moves
        held = self.rig.idle_check(late_allowed=True)  # flushes, which lets the server's figures start anew
        self.rig.forget()
        self._hit.clear()
        window = Window(
            count,
            self.aborted - aborted_before,
            retracted,
            round(time.monotonic() - started, 1),
            round(gained / max(1, rounds), 4),
            held,
            round(_rss_mb(os.getpid()), 2),
            round(_rss_mb(self.rig.drafter.pid), 2),
        )
        self.windows.append(window)
        print(f"{self.submitted:6d} requests: {json.dumps(asdict(window))}", flush=True)

    def _submit(self) -> None:
        which, length = self.rng.randrange(len(self.prompts)), self.rng.randint(1, LONGEST)
        sampled = self.rng.random() < SAMPLED_SHARE
        options: dict[str, Any] = {}
        if sampled:
            options = {"temperature": self.rng.choice([0.5, 1.0]), "top_p": self.rng.choice([0.9, 1.0])}
            if self.rng.random() < 0.5:
                options["sampling_seed"] = self.rng.randrange(1 << 30)
        rid = self.rig.submit(self.prompts[which], length, **options)
        self._live[rid] = (which, length, sampled)
        self.submitted += 1
        if self.submitted % RSS_EVERY == 0:
            self.rss.append((self.submitted, _rss_mb(os.getpid())))

    def _maybe_abort(self) -> None:
        """On average one abort per 1 / ABORT_SHARE requests, whatever they are doing."""
        if self._live and len(self._hit) + self.aborted < ABORT_SHARE * self.submitted and self.rng.random() < 0.2:
            rid = self.rng.choice(list(self._live))
            self._hit.add(rid)
            self.rig.abort(rid)

    def _maybe_pause(self) -> None:
        """Retract everything, in either slot, and go on."""
        if self.rng.random() < PAUSE_SHARE:
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

            self.rig.tell(PauseGenerationReqInput(mode="retract"))
            self.rig.tell(ContinueGenerationReqInput())
            self.pauses += 1

    def _judge(self, rid: str, output: Output) -> None:
        which, length, sampled = self._live.pop(rid)
        kind = (output.finish or {}).get("type")
        if kind == "abort" and rid in self._hit:
            self.aborted += 1
            self._hit.discard(rid)
            length = len(output.ids)
        elif kind != "length" or len(output.ids) != length:
            self.wrong.append(f"{rid}: {output.finish}, {len(output.ids)} of {length} tokens")
            return
        self._hit.discard(rid)
        if not sampled and output.ids != self.truth[which][:length]:
            self.wrong.append(f"{rid}: not the plain text")

    # --- the drafter ----------------------------------------------------------------------------

    def _strike_when_due(self) -> None:
        if self._struck is not None:
            self._follow(*self._struck)
            return
        due = next((strike for strike in self.strikes if strike.recovery_s is None), None)
        if due is not None and self.submitted >= due.at_request:
            self.rig.drafter.child.send_signal(signal.SIGKILL if due.kind == "kill" else signal.SIGSTOP)
            self._struck = (due, time.monotonic())

    def _follow(self, strike: Strike, since_s: float) -> None:
        """Note when the scheduler noticed, and when it expects drafts again."""
        drafting, now = self.rig.scheduler.psd_client.drafting, time.monotonic()
        if strike.noticed_s is None and not drafting:
            strike.noticed_s = round(now - since_s, 3)
            if strike.kind == "stop and continue":
                self.rig.drafter.child.send_signal(signal.SIGCONT)
        elif strike.noticed_s is not None and drafting:
            strike.recovery_s, self._struck = round(now - since_s, 3), None

    def _await_drafter(self) -> None:
        def recovered() -> bool:
            self._strike_when_due()
            due = [strike for strike in self.strikes if strike.at_request <= self.submitted]
            return all(strike.recovery_s is not None for strike in due)

        self.rig.run_until(recovered, "a drafter", within_s=120)


def _rss_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def slope(samples: list[tuple[int, float]]) -> dict[str, float]:
    """Growth of the second half of ``samples`` in MB per 1,000 requests, with its standard error."""
    late = samples[len(samples) // 2 :]
    if len(late) < 4:
        return {}
    x, y = np.array(late).T
    (rate, _), cov = np.polyfit(x / 1000, y, 1, cov=True)
    return {"mb_per_1000_requests": round(float(rate), 4), "standard_error": round(float(np.sqrt(cov[0, 0])), 4)}


def plan_strikes(total: int, count: int, rng: random.Random) -> list[Strike]:
    """``count`` attacks spread over the run, of every kind."""
    kinds = ("kill", "stop", "kill", "stop and continue")
    step = total / (count + 1)
    return [Strike(round((i + rng.uniform(0.6, 1.4)) * step), kinds[i % len(kinds)]) for i in range(count)]


def endure(models: Path, truth: list[list[int]], total: int, kills: int, seed: int) -> dict[str, Any]:
    """Run it in this process, which must be able to fork; returns what ``main`` writes."""
    rng = random.Random(seed)
    strikes = plan_strikes(total, kills, rng)
    config = {"restart": True, "max_losses": kills + 1, "hung_after_s": 2.0, "draft_timeout_s": 1.0}
    # A run of minutes with an attack every few seconds would else be served without a drafter for the most part.
    config["max_restart_delay_s"] = 1.0
    options = {"max_total_tokens": POOL_TOKENS, "schedule_conservativeness": 0.05, "log_level": "error"}
    started = time.monotonic()
    with Rig(models, "D_mid", 3, "parallel", "overlapped", spares=kills, config=config, **options) as rig:
        run = Endurance(rig, truth, make_prompts(NUM_PROMPTS), total, strikes, rng)
        run.run()
    windows = [asdict(window) for window in run.windows]
    return {
        "requests": run.submitted,
        "wrong": run.wrong,
        "aborted": run.aborted,
        "pauses": run.pauses,
        "retractions": sum(window.retractions for window in run.windows),
        "slot_moves": run.slot_moves,
        "rounds": run.rounds,
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
        "strikes": [asdict(strike) for strike in strikes],
        "most_held_after_a_window": max(max(window.held.values()) for window in run.windows),
        "accept_length_first_window": windows[0]["accept_length"],
        "accept_length_last_window": windows[-1]["accept_length"],
        "rss_slope": slope(run.rss),
        "windows": windows,
    }


def main() -> int:
    """Build models, ask plain SGLang for the texts, run, write JSON; exit status 1 when a text was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20, help="attacks on the drafter during the run (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    given = parser.parse_args()
    from tests.models import build_models
    from tests.rig.fork import run_forked
    from tests.rig.oracle import Oracle
    from tests.rig.preload import preload

    preload()
    with tempfile.TemporaryDirectory() as folder:
        models = build_models(Path(folder))
        truth = Oracle(run_forked, models).greedy(make_prompts(NUM_PROMPTS))
        found = endure(models, truth, given.requests, given.kills, given.seed)
    result = {**provenance(), **found}
    if given.out is not None:
        write_result(given.out, result)
    print(json.dumps({key: value for key, value in result.items() if key != "windows"}))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
