"""Greedy text is the target's own, token for token, whatever the drafter, chunk, batch, slot or pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_psd.scheduler.devices import DrafterDevice
from tests.models import SHORT_CONTEXT_LEN
from tests.rig.oracle import assert_prefixes, make_prompts
from tests.rig.rig import Output, Rig

DRAFTS = ("D_same", "D_mid", "D_bad")
LOOPS = ("synchronous", "overlapped")
MODES = ("parallel", "sequential")
BATCHES = (1, 2, 7, 16)
PROMPTS = make_prompts(16)


def staggered_lengths(count: int) -> list[int]:
    """Output lengths such that requests end one by one."""
    return [9 + (11 * i) % 17 for i in range(count)]


def run_lengths(rig: Rig, prompts: list[list[int]], lengths: list[int]) -> list[str]:
    """Submit together, run until done; returns the ids."""
    rids = [rig.submit(ids, length) for ids, length in zip(prompts, lengths)]
    rig.run_until_done()
    return rids


def assert_full_acceptance(rig: Rig, rids: list[str], k: int, *, spared: int = 0) -> None:
    """Every round but a request's last one emits ``k + 1`` tokens, and no right draft is rejected.

    ``spared`` rounds in all may have run without drafts.
    """
    for rid in rids:
        rounds = rig.rounds_of(rid)
        seen = [(row.drafts, row.gained) for row in rounds]
        assert all(row.gained == row.drafts + 1 for row in rounds), f"{rid} rejected right drafts: {seen}"
        bare = sum(row.drafts == 0 for row in rounds[:-1])
        assert all(row.drafts in (0, k) for row in rounds[:-1]), f"{rid} had short chains: {seen}"
        spared -= bare
        assert spared >= 0, f"{rid} ran {bare} rounds without drafts: {seen}"


# --- every chunk, every drafter, every batch -----------------------------------------------------


def run_batches(
    models: Path, draft: str, k: int, mode: str, loop: str, sizes: tuple[int, ...] = BATCHES, **options: Any
) -> list[list[Output]]:
    """Batches of each size, one after the other, on one server."""
    with Rig(models, draft, k, mode, loop, **options) as rig:
        results = []
        for size in sizes:
            rids = run_lengths(rig, PROMPTS[:size], staggered_lengths(size))
            if draft == "D_same":
                assert_full_acceptance(rig, rids, k)
            results.append([rig.output(rid) for rid in rids])
            # A warm cache is a test of its own: here every batch starts cold.
            rig.idle_check()
        return results


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("draft", DRAFTS)
def test_batches(run_case, models, oracle, draft: str, k: int) -> None:
    turn = k + DRAFTS.index(draft)
    mode, loop = MODES[turn % 2], LOOPS[turn // 2 % 2]
    truth = oracle.greedy(PROMPTS)
    for size, outputs in zip(BATCHES, run_case(run_batches, models, draft, k, mode, loop)):
        assert_prefixes(outputs, staggered_lengths(size), truth)
        if draft == "D_bad":
            assert sum(output.accepted for output in outputs) <= 2


@pytest.mark.parametrize("mode", MODES)
def test_drafter_on_the_targets_device(run_case, models, oracle, mode: str) -> None:
    """It does nothing beside a verify: chains that were accepted as a whole are caught up by the next one."""

    def case() -> list[list[Output]]:
        from sglang_psd.drafter.model import DraftModel
        from sglang_psd.scheduler import launch

        del DraftModel.feed_last  # the drafter, forked from here, would be lost with the first call
        launch.choose_device = lambda *_: DrafterDevice(None, shared=True)  # type: ignore[assignment]
        return run_batches(models, "D_same", 3, mode, "overlapped")

    truth = oracle.greedy(PROMPTS)
    for size, outputs in zip(BATCHES, run_case(case)):
        assert_prefixes(outputs, staggered_lengths(size), truth)


def test_accept_length_arithmetic(run_case, models, oracle) -> None:
    """SGLang's own counters tell the same: one token from the prefill, K + 1 from each round."""
    k, rounds = 3, 5
    length = 1 + (k + 1) * rounds
    truth = oracle.greedy(PROMPTS[:7])

    def case() -> list[Output]:
        with Rig(models, "D_same", k) as rig:
            return rig.run([(ids, length, {}) for ids in PROMPTS[:7]])

    outputs = run_case(case)
    assert_prefixes(outputs, [length] * 7, truth)
    assert [(output.rounds, output.accepted) for output in outputs] == [(rounds, k * rounds)] * 7


