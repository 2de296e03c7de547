"""EAGLE heads: the drafts are the ones a replica computes, and the text is the plain server's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_psd.resources import TINY_EAGLE3, TINY_TARGET, load_prompts
from tests.heads import Replica
from tests.models import BOS
from tests.rig import sabotage
from tests.rig.law import exact_law, p_value
from tests.rig.oracle import Oracle, assert_prefixes, make_prompts
from tests.rig.rig import Ask, Output, Rig
from tests.rig.test_faults import kill, lose_and_recover, run_on_a_bad_wire, stop
from tests.rig.test_identity import staggered_lengths
from tests.rig.test_law import ALPHA, EACH, KINDS, LENGTH, SMALL, sample
from tests.rig.together import assert_same, plain, together

RunCase = Callable[..., Any]
TARGET_OF = {"L_e3": "L", "L_e3s": "L", "L_e1": "L", "B_e1": "B"}
PROMPTS = make_prompts(16)
LENGTHS = [40, 9, 31, 24, 17, 36]


@dataclass
class Draft:
    """Drafts of one request, the tokens they continue, and where the head's context begins."""

    rid: str
    tokens: list[int]
    drafts: list[int]


def record_drafts(rig: Rig) -> list[Draft]:
    """From now on, note what is drafted."""
    taken: list[Draft] = []
    original = rig.scheduler._psd_take

    def take(reqs, watch):
        result = original(reqs, watch)
        for req, row in zip(reqs, result.rows):
            if row is not None:
                taken.append(Draft(req.rid, [*req.origin_input_ids, *req.output_ids], row.tokens.tolist()))
        return result

    rig.scheduler._psd_take = take
    return taken


def assert_replica(
    models: Path, head: str, taken: list[Draft], k: int, left_out: dict[str, set[int]] | None = None
) -> None:
    replica = Replica(models / TARGET_OF[head], models / head)
    for draft in taken:
        lacking = (left_out or {}).get(draft.rid, set())
        expected = replica.draft(draft.tokens, k, lacking)[: len(draft.drafts)]
        assert draft.drafts == expected, f"{draft.rid} after {len(draft.tokens)} tokens, without {sorted(lacking)}"


