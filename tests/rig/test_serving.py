"""What a server does besides answering: priorities, sessions, figures, floods, the end of the context."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import BOS
from tests.rig.oracle import LONGEST, assert_prefixes, make_prompts
from tests.rig.rig import Ask, Output, Rig
from tests.rig.together import LOOPS, PROMPTS, together

# --- priority ------------------------------------------------------------------------------------

LONG = [BOS] + [(7 * j + j * j) % 250 + 10 for j in range(90)]
PRIORITY = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 3}


def _ranked(rig: Rig, ids: list[int], length: int, priority: int) -> str:
    return rig.submit(ids, length, fields={"priority": priority})


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_an_urgent_request_pushes_out_the_least_important_one(run_case, models, oracle, mode, loop) -> None:
    """Wherever it runs; what was pushed out goes on later, its text unchanged."""

    def case() -> tuple[list[Output], list[int], list[int]]:
        with Rig(models, "D_mid", 3, mode, loop, max_running_requests=4, **PRIORITY) as rig:
            rids = [_ranked(rig, PROMPTS[i], 40, [7, 8, 1, 9][i]) for i in range(4)]
            rig.turns(9)
            rids.append(_ranked(rig, PROMPTS[4], 12, 20))
            rids.append(_ranked(rig, PROMPTS[5], 12, 10))
            finished: list[str] = []
            while rig.unfinished():
                rig.turn()
                finished += [rid for rid in rids if rig.request(rid).finished() and rid not in finished]
            rig.run_until_done()
            rig.idle_check()
            outputs = [rig.output(rid) for rid in rids]
            return outputs, [o.retractions for o in outputs], [rids.index(rid) for rid in finished]

    outputs, retractions, finished = run_case(case)
    assert_prefixes(outputs, [40] * 4 + [12] * 2, oracle.greedy(PROMPTS[:6]))
    assert retractions[2] >= 1 and retractions[3] == 0, retractions
    assert finished[0] == 4 and finished[-1] == 2, finished


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_request_pushed_out_in_vain_is_not_lost(run_case, models, oracle, mode) -> None:
    """SGLang forgets the prompt when it estimates whether pushing somebody out will do."""

    def case() -> list[Output]:
        options = {"max_running_requests": 2, "max_total_tokens": 150, **PRIORITY}
        with Rig(models, "D_mid", 3, mode, "overlapped", **options) as rig:
            rids = [_ranked(rig, PROMPTS[0][:5], 20, 1), _ranked(rig, LONG[:60], 40, 30)]
            rig.turns(6)
            rids.append(_ranked(rig, LONG[3:70], 20, 20))
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    outputs = run_case(case)
    assert_prefixes(outputs, [20, 40, 20], oracle.greedy([PROMPTS[0][:5], LONG[:60], LONG[3:70]]))
    assert outputs[0].retractions >= 1, "nobody was pushed out"


def test_nobody_is_pushed_out_where_there_is_room(run_case, models, oracle) -> None:
    """A slot has its fair share and is not full: the urgent requests that it leaves go to the other slot."""

    def case() -> list[Output]:
        with Rig(models, "D_mid", 3, loop="overlapped", **PRIORITY) as rig:
            rids = [_ranked(rig, PROMPTS[i], 40, 1) for i in range(3)]
            rig.turns(7)
            rids += [_ranked(rig, PROMPTS[i], 20, 20) for i in range(3, 8)]
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    outputs = run_case(case)
    assert_prefixes(outputs, [40] * 3 + [20] * 5, oracle.greedy(PROMPTS))
    assert [o.retractions for o in outputs] == [0] * 8


# --- sessions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("streaming", "page_size"), [(False, 1), (True, 1), (True, 16)])
def test_sessions(run_case, models, oracle, streaming, page_size, loop) -> None:
    """Turns of a conversation that lives in the server: each goes on where the last one ended; others run beside it.

    A request that is refused leaves the conversation as it was, also one that would have replaced it.
    """
    turns = [PROMPTS[4], [30, 31, 32], [99], [12, 13, 14, 15]]

    def case() -> list[list[Output]]:
        from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput, SessionParams

        with Rig(models, "D_mid", 3, loop=loop, enable_streaming_session=streaming, page_size=page_size) as rig:
            found: list[list[Output]] = [[], []]
            for name in ("a", "b"):
                rig.tell(OpenSessionReqInput(capacity_of_str_len=1000, session_id=name, streaming=streaming))
            last: dict[str, str | None] = {"a": None, "b": None}
            for i, ids in enumerate(turns):
                other = rig.submit(PROMPTS[i], 15)
                for name in last:
                    params = SessionParams(id=name, rid=None if streaming else last[name])
                    last[name] = rig.submit(ids, 9 + i, fields={"session_params": params})
                rig.run_until_done()
                for outputs, name in zip(found, last):
                    outputs.append(rig.output(str(last[name])))
                assert rig.output(other).finish is not None
                for name in last:
                    params = SessionParams(id=name, replace=not streaming)
                    bad = rig.submit([7], 3, logit_bias={"5": "abc"}, fields={"session_params": params})
                    rig.run_until_done()
                    assert "logit_bias" in rig.output(bad).finish["message"]
            for name in last:
                rig.tell(CloseSessionReqInput(session_id=name))
            rig.idle_check()
            return found

    for outputs in run_case(case):
        text: list[int] = []
        for i, (ids, output) in enumerate(zip(turns, outputs)):
            text += ids
            expected = oracle.outputs([(list(text), 9 + i, {})])[0].ids
            assert output.ids == expected, f"turn {i}"
            text += output.ids


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_session_whose_turn_is_retracted(run_case, models, oracle, page_size, loop) -> None:
    """What it keeps is KV of committed tokens, never that of a rejected draft."""
    turns = [PROMPTS[4], [30, 31, 32], [99], [12, 13, 14, 15]]

    def case() -> list[Output]:
        from sglang.srt.managers.io_struct import (
            CloseSessionReqInput,
            ContinueGenerationReqInput,
            OpenSessionReqInput,
            PauseGenerationReqInput,
            SessionParams,
        )

        outputs = []
        options = {"enable_streaming_session": True, "page_size": page_size}
        with Rig(models, "D_bad", 3, loop=loop, **options) as rig:
            rig.tell(OpenSessionReqInput(capacity_of_str_len=1000, session_id="a", streaming=True))
            for ids in turns:
                rid = rig.submit(ids, 20, fields={"session_params": SessionParams(id="a")})
                for _ in range(3):
                    rig.turns(7)
                    rig.tell(PauseGenerationReqInput(mode="retract"))
                    rig.tell(ContinueGenerationReqInput())
                rig.run_until_done()
                outputs.append(rig.output(rid))
            rig.tell(CloseSessionReqInput(session_id="a"))
            rig.idle_check()
            return outputs

    text: list[int] = []
    for ids, output in zip(turns, run_case(case)):
        text += ids
        assert output.retractions > 0
        assert output.ids == oracle.outputs([(list(text), 20, {})])[0].ids
        text += output.ids


def test_a_session_that_begins_anew(run_case, models, oracle) -> None:
    """``replace`` without ``rid`` empties a session: what runs there ends, the next request begins anew."""

    def case() -> list[Output]:
        from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

        with Rig(models, "D_mid", 3) as rig:
            rig.tell(OpenSessionReqInput(capacity_of_str_len=1000, session_id="a"))
            within = {"fields": {"session_params": SessionParams(id="a")}}
            rids = [rig.submit(PROMPTS[0], 9, **within)]
            rig.run_until_done()
            rids.append(rig.submit(PROMPTS[1], 300, **within))
            rig.turns(8)
            rids.append(rig.submit(PROMPTS[2], 9, fields={"session_params": SessionParams(id="a", replace=True)}))
            rig.run_until_done()
            within = {"fields": {"session_params": SessionParams(id="a", rid=rids[-1])}}
            rids.append(rig.submit([30, 31], 9, **within))
            rig.run_until_done()
            return [rig.output(rid) for rid in rids]

    _, ended, anew, next_turn = run_case(case)
    assert ended.finish["type"] == "abort" and anew.finish["type"] == "length"
    (expected,) = oracle.outputs([(PROMPTS[2], 9, {})])
    assert anew.ids == expected.ids
    (expected,) = oracle.outputs([([*PROMPTS[2], *anew.ids, 30, 31], 9, {})])
    assert next_turn.ids == expected.ids


# --- figures -------------------------------------------------------------------------------------


def assert_identities(outputs: list[Output], asks: list[Ask], k: int) -> None:
    """What has to hold between tokens, rounds and accepted drafts of a request."""
    for output in outputs:
        prefills = 1 + output.retractions
        assert output.usage == len(output.ids)
        assert output.usage <= prefills + output.rounds + output.accepted
        assert output.rounds + output.accepted >= output.usage - prefills
        assert sum(output.histogram) == output.rounds
        assert sum(n * count for n, count in enumerate(output.histogram)) == output.accepted <= k * output.rounds


@pytest.mark.parametrize(("draft", "k"), [("D_same", 4), ("D_mid", 3), ("D_bad", 5)])
def test_figures_add_up(run_case, models, draft, k) -> None:
    """Tokens, rounds, histogram and totals of the server, also with stops, aborts and retractions."""
    asks: list[Ask] = [(ids, 41, {}) for ids in make_prompts(6)]
    asks += [(ids, 40, {"stop_token_ids": list(range(60, 90)), "ignore_eos": False}) for ids in make_prompts(4, 6)]
    asks += [(ids, 40, {"regex": "[a-f]{3,9}", "ignore_eos": False}) for ids in make_prompts(2, 10)]

    def case() -> tuple[list[Output], Any, dict]:
        with Rig(models, draft, k, loop="overlapped", max_total_tokens=260, schedule_conservativeness=0.05) as rig:
            rids = [rig.submit(ids, length, **wishes) for ids, length, wishes in asks]
            gone = rig.submit(PROMPTS[3], 60)
            rig.turns(12)
            rig.abort(gone)
            state = rig.scheduler.get_internal_state(None).internal_state
            assert state["avg_spec_accept_length"] == state["psd"]["accept_length"], "two figures of two moments"
            rig.run_until_done()
            reporter = rig.scheduler.metrics_reporter
            totals = (
                reporter.spec_num_accept_tokens + reporter.spec_total_num_accept_tokens,
                reporter.spec_num_forward_ct + reporter.spec_total_num_forward_ct,
            )
            report = rig.scheduler.psd_report()
            # A flush, which is part of this, starts all figures anew.
            rig.idle_check()
            return [rig.output(rid) for rid in [*rids, gone]], totals, report

    outputs, (tokens, forwards), report = run_case(case)
    assert_identities(outputs, asks, k)
    exact = [o for o in outputs if not o.retractions]
    assert all(o.usage == 1 + o.rounds + o.accepted for o in exact)
    assert sum(o.retractions for o in outputs) > 0
    assert forwards == sum(o.rounds for o in outputs) and tokens == forwards + sum(o.accepted for o in outputs)
    assert report["accept_length"] == pytest.approx(tokens / forwards, abs=1e-3)
    assert report["drafts_accepted"] == sum(o.accepted for o in outputs) <= report["drafts_verified"] <= k * forwards
    if draft == "D_same":
        assert report["accept_rate"] > 0.7
    if draft == "D_bad":
        assert report["accept_length"] < 1.1


def test_rounds_per_token(run_case, models) -> None:
    """Two slots need no more rounds than one: drafting costs the target nothing."""

    def case(mode: str) -> float:
        with Rig(models, "D_same", 3, mode, "overlapped") as rig:
            outputs = rig.run([(ids, 41, {}) for ids in PROMPTS])
            return sum(o.rounds for o in outputs) / sum(len(o.ids) for o in outputs)

    for mode in ("parallel", "sequential"):
        assert run_case(case, mode) == pytest.approx(10 / 41)


# --- floods --------------------------------------------------------------------------------------


def test_streams_keep_their_interval(run_case, models) -> None:
    """A part comes when a round reaches the interval or passes it, also where no round ends right behind it."""
    intervals = (1, 2, 3, 5, 8)
    asks: list[Ask] = [(PROMPTS[0], 60, {"fields": {"stream": True}, "stream_interval": n}) for n in intervals]
    outputs, _ = run_case(together, models, "D_same", 3, "overlapped", asks)
    for output, interval in zip(outputs, intervals):
        parts = [end - begin for begin, end in zip([0, *output.chunks], output.chunks)]
        assert parts[0] == 1 and sum(parts) == 60
        assert max(parts) < interval + 4, f"every {interval} tokens: {output.chunks}"
        # Each but the last passes a multiple of its own.
        assert len(parts) <= 60 // interval + 2


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_flood_of_single_tokens(run_case, models, oracle, mode) -> None:
    """Requests that end with their prefill never see a round; two hundred of them beside long ones."""
    prompts = make_prompts(50)

    def case() -> tuple[list[Output], list[Output]]:
        with Rig(models, "D_mid", 3, mode, "overlapped", max_running_requests=7) as rig:
            long = [rig.submit(ids, 40) for ids in prompts[:3]]
            rids = [rig.submit(prompts[i % 50], 1) for i in range(200)]
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in long], [rig.output(rid) for rid in rids]

    long, short = run_case(case)
    truth = oracle.greedy(prompts)
    assert_prefixes(long, [40] * 3, truth[:3])
    assert_prefixes(short, [1] * 200, truth * 4)
    assert all(output.rounds == 0 for output in short)


def test_prompts_at_the_end_of_the_context(run_case, models, oracle) -> None:
    """Room for one token, for a few, for none: as many come out as on the plain server."""
    long_prompt = ([BOS] + [(7 * j + j * j) % 250 + 10 for j in range(600)])[:512]
    asks: list[Ask] = [(long_prompt[:n], 20, {}) for n in (490, 500, 505, 508, 509, 510, 511, 512)]
    found, _ = run_case(together, models, "D_same", 4, "overlapped", asks)
    expected = oracle.outputs(asks)
    for (ids, _, _), ours, theirs in zip(asks, found, expected):
        assert (ours.ids, ours.finish) == (theirs.ids, theirs.finish), f"a prompt of {len(ids)} tokens"


@pytest.mark.parametrize(("mode", "running"), [("parallel", (3, 3)), ("sequential", (3,))])
def test_free_places_of_all_slots_count(run_case, models, oracle, mode, running) -> None:
    """``--min-free-slots-delay`` holds nobody back on a server with room, whatever one slot would admit."""

    def case() -> tuple[list[Output], int]:
        with Rig(models, "D_mid", 3, mode, "overlapped", min_free_slots_delay=4) as rig:
            rids = [rig.submit(ids, 40) for ids in PROMPTS[: sum(running)]]
            rig.turns(6)
            rids.append(rig.submit(PROMPTS[7], 40))
            rig.turns(3)
            waiting = len(rig.scheduler.waiting_queue)
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids], waiting

    outputs, waiting = run_case(case)
    assert waiting == 0
    assert_prefixes(outputs, [40] * len(outputs), oracle.greedy([*PROMPTS[: sum(running)], PROMPTS[7]]))


@pytest.mark.parametrize("loop", LOOPS)
def test_the_watchdog_sees_a_slot_alone_at_work(run_case, models, loop) -> None:
    """It looks at ``cur_batch_for_debug``: None says that nothing can hang."""

    def case() -> tuple[list[bool], bool]:
        with Rig(models, "D_mid", 3, "parallel", loop) as rig:
            finish, seen = rig.scheduler._psd_finish, []

            def watched(slot) -> None:
                if slot.in_flight is not None:
                    seen.append(rig.scheduler.cur_batch_for_debug is not None)
                finish(slot)

            rig.scheduler._psd_finish = watched
            rig.run([(PROMPTS[0], 20, {})])
            rig.turns(2)
            rig.scheduler._psd_finish = finish
            rig.idle_check()
            return seen, rig.scheduler.cur_batch_for_debug is None

    seen, at_rest = run_case(case)
    assert len(seen) > 5 and all(seen) and at_rest


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_requests_of_known_length_are_admitted_for_good(run_case, models, oracle, mode) -> None:
    """Without a prefix cache SGLang forecasts the pool for them: nobody has to be retracted, in two slots either."""

    def case() -> list[Output]:
        options = {"disable_radix_cache": True, "max_total_tokens": 5 * (LONGEST + 10)}
        with Rig(models, "D_mid", 3, mode, "overlapped", **options) as rig:
            outputs = rig.run([(ids[:10], LONGEST, {}) for ids in PROMPTS])
            rig.idle_check()
            return outputs

    outputs = run_case(case)
    assert sum(output.retractions for output in outputs) == 0
    assert_prefixes(outputs, [LONGEST] * 8, oracle.greedy([ids[:10] for ids in PROMPTS]))