# --- how the prompt gets into the cache ----------------------------------------------------------


def _warm_and_chunked(models: Path, draft: str, loop: str, chunk: int | None) -> list[list[Output]]:
    options = {} if chunk is None else {"chunked_prefill_size": chunk}
    with Rig(models, draft, 3, loop=loop, **options) as rig:
        waves = []
        for _ in range(2):
            rids = run_lengths(rig, PROMPTS, staggered_lengths(16))
            if draft == "D_same":
                assert_full_acceptance(rig, rids, 3)
            waves.append([rig.output(rid) for rid in rids])
        rig.idle_check()
        return waves


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_prefix_hits_and_chunked_prefill(run_case, models, oracle, draft, chunk, loop) -> None:
    truth = oracle.greedy(PROMPTS)
    cold, warm = run_case(_warm_and_chunked, models, draft, loop, chunk)
    for outputs in (cold, warm):
        assert_prefixes(outputs, staggered_lengths(16), truth)
    assert sum(output.cached for output in warm) > sum(output.cached for output in cold), "no prefix was hit"


@pytest.mark.parametrize("loop", LOOPS)
def test_shared_prefix(run_case, models, oracle, loop) -> None:
    """A long common beginning, other endings, some of them prompts that end inside the common part."""
    common = make_prompts(1, first=5)[0] * 2
    prompts = [common + ending for ending in ([], [11], [11, 12], [99, 98, 97])] + [common[:20], common[:33]]
    truth = oracle.greedy(prompts)

    def case() -> list[list[Output]]:
        with Rig(models, "D_same", 4, loop=loop) as rig:
            waves = []
            for _ in range(2):
                rids = run_lengths(rig, prompts, staggered_lengths(len(prompts)))
                assert_full_acceptance(rig, rids, 4)
                waves.append([rig.output(rid) for rid in rids])
            rig.idle_check()
            return waves

    for outputs in run_case(case):
        assert_prefixes(outputs, staggered_lengths(len(prompts)), truth)


# --- too little memory ---------------------------------------------------------------------------


def _crowded(models: Path, draft: str, mode: str, loop: str) -> list[Output]:
    with Rig(models, draft, 3, mode, loop, max_total_tokens=170) as rig:
        rids = run_lengths(rig, PROMPTS[:9], [40] * 9)
        if draft == "D_same":
            # The drafter's pool is as small as the target's: it can be full in the round that makes the target retract.
            assert_full_acceptance(rig, rids, 3, spared=6)
        rig.idle_check()
        return [rig.output(rid) for rid in rids]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_retraction(run_case, models, oracle, draft, mode, loop) -> None:
    outputs = run_case(_crowded, models, draft, mode, loop)
    assert_prefixes(outputs, [40] * 9, oracle.greedy(PROMPTS[:9]))
    assert sum(output.retractions for output in outputs) > 0, "the pool was not small enough for this test"