def _agree(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _left_out(texts: dict[str, list[int]], cached: dict[str, int]) -> dict[str, set[int]]:
    """Positions that each request's context lacks when the head keeps all requests before it, in their order.

    A position has KV where the token after it agrees as well: at least the last cached one differs where texts part.
    """
    lacking: dict[str, set[int]] = {}
    before: list[str] = []
    for rid, text in texts.items():
        hit = cached[rid]
        choices = [(0, set(range(hit)))]
        for other in before:
            usable = min(hit, _agree(text, texts[other]) - 1)
            if usable > max(lacking[other], default=-1):
                choices.append((usable - len(lacking[other]), lacking[other] | set(range(usable, hit))))
        # The most recent of equals.
        lacking[rid] = max(reversed(choices), key=lambda choice: choice[0])[1]
        before.append(rid)
    return lacking


# --- the right hidden state for every token ------------------------------------------------------


def _drafts(models: Path, head: str, k: int, mode: str, **options: Any) -> tuple[list[Draft], list[Output]]:
    with Rig(models, head, k, mode, target=TARGET_OF[head], disable_radix_cache=True, **options) as rig:
        taken = record_drafts(rig)
        outputs = rig.run([(ids, n, {}) for ids, n in zip(PROMPTS, LENGTHS)])
        rig.idle_check()
        return taken, outputs


@pytest.mark.parametrize(
    ("head", "k", "mode", "options"),
    [
        ("L_e3", 4, "parallel", {}),
        ("L_e3s", 2, "sequential", {}),
        ("L_e1", 5, "parallel", {"loop": "overlapped"}),
        ("B_e1", 3, "parallel", {}),
        ("B_e1", 4, "parallel", {"chunked_prefill_size": 8}),
    ],
)
def test_drafts_are_the_replicas(
    run_case: RunCase, models: Path, oracle: Oracle, head: str, k: int, mode: str, options: dict
) -> None:
    """Every draft equals the one that a head without cache, batch and mailbox proposes after the same tokens."""
    taken, outputs = run_case(_drafts, models, head, k, mode, **options)
    assert_prefixes(outputs, LENGTHS, oracle.greedy(PROMPTS[: len(LENGTHS)], target=TARGET_OF[head]))
    assert len(taken) > 20
    assert_replica(models, head, taken, k)
    if head == "B_e1":
        assert sum(output.accepted for output in outputs) > 20, "too few drafts were right for this test"


BEGINNINGS = [[BOS, *PROMPTS[5]], PROMPTS[5] + [11, 12, 13], PROMPTS[5] * 2, PROMPTS[11]]


def _forget_ended() -> None:
    """A drafter that keeps nothing of ended requests, as one that was started again."""
    from sglang_psd.drafter.head_cache import EndedRequests

    EndedRequests.find = lambda *_: None  # type: ignore[method-assign]


def _cold_and_warm(
    models: Path, chunk: int, keeps: bool
) -> tuple[list[list[Output]], list[Draft], dict[str, list[int]], dict[str, int]]:
    if not keeps:
        _forget_ended()
    prompts = [*BEGINNINGS, BEGINNINGS[0]]
    with Rig(models, "B_e1", 3, target="B", chunked_prefill_size=chunk) as rig:
        waves, cached, texts = [], {}, {}
        taken = record_drafts(rig)
        for _ in range(2):
            rids = []
            for ids in prompts:
                rids.append(rig.submit(ids, 20))
                rig.run_until_done()
            # A second turn of the first conversation.
            first = rig.request(rids[0])
            rids.append(rig.submit([*first.origin_input_ids, *first.output_ids, 77, 78], 20))
            rig.run_until_done()
            waves.append([rig.output(rid) for rid in rids])
            cached |= {rid: rig.output(rid).cached for rid in rids}
            for rid in rids:
                texts[rid] = [*rig.request(rid).origin_input_ids, *rig.request(rid).output_ids]
        rig.idle_check()
        return waves, taken, texts, cached


@pytest.mark.parametrize(("chunk", "keeps"), [(8, True), (4096, True), (4096, False)])
def test_prefix_hits(run_case: RunCase, models: Path, oracle: Oracle, chunk: int, keeps: bool) -> None:
    """Tokens that the target finds in its prefix cache have no hidden states.

    The head goes on from what it keeps of ended requests: its drafts are those of a cold start, but for the position
    where texts part. Where it keeps nothing, its context begins after the hit.
    """
    prompts = [*BEGINNINGS, BEGINNINGS[0]]
    (cold, warm), taken, texts, cached = run_case(_cold_and_warm, models, chunk, keeps)
    truth = oracle.greedy(prompts, target="B")
    second_turn = [*BEGINNINGS[0], *truth[0][:20], 77, 78]
    for outputs in (cold, warm):
        assert_prefixes(outputs, [20] * 6, [*truth, *oracle.greedy([second_turn], target="B")])
    assert all(output.cached > 0 for output in warm), "no prefix was hit"
    assert warm[5].cached > len(BEGINNINGS[0]) + 10, "the answer of the first turn was not hit"
    lacking = {rid: set(range(hit)) for rid, hit in cached.items()}
    if keeps:
        lacking = _left_out(texts, cached)
        assert all(len(positions) <= 2 for positions in lacking.values()), "beginnings were not kept"
    assert_replica(models, "B_e1", taken, 3, lacking)


def test_shared_beginning_of_running_requests(run_case: RunCase, models: Path, oracle: Oracle) -> None:
    """A hit on what a running request has read: the head takes its KV from there."""
    prompts = [PROMPTS[5] * 2 + [first] for first in (20, 21, 22)]

    def case() -> tuple[list[Output], list[Draft], list[str]]:
        with Rig(models, "B_e1", 3, target="B") as rig:
            taken, rids = record_drafts(rig), []
            for ids in prompts:
                rids.append(rig.submit(ids, 30))
                rig.turns(3)
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids], taken, rids

    outputs, taken, rids = run_case(case)
    assert_prefixes(outputs, [30] * 3, oracle.greedy(prompts, target="B"))
    assert all(output.cached > 20 for output in outputs[1:]), "no prefix was hit"
    # They part at the last token of their prompts: the position before it is the one whose KV differs.
    assert_replica(models, "B_e1", taken, 3, {rid: {output.cached - 1} for rid, output in zip(rids[1:], outputs[1:])})


def test_a_head_of_another_target_is_refused(run_case: RunCase, models: Path) -> None:
    def case() -> list[str]:
        from sglang_psd.errors import PSDConfigError

        messages = []
        for head, target, options in (
            ("L_e3", "T", {}),
            ("S_e3", "L", {}),
            ("L_e3", "L", {"psd_draft_method": "eagle"}),
            ("D_mid", "T", {"psd_draft_method": "eagle3"}),
        ):
            try:
                Rig(models, head, 3, target=target, **options)
            except PSDConfigError as error:
                messages.append(str(error))
        return messages

    layers, vocabulary, kind, model = run_case(case)
    assert "of a target of 2 layers" in layers
    assert "was made for 16 tokens" in vocabulary
    assert "--psd-draft-method eagle does not fit" in kind and "used as eagle3" in kind
    assert "--psd-draft-method eagle3 does not fit" in model and "used as draft_model" in model


