"""Everything that may happen to a request while two slots run: its text and its neighbours' stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import BOS
from tests.rig.oracle import LONGEST, assert_prefixes, make_prompts
from tests.rig.rig import Output, Rig

LOOPS = ("synchronous", "overlapped")
PROMPTS = make_prompts(9)


def assert_plain(outputs: dict[str, Output], truth: list[list[int]], lengths: list[int], aborted: set[int]) -> None:
    """Aborted requests stopped somewhere on the plain text, all others reached its end."""
    for i, output in enumerate(outputs.values()):
        if i in aborted:
            assert output.finish is not None and output.finish["type"] == "abort", f"request {i}: {output.finish}"
            assert output.ids == truth[i][: len(output.ids)]
            assert len(output.ids) < lengths[i]
        else:
            assert_prefixes([output], [lengths[i]], [truth[i]])


# --- abort ---------------------------------------------------------------------------------------

# Turns before the abort, and the requests hit: with 7 requests and the overlapped loop, slot 0 gets 0-3, slot 1 4-6.
ABORTS = {
    "waiting": (0, [0, 6]),
    "prefill of slot 0 in flight": (1, [1]),
    "waiting for slot 1": (1, [5]),
    "prefill of slot 1 in flight": (2, [4, 2]),
    "decode of slot 0 in flight": (7, [0]),
    "decode of slot 0 in flight, other slot": (7, [6]),
    "decode of slot 1 in flight": (8, [4, 5]),
    "decode of slot 1 in flight, other slot": (8, [3]),
    "all of slot 1": (8, [4, 5, 6]),
    "all of slot 0": (8, [0, 1, 2, 3]),
}


def _abort(models: Path, loop: str, mode: str, turns: int, victims: list[int]) -> dict[str, Output]:
    with Rig(models, "D_mid", 3, mode, loop) as rig:
        rids = [rig.submit(ids, 24) for ids in PROMPTS[:7]]
        rig.turns(turns)
        for victim in victims:
            rig.abort(rids[victim])
        rig.run_until_done()
        rig.idle_check()
        return rig.outputs()


@pytest.mark.parametrize("phase", ABORTS)
@pytest.mark.parametrize("loop", LOOPS)
def test_abort(run_case, models, oracle, loop, phase) -> None:
    turns, victims = ABORTS[phase]
    outputs = run_case(_abort, models, loop, "parallel", turns, victims)
    assert_plain(outputs, oracle.greedy(PROMPTS[:7]), [24] * 7, set(victims))


def test_abort_in_one_slot_mode(run_case, models, oracle) -> None:
    outputs = run_case(_abort, models, "overlapped", "sequential", 5, [2, 5])
    assert_plain(outputs, oracle.greedy(PROMPTS[:7]), [24] * 7, {2, 5})


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_abort_between_chunks_of_a_prompt(run_case, models, oracle, loop, turns) -> None:
    long_prompt = PROMPTS[5] * 2

    def case() -> dict[str, Output]:
        with Rig(models, "D_mid", 3, loop=loop, chunked_prefill_size=8) as rig:
            first = rig.submit(long_prompt, 20)
            rig.submit(PROMPTS[1], 20)
            rig.turns(turns)
            rig.abort(first)
            rig.run_until_done()
            rig.idle_check()
            return rig.outputs()

    truth = oracle.greedy([long_prompt, PROMPTS[1]])
    assert_plain(run_case(case), truth, [20, 20], {0})


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_prompt_aborted_between_chunks_leaves_the_drafter(run_case, models, mode) -> None:
    """No forward brings it back; on a server that is never idle such prompts would pile up in the drafter's pool."""

    def case() -> None:
        from sglang_psd.scheduler import vitals

        vitals.PING_EVERY_S = 0.05
        with Rig(models, "D_mid", 3, mode, chunked_prefill_size=8) as rig:
            other = rig.submit(PROMPTS[1], 400)
            rig.turns(4)
            first = rig.submit(PROMPTS[5] * 3, 20)
            rig.turns(3)
            assert rig.scheduler.chunked_req is rig.request(first) and rig.open_in_drafter == 2
            rig.abort(first)
            rig.run_until(lambda: rig.open_in_drafter == 1, "the prompt to leave")
            rig.run_until(lambda: rig.scheduler.psd_client.stats is not None, "an answer of the drafter")
            assert rig.unfinished() == [other]
            rig.abort(other)
            rig.run_until_done()
            rig.idle_check()

    run_case(case)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_the_drafter_forgets_a_prompt_that_is_aborted(run_case, models, loop, turns) -> None:
    """At once, not when the server is idle: it would hold a row and KV there that others need for their drafts."""

    def case() -> tuple[int, list[str]]:
        with Rig(models, "D_mid", 3, loop=loop, chunked_prefill_size=8) as rig:
            rig.submit(PROMPTS[1], 200)
            rig.turns(6)
            first = rig.submit(PROMPTS[5] * 2, 20)
            rig.turns(turns)
            rig.abort(first)
            rig.turns(6)
            assert first not in rig.unfinished()
            return rig.open_in_drafter, rig.unfinished()

    held, unfinished = run_case(case)
    assert held == len(unfinished) == 1


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("turns", [1, 2, 6, 7])
def test_abort_all(run_case, models, loop, turns) -> None:
    def case() -> list[dict | None]:
        with Rig(models, "D_mid", 3, loop=loop, max_running_requests=5) as rig:
            for ids in PROMPTS:
                rig.submit(ids, 40)
            rig.turns(turns)
            rig.abort(everyone=True)
            for _ in range(20):
                rig.turn()
            assert not rig.unfinished()
            rig.idle_check()
            return [output.finish for output in rig.outputs().values()]

    assert all(finish is not None and finish["type"] == "abort" for finish in run_case(case))