# --- who runs when -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("loop", LOOPS)
def test_small_running_limit(run_case, models, oracle, limit, loop) -> None:
    """The limit counts both slots together and can be reached."""
    lengths = staggered_lengths(11)

    def case() -> tuple[list[Output], int]:
        with Rig(models, "D_mid", 3, loop=loop, max_running_requests=limit) as rig:
            rids = [rig.submit(ids, n) for ids, n in zip(PROMPTS, lengths)]
            most = 0
            while not all(rig.request(rid).finished() for rid in rids):
                rig.turn()
                most = max(most, sum(len(slot.live_requests()) for slot in rig.scheduler.psd_slots))
            rig.idle_check()
            return [rig.output(rid) for rid in rids], most

    outputs, most = run_case(case)
    assert_prefixes(outputs, lengths, oracle.greedy(PROMPTS[:11]))
    assert most == limit


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draft", ["D_mid", "D_hid"])
def test_staggered_arrivals(run_case, models, oracle, draft, loop) -> None:
    """Sixty-odd requests of 1 to 40 tokens come while others run; nine at a time."""
    prompts = make_prompts(63)
    lengths = [1 + (17 * i) % 40 for i in range(63)]

    def case() -> list[Output]:
        with Rig(models, draft, 3, loop=loop, max_running_requests=9) as rig:
            rids = []
            for i, (ids, length) in enumerate(zip(prompts, lengths)):
                rids.append(rig.submit(ids, length))
                rig.turns(i % 4)
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    assert_prefixes(run_case(case), lengths, oracle.greedy(prompts))


# --- other draft models --------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4])
def test_padded_vocabulary(run_case, models, oracle, k) -> None:
    """Padding rows of the draft have the largest logits of all; they are never proposed."""

    def case() -> list[Output]:
        with Rig(models, "D_voc", k) as rig:
            rids = run_lengths(rig, PROMPTS[:5], staggered_lengths(5))
            assert_full_acceptance(rig, rids, k)
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    assert_prefixes(run_case(case), staggered_lengths(5), oracle.greedy(PROMPTS[:5]))


@pytest.mark.parametrize("loop", LOOPS)
def test_short_draft_context(run_case, models, oracle, loop) -> None:
    """Past the draft's context a request goes on alone and without drafts; its neighbours keep theirs."""
    long_prompt = (make_prompts(1, first=5)[0] * 3)[:50]
    prompts = [long_prompt, PROMPTS[1], long_prompt * 2, PROMPTS[3]]
    lengths = [40, 30, 20, 30]

    def case() -> tuple[list[Output], list[list[tuple[int, int]]]]:
        with Rig(models, "D_ctx", 3, loop=loop) as rig:
            rids = run_lengths(rig, prompts, lengths)
            rig.idle_check()
            rounds = [[(row.drafts, row.gained) for row in rig.rounds_of(rid)] for rid in rids]
            return [rig.output(rid) for rid in rids], rounds

    outputs, rounds = run_case(case)
    assert_prefixes(outputs, lengths, oracle.greedy(prompts))
    crossing, short, beyond, _ = rounds
    with_drafts = [drafts > 0 for drafts, _ in crossing]
    assert with_drafts[0] and not with_drafts[-1]
    assert with_drafts == sorted(with_drafts, reverse=True), "drafts came back beyond the context"
    reached = len(long_prompt) + 1 + sum(gained for drafts, gained in crossing if drafts)
    assert SHORT_CONTEXT_LEN - 4 <= reached <= SHORT_CONTEXT_LEN
    assert all(drafts > 0 for drafts, _ in short[:-1])
    assert all(drafts == 0 for drafts, _ in beyond)


@pytest.mark.parametrize("mode", MODES)
def test_qwen3(run_case, models, oracle, mode) -> None:
    """Another architecture: per-head norms and tied embeddings."""

    def case() -> list[Output]:
        with Rig(models, "Q_mid", 4, mode, target="Q") as rig:
            rids = run_lengths(rig, PROMPTS[:7], staggered_lengths(7))
            rig.idle_check()
            return [rig.output(rid) for rid in rids]

    assert_prefixes(run_case(case), staggered_lengths(7), oracle.greedy(PROMPTS[:7], target="Q"))


def test_other_tokens_are_refused(run_case, models) -> None:
    def case() -> str:
        from sglang_psd.errors import DraftMismatchError

        try:
            Rig(models, "D_tok", 3)
        except DraftMismatchError as error:
            return str(error)
        return ""

    message = run_case(case)
    assert "disagree on token" in message and "--speculative-draft-model-path" in message