# --- greedy text ---------------------------------------------------------------------------------


def _batches(models: Path, k: int, mode: str, loop: str) -> list[list[Output]]:
    with Rig(models, "B_e1", k, mode, loop, target="B") as rig:
        waves = []
        for size in (2, 7, 16):
            waves.append(rig.run([(ids, n, {}) for ids, n in zip(PROMPTS[:size], staggered_lengths(size))]))
            rig.idle_check()
        return waves


@pytest.mark.parametrize("k", range(1, 9))
def test_batches(run_case: RunCase, models: Path, oracle: Oracle, k: int) -> None:
    mode, loop = ("parallel", "sequential")[k % 3 == 0], ("synchronous", "overlapped")[k % 2]
    for outputs in run_case(_batches, models, k, mode, loop):
        assert_prefixes(outputs, staggered_lengths(len(outputs)), oracle.greedy(PROMPTS, target="B"))
        assert sum(output.accepted for output in outputs) > 0


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_retraction(run_case: RunCase, models: Path, oracle: Oracle, mode: str) -> None:
    def case() -> list[Output]:
        with Rig(models, "B_e1", 3, mode, "overlapped", target="B", max_total_tokens=170) as rig:
            outputs = rig.run([(ids, 40, {}) for ids in PROMPTS[:9]])
            rig.idle_check()
            return outputs

    outputs = run_case(case)
    assert_prefixes(outputs, [40] * 9, oracle.greedy(PROMPTS[:9], target="B"))
    assert sum(output.retractions for output in outputs) > 0, "the pool was not small enough for this test"
    assert sum(output.accepted for output in outputs) > 20


def test_abort_pause_and_late_arrivals(run_case: RunCase, models: Path, oracle: Oracle) -> None:
    """Requests leave at any moment, all are retracted once, new ones come; prompts are read in chunks."""

    def case() -> tuple[list[Output], list[str]]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        with Rig(models, "B_e1", 3, loop="overlapped", target="B", chunked_prefill_size=8) as rig:
            rids = [rig.submit(ids, 24) for ids in PROMPTS[:7]]
            rig.turns(9)
            rig.abort(rids[2])
            rig.turns(2)
            rig.tell(PauseGenerationReqInput(mode="retract"))
            rig.tell(ContinueGenerationReqInput())
            rig.turns(3)
            rids += [rig.submit(ids, 24) for ids in PROMPTS[7:10]]
            rig.turns(1)
            rig.abort(rids[5])
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids], rids

    outputs, _ = run_case(case)
    truth = oracle.greedy(PROMPTS[:10], target="B")
    for i, output in enumerate(outputs):
        if i in (2, 5):
            assert output.ids == truth[i][: len(output.ids)]
        else:
            assert_prefixes([output], [24], [truth[i]])


@pytest.mark.parametrize("how", [True, "last"])
@pytest.mark.parametrize("head", ["L_e3", "L_e1"])
def test_hidden_states_that_users_ask_for(run_case: RunCase, models: Path, head: str, how: bool | str) -> None:
    """They are the last layer's, one row a token or one an answer, whatever the head reads."""
    target = TARGET_OF[head]
    options = {"return_hidden_states_mode": "full" if how is True else "last", "target": target}
    asks: list[Ask] = [(ids, 13, {"fields": {"return_hidden_states": how}}) for ids in PROMPTS[:3]]
    asks += [(PROMPTS[3], 13, {}), (PROMPTS[4], 1, {"fields": {"return_hidden_states": how}})]
    expected = run_case(plain, models, asks, **options)
    found, drafts = run_case(together, models, head, 3, "overlapped", asks, disable_radix_cache=True, **options)
    assert_same(found, expected, asks)
    for ours, theirs, (_, _, wish) in zip(found, expected, asks):
        shape, values = _flatten(ours.hidden_states)
        plain_shape, plain_values = _flatten(theirs.hidden_states)
        assert shape == plain_shape and bool(shape) == bool(wish)
        assert values == pytest.approx(plain_values, abs=1e-4)
    assert any(3 in each for each in drafts)