# --- pause, flush --------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("turns", [1, 2, 7, 8])
def test_pause_and_continue(run_case, models, oracle, mode, loop, turns) -> None:
    lengths = [24] * 7

    def case() -> list[Output]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        with Rig(models, "D_mid", 3, loop=loop) as rig:
            rids = [rig.submit(ids, 24) for ids in PROMPTS[:7]]
            rig.turns(turns)
            rig.tell(PauseGenerationReqInput(mode=mode))
            before = [len(rig.request(rid).output_ids) for rid in rids]
            rig.turns(3)
            assert [len(rig.request(rid).output_ids) for rid in rids] == before, "a paused server went on"
            if mode == "retract":
                assert all(slot.drained() for slot in rig.scheduler.psd_slots)
                assert len(rig.scheduler.waiting_queue) == 7
                rounds = rig.scheduler.psd_stats.rounds
                assert rig.scheduler.psd_report()["rounds"] == rounds, "not all that was processed has been counted"
            rig.tell(ContinueGenerationReqInput())
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    assert_prefixes(run_case(case), lengths, oracle.greedy(PROMPTS[:7]))


@pytest.mark.parametrize("loop", LOOPS)
def test_flush_waits_for_both_slots(run_case, models, oracle, loop) -> None:
    """One request: one slot is empty, whichever SGLang looks at last."""

    def case() -> tuple[list[Output], int]:
        refused = 0
        with Rig(models, "D_mid", 3, loop=loop) as rig:
            rid = rig.submit(PROMPTS[3], 20)
            while not rig.request(rid).finished():
                rig.turn()
                if not rig.request(rid).finished():
                    assert not rig.scheduler.flush_cache(), "flushed under a running request"
                    refused += 1
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid)], refused

    outputs, refused = run_case(case)
    assert refused > 5
    assert_prefixes(outputs, [20], oracle.greedy([PROMPTS[3]]))


# --- slots fill and empty ------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_a_slot_empties_and_refills(run_case, models, oracle, loop) -> None:
    """All of slot 0 ends early; requests move over, later ones join; both slots are used again."""
    lengths = [5, 5, 5, 40, 40, 40, 30, 30, 30]

    def case() -> tuple[list[Output], list[tuple[int, ...]], int]:
        with Rig(models, "D_mid", 3, loop=loop) as rig:
            rids = [rig.submit(ids, n) for ids, n in zip(PROMPTS[:6], lengths)]
            sizes = []
            for turn in range(400):
                if turn == 16:
                    rids += [rig.submit(ids, n) for ids, n in zip(PROMPTS[6:], lengths[6:])]
                rig.turn()
                sizes.append(tuple(len(slot.live_requests()) for slot in rig.scheduler.psd_slots))
                if turn > 16 and not rig.unfinished():
                    break
            rig.run_until_done()
            moves = rig.scheduler.psd_stats.moves
            # A flush, which is part of this, starts all figures anew.
            rig.idle_check()
            return [rig.output(rid) for rid in rids], sizes, moves

    outputs, sizes, moves = run_case(case)
    assert_prefixes(outputs, lengths, oracle.greedy(PROMPTS))
    assert moves > 0
    assert any(0 in pair and sum(pair) for pair in sizes), "no slot was ever empty alone"
    settled = [pair for pair in sizes if sum(pair) > 3]
    assert sum(abs(a - b) <= 1 for a, b in settled) > 0.8 * len(settled), f"the slots stayed uneven: {sizes}"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("pool", [75, 100, 130])
