"""Pages of 16 and 64 tokens: the text of page size 1, prefixes are found, memory comes back whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import BOS
from tests.rig.oracle import assert_prefixes
from tests.rig.rig import Output, Rig
from tests.rig.test_identity import assert_full_acceptance, staggered_lengths

LOOPS = ("synchronous", "overlapped")
SIZES = (16, 64)


def prompt_of(length: int) -> list[int]:
    """A prompt of exactly ``length`` tokens; no two begin alike."""
    return [BOS] + [(11 * j + j * j + length) % 250 + 10 for j in range(length - 1)]


# --- flash attention, which has none of this without a GPU ----------------------------------------


def test_its_page_tables_have_room_behind_the_context(sglang_loaded) -> None:
    """Alone and within a hybrid backend, once each; other backends are left alone."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    from sglang_psd.target.page_tables import widen_page_tables

    def flash(page_size: int) -> FlashAttentionBackend:
        backend = object.__new__(FlashAttentionBackend)
        backend.max_context_len, backend.page_size = 2048, page_size
        backend.max_num_pages = 2048 // page_size
        return backend

    alone = flash(1)
    widen_page_tables(alone, 4)
    assert (alone.max_context_len, alone.max_num_pages) == (2052, 2052)

    hybrid, inner, other = object.__new__(AttentionBackend), flash(16), object.__new__(AttentionBackend)
    hybrid.prefill_backend, hybrid.decode_backend, hybrid.children = inner, other, [inner]
    widen_page_tables(hybrid, 4)
    assert (inner.max_context_len, inner.max_num_pages) == (2052, 129)
    assert vars(other) == {}


# --- the allocator itself ------------------------------------------------------------------------

GROWTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6)


@given(GROWTHS, st.sampled_from([1, 2, 16, 64]))
@settings(max_examples=300, deadline=None)
def test_slots_are_those_of_sglangs_own_reference(sglang_loaded, growths, page_size) -> None:
    """Against ``alloc_extend_naive``, which SGLang keeps for machines without Triton, and slot by slot."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    from sglang_psd.cpu.pages import decode_slots, extend_slots

    prefix = torch.tensor([before for before, _ in growths])
    total = torch.tensor([before + more for before, more in growths])
    # The last token of each prefix stands where its position within a page says.
    last = torch.tensor([1000 * page_size * (i + 1) + (p - 1) % page_size for i, p in enumerate(prefix.tolist())])
    free = torch.arange(7, 500)
    found, expected = torch.full((2, int((total - prefix).sum())), -1)
    extend_slots(prefix, total, last, free, found, 8, page_size)
    alloc_extend_naive(prefix, total, last, free, expected, page_size, "cpu")
    assert torch.equal(found, expected)
    one_more = torch.full((len(growths),), -1)
    decode_slots(prefix + 1, last, free, one_more, 8, page_size)
    alloc_extend_naive(prefix, prefix + 1, last, free, expected := torch.full_like(one_more, -1), page_size, "cpu")
    assert torch.equal(one_more, expected)


def test_too_few_pages(sglang_loaded) -> None:
    """Nothing is read beyond the free list: the allocator finds out and says None."""
    import torch

    from sglang_psd.cpu.pages import extend_slots

    out = torch.full((40,), -1)
    extend_slots(torch.tensor([0]), torch.tensor([40]), torch.tensor([-1]), torch.arange(2), out, 1, 16)
    assert out.eq(-1).all()


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.parametrize(("draft", "k", "loop"), [("D_same", 4, "overlapped"), ("D_mid", 3, "synchronous")])
def test_prompts_on_a_page_or_chunk_border(run_case, models, oracle, draft, k, loop, page_size) -> None:
    """Cold and warm, read whole or in chunks: the same text, and as many drafts accepted."""
    prompts = [prompt_of(n) for n in (15, 16, 17, 63, 64, 65, 127, 128, 129)]
    lengths = staggered_lengths(len(prompts))

    def case() -> list[list[Output]]:
        with Rig(models, draft, k, loop=loop, page_size=page_size, chunked_prefill_size=64) as rig:
            waves = []
            for _ in range(2):
                rids = [rig.submit(ids, n) for ids, n in zip(prompts, lengths)]
                rig.run_until_done()
                if draft == "D_same":
                    assert_full_acceptance(rig, rids, k)
                waves.append([rig.output(rid) for rid in rids])
            rig.idle_check()
            return waves

    cold, warm = run_case(case)
    truth = oracle.greedy(prompts)
    for outputs in (cold, warm):
        assert_prefixes(outputs, lengths, truth)
    assert sum(o.cached for o in warm) > sum(o.cached for o in cold), "no prefix was hit"


@pytest.mark.parametrize("page_size", SIZES)
def test_cached_tokens_are_those_of_the_plain_server(run_case, models, page_size) -> None:
    """One after the other, so that both servers have the same cache."""
    common = prompt_of(70)
    asks = [(common[:n] + tail, 9, {}) for n, tail in ((70, []), (70, [5]), (33, [7, 8]), (64, [9]), (70, []))]

    def case(draft: str | None) -> list[Output]:
        with Rig(models, draft, 4, page_size=page_size) as rig:
            return rig.run_each(asks)

    plain, found = run_case(case, None), run_case(case, "D_same")
    assert [o.ids for o in found] == [o.ids for o in plain]
    assert [o.cached for o in found] == [o.cached for o in plain]
    assert sum(o.cached for o in plain) > 0


@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_retraction_with_pages(run_case, models, oracle, mode, page_size) -> None:
    """A pool for a few requests; drafts are reserved by whole pages too."""
    prompts = [prompt_of(40 + i) for i in range(9)]

    def case() -> list[Output]:
        # A low conservativeness makes admission ignore what the requests will need.
        options = {"max_total_tokens": 640 if page_size == 64 else 480, "schedule_conservativeness": 0.05}
        with Rig(models, "D_mid", 3, mode, "overlapped", page_size=page_size, **options) as rig:
            outputs = rig.run([(ids, 40, {}) for ids in prompts])
            rig.idle_check()
            return outputs

    outputs = run_case(case)
    assert_prefixes(outputs, [40] * len(prompts), oracle.greedy(prompts))
    assert sum(o.retractions for o in outputs) > 0, "the pool was not small enough for this test"


@pytest.mark.parametrize("k", range(1, 9))
def test_every_number_of_drafts_with_pages(run_case, models, oracle, k) -> None:
    """Two hundred tokens, over many page borders, with one to eight drafts a round."""
    draft = ("D_same", "D_mid", "D_bad")[k % 3]
    asks = [(prompt_of(n), 200, {}) for n in (3, 14, 30)]

    def case() -> list[Output]:
        with Rig(models, draft, k, ("parallel", "sequential")[k % 2], LOOPS[k // 2 % 2], page_size=16) as rig:
            outputs = rig.run(asks)
            rig.idle_check()
            return outputs

    found, expected = run_case(case), oracle.outputs(asks)
    assert [output.ids for output in found] == [output.ids for output in expected]