def _flatten(rows: list) -> tuple[list[int], list[float]]:
    """Lengths of all lists within ``rows``, and the numbers in them."""
    if not rows or not isinstance(rows[0], list):
        return [len(rows)] * bool(rows), list(rows)
    parts = [_flatten(row) for row in rows]
    return [n for shape, _ in parts for n in shape], [x for _, values in parts for x in values]


# --- when hidden states are missing --------------------------------------------------------------


def test_a_request_opened_in_its_middle(run_case: RunCase, models: Path, oracle: Oracle) -> None:
    """A drafter that was started again knows the tokens but no hidden states: it drafts from the next ones on."""

    def case() -> tuple[list[Output], list[Draft], dict[str, set[int]]]:
        _forget_ended()
        with Rig(models, "B_e1", 3, target="B", disable_radix_cache=True) as rig:
            rids = [rig.submit(ids, 40) for ids in PROMPTS[:4]]
            rig.turns(12)
            rig.scheduler.psd_client.close_all()
            taken, starts = record_drafts(rig), {}
            # The next verify runs without drafts; its first hidden state is that of the last token known now.
            for rid in rids:
                req = rig.request(rid)
                starts[rid] = set(range(len(req.origin_input_ids) + len(req.output_ids) - 1))
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids], taken, starts

    outputs, taken, starts = run_case(case)
    assert_prefixes(outputs, [40] * 4, oracle.greedy(PROMPTS[:4], target="B"))
    assert {draft.rid for draft in taken} == set(starts)
    assert_replica(models, "B_e1", taken, 3, starts)


def test_a_full_mailbox(run_case: RunCase, models: Path, oracle: Oracle) -> None:
    """Rows without room are dropped: drafts are missed, nothing else, and they come back."""

    def case() -> tuple[list[Output], int, int]:
        from sglang_psd.channel.ring import RowRing

        with Rig(models, "B_e1", 3, loop="overlapped", target="B") as rig:
            handoff = rig.scheduler.psd_handoff
            handoff._ring = RowRing(20)
            outputs = rig.run([(ids, 40, {}) for ids in PROMPTS[:7]])
            return outputs, handoff.totals.dropped, handoff.totals.rows

    outputs, dropped, rows = run_case(case)
    assert_prefixes(outputs, [40] * 7, oracle.greedy(PROMPTS[:7], target="B"))
    assert dropped > 20 and rows > 20
    assert sum(output.accepted for output in outputs) > 0


# --- faults --------------------------------------------------------------------------------------

HEAD = {"draft": "B_e1", "target": "B"}


@pytest.mark.parametrize("strike", [kill, stop])
def test_a_lost_head_comes_back(run_case: RunCase, models: Path, oracle: Oracle, strike: Callable[[Rig], None]) -> None:
    """Its successor has a mailbox of its own and knows no hidden states of running requests."""
    outcome = run_case(lose_and_recover, models, strike, None, 1, **HEAD)
    truth = oracle.greedy(PROMPTS[:9], target="B")
    assert_prefixes(outcome.outputs, [40] * 16, truth[:7] + truth)
    assert outcome.states == ["up", "waiting", "starting", "up"]
    assert outcome.accepted > 50, "the new drafter's drafts are of no use"


def test_a_successor_without_a_mailbox_is_no_successor(run_case: RunCase, models: Path, oracle: Oracle) -> None:
    """It ended between its greeting and the opening of its mailbox, or somebody removed the file."""
    outcome = run_case(lose_and_recover, models, kill, [None, sabotage.hide_mailbox], 2, **HEAD)
    truth = oracle.greedy(PROMPTS[:9], target="B")
    assert_prefixes(outcome.outputs, [40] * 16, truth[:7] + truth)
    assert outcome.states == ["up", *["waiting", "starting"] * 2, "up"]
    assert outcome.report["drafter"]["restarts"] == 2 and outcome.accepted > 50


@pytest.mark.parametrize("fault", ["duplicated", "reordered", "dropped", "corrupted"])
def test_a_bad_wire(run_case: RunCase, models: Path, oracle: Oracle, fault: str) -> None:
    """Word of hidden states is lost, repeated, overtaken or wrong: drafts suffer, nothing else."""
    outcome = run_case(run_on_a_bad_wire, models, fault, "overlapped", **HEAD)
    assert outcome.harmed > 5, "the wire was good"
    assert_prefixes(outcome.outputs, [40] * 18, oracle.greedy(PROMPTS[:9], target="B") * 2)
    assert outcome.drafts > 150 and outcome.report["mode"] == "parallel"