def test_single_requests_do_not_starve_each_other(run_case, models, oracle, pool, loop) -> None:
    """Three requests, admitted together, in a pool for one or two.

    A slot with one request left sees nobody to retract, though the other slot holds the memory: SGLang would abort it.
    """

    def case() -> list[Output]:
        # A low conservativeness makes admission ignore what the requests will need.
        options = {"max_total_tokens": pool, "schedule_conservativeness": 0.05}
        with Rig(models, "D_mid", 3, loop=loop, **options) as rig:
            rids = [rig.submit(PROMPTS[i], LONGEST) for i in (1, 2, 3)]
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    outputs = run_case(case)
    assert_prefixes(outputs, [LONGEST] * 3, oracle.greedy([PROMPTS[i] for i in (1, 2, 3)]))
    assert sum(output.retractions for output in outputs) > 0, "the pool was not small enough for this test"


def test_a_prompt_just_read_gives_way(run_case, models, oracle) -> None:
    """It holds the memory that a lone request in the other slot needs, and has not begun to decode."""
    long_prompt = (PROMPTS[5] * 9)[:68]

    def case() -> list[Output]:
        # A low conservativeness makes admission ignore what a chunk of nine tokens will need.
        options = {"max_total_tokens": 100, "schedule_conservativeness": 0.05}
        with Rig(models, "D_same", 8, loop="overlapped", **options) as rig:
            rids = [rig.submit(PROMPTS[1], LONGEST)]
            rig.run_until(lambda: len(rig.request(rids[0]).output_ids) == 10, "ten tokens")
            rids.append(rig.submit(long_prompt, 2))
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    outputs = run_case(case)
    assert_prefixes(outputs, [LONGEST, 2], oracle.greedy([PROMPTS[1], long_prompt]))
    assert [output.retractions for output in outputs] == [0, 1], "the pool was not small enough for this test"


@pytest.mark.parametrize("loop", LOOPS)
def test_nobody_ends_for_memory_that_others_hold(run_case, models, oracle, loop) -> None:
    """A pool for the largest request alone: whoever is in its way gives way, in either slot, also if just read."""
    long = [BOS] + [(7 * j + j * j) % 250 + 10 for j in range(90)]
    prompts = [ids if i % 3 else [*long[: 60 + 3 * i], ids[-1]] for i, ids in enumerate(PROMPTS)]

    def case() -> list[Output]:
        options = {"max_total_tokens": max(map(len, prompts)) + 20 + 31, "schedule_conservativeness": 0.05}
        with Rig(models, "D_mid", 31, loop=loop, **options) as rig:
            rids = []
            for i in range(27):
                rids.append(rig.submit(prompts[i % 9], 20))
                rig.turns(i % 4)
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    outputs = run_case(case)
    assert_prefixes(outputs, [20] * 27, oracle.greedy(prompts) * 3)
    assert sum(output.retractions for output in outputs) > 0, "the pool was not small enough for this test"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_larger_than_the_pool(run_case, models, oracle, loop) -> None:
    """It ends, as it does on the plain server, and the next one is served."""
    long_prompt = (PROMPTS[5] * 3)[:60]

    def case(speculative: bool) -> list[Output]:
        with Rig(models, "D_mid" if speculative else None, 3, loop=loop, max_total_tokens=100) as rig:
            first = rig.submit(long_prompt, 80)
            rig.run_until_done()
            second = rig.submit(PROMPTS[1], 20)
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in (first, second)]

    plain, found = run_case(case, False), run_case(case, True)
    assert found[0].ids == plain[0].ids and found[0].finish == plain[0].finish
    assert_prefixes(found[1:], [20], oracle.greedy([PROMPTS[1]]))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("turns", range(1, 9))
def test_pause_while_a_prompt_is_read_in_chunks(run_case, models, oracle, loop, turns) -> None:
    """The prompt that is being read stands in a slot and by itself: it is retracted once, whichever turn it is."""
    long_prompts = [PROMPTS[i % len(PROMPTS)] * 6 for i in range(3)]

    def case() -> list[Output]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        with Rig(models, "D_mid", 3, loop=loop, chunked_prefill_size=16) as rig:
            rids = [rig.submit(ids, 12) for ids in [*PROMPTS[:2], *long_prompts]]
            rig.turns(turns)
            rig.tell(PauseGenerationReqInput(mode="retract"))
            assert all(slot.drained() for slot in rig.scheduler.psd_slots)
            assert len(rig.scheduler.waiting_queue) == len(rids)
            rig.tell(ContinueGenerationReqInput())
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    truth = oracle.greedy([*PROMPTS[:2], *long_prompts])
    assert_prefixes(run_case(case), [12] * 5, truth)