# --- sampled text --------------------------------------------------------------------------------


def _texts(models: Path) -> tuple[list, float]:
    config = {"integrity_checks": False}
    with Rig(models, "S_e3", 3, config=config, **{**SMALL, "target": "S4"}) as rig:
        texts = sample(rig, list(KINDS.values()), EACH)
        stats = rig.scheduler.psd_stats
        rate = stats.accepted / stats.verified
        rig.idle_check()
        return texts, rate


def test_law(run_case: RunCase, models: Path) -> None:
    """A head that can propose 12 of 16 tokens changes nothing about the law."""
    texts, rate = run_case(_texts, models, timeout_s=240)
    assert 0.05 < rate < 0.97
    for (name, options), found in zip(KINDS.items(), texts):
        value = p_value(found, exact_law(models, "S4", LENGTH, **options))
        assert value > ALPHA, f"{name}: p = {value}"


def test_a_seed_decides_the_text(run_case: RunCase, models: Path) -> None:
    """With a reduced vocabulary the noise that target and drafter share still belongs to the target's ids."""
    asks = [(ids, 24, {"temperature": 0.9, "sampling_seed": 100 + i}) for i, ids in enumerate(PROMPTS[:7])]

    def case(head: str, drafts: bool) -> list[Output]:
        with Rig(models, head, 4, target=TARGET_OF[head]) as rig:
            if not drafts:
                rig.scheduler.psd_client._fail("the test wants none")
            return rig.run(asks)

    for head in ("L_e3", "B_e1"):
        with_drafts, without = run_case(case, head, True), run_case(case, head, False)
        assert [output.ids for output in with_drafts] == [output.ids for output in without]
    assert sum(output.accepted for output in with_drafts) > 10


# --- the head that the repository carries --------------------------------------------------------


def _chat_prompts(count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    chats = [[{"role": "user", "content": prompt}] for prompt in load_prompts(count)]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        for chat in chats
    ]


@pytest.mark.skipif(not TINY_EAGLE3.is_dir(), reason="the checkout holds no tiny EAGLE-3 head")
@pytest.mark.parametrize(("k", "mode"), [(3, "parallel"), (8, "sequential")])
def test_the_trained_head(run_case: RunCase, models: Path, oracle: Oracle, k: int, mode: str) -> None:
    """A head that is right two times of three: long accepted runs, all drafts are the replica's, the text is plain."""
    prompts = _chat_prompts(6)

    def case() -> tuple[list[Draft], list[Output]]:
        options = {"target": str(TINY_TARGET), "loop": "overlapped", "disable_radix_cache": True}
        with Rig(models, str(TINY_EAGLE3), k, mode, **options) as rig:
            taken = record_drafts(rig)
            outputs = rig.run([(ids, 40, {}) for ids in prompts])
            rig.idle_check()
            return taken, outputs

    taken, outputs = run_case(case, timeout_s=240)
    assert_prefixes(outputs, [40] * 6, oracle.greedy(prompts, target=str(TINY_TARGET)))
    assert sum(len(output.ids) - 1 for output in outputs) / sum(output.rounds for output in outputs) > 1.9
    replica = Replica(TINY_TARGET, TINY_EAGLE3)
    for draft in taken:
        assert draft.drafts == replica.draft(draft.tokens, k)[: len(draft.drafts)], draft.rid


@pytest.mark.skipif(not TINY_EAGLE3.is_dir(), reason="the checkout holds no tiny EAGLE-3 head")
def test_prompts_read_for_one_token_are_kept(run_case: RunCase, models: Path, oracle: Oracle) -> None:
    """Whoever warms the prefix cache with requests of one token does not cost those that follow their drafts."""
    prompts = _chat_prompts(6)

    def case(warm: bool) -> list[Output]:
        options = {"target": str(TINY_TARGET), "loop": "overlapped"}
        with Rig(models, str(TINY_EAGLE3), 3, "parallel", **options) as rig:
            for ids in prompts if warm else []:
                rig.run([(ids, 1, {})])
            outputs = rig.run([(ids, 40, {}) for ids in prompts])
            rig.idle_check()
            return outputs

    cold, warm = run_case(case, False, timeout_s=240), run_case(case, True, timeout_s=240)
    assert_prefixes(warm, [40] * 6, oracle.greedy(prompts, target=str(TINY_TARGET)))
    assert all(output.cached == len(ids) - 1 for output, ids in zip(warm, prompts))
    assert sum(output.rounds for output in warm) <= 1.03 * sum(output.rounds for output in cold)
