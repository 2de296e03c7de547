"""Drafting step by step through the graphs' own code: columns, stages, plans, what one step leaves for the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rig.graphs import graphs_on_cpu
from tests.rig.oracle import Oracle, assert_prefixes, make_prompts
from tests.rig.rig import Output, Rig
from tests.rig.test_eagle import LENGTHS, PROMPTS, TARGET_OF, assert_replica, record_drafts
from tests.rig.test_identity import run_batches, staggered_lengths

BATCHES = (1, 3, 9)


@pytest.mark.parametrize(
    ("draft", "k", "mode"), [("D_same", 3, "parallel"), ("D_same", 1, "sequential"), ("D_mid", 4, "parallel")]
)
def test_batches(run_case, models: Path, oracle: Oracle, draft: str, k: int, mode: str) -> None:
    """Padding rows, one request alone, all drafts accepted or some."""
    prompts = make_prompts(max(BATCHES))
    batches = run_case(run_batches, models, draft, k, mode, "overlapped", BATCHES, sabotage=graphs_on_cpu)
    for size, outputs in zip(BATCHES, batches):
        assert_prefixes(outputs, staggered_lengths(size), oracle.greedy(prompts[:size]))


def _mixed(models: Path, sabotage: Callable[[], None] | None) -> tuple[list[Output], int]:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "sampling_seed": 3}, {"temperature": 0.9, "top_k": 6}]
    asks = [(ids, 20, kinds[i % 3]) for i, ids in enumerate(make_prompts(9))]
    with Rig(models, "D_same", 3, sabotage=sabotage) as rig:
        outputs = rig.run(asks)
        rig.idle_check()
        return outputs, sum(output.accepted for output in outputs[2::3])


def test_kinds_of_rows_share_a_batch(run_case, models: Path) -> None:
    """Greedy and seeded requests draft as they do without graphs; sampled drafts come with laws that get accepted."""
    (eager, _), (through_graphs, accepted) = run_case(_mixed, models, None), run_case(_mixed, models, graphs_on_cpu)
    for certain in (0, 1):
        expected = [(output.ids, output.accepted) for output in eager[certain::3]]
        assert [(output.ids, output.accepted) for output in through_graphs[certain::3]] == expected
    assert accepted > 30, "a draft equal to the target is nearly always accepted"


@pytest.mark.parametrize(("head", "k", "mode"), [("L_e3", 4, "parallel"), ("B_e1", 3, "sequential")])
def test_heads_draft_as_their_replicas(run_case, models: Path, oracle: Oracle, head: str, k: int, mode: str) -> None:
    def case() -> tuple[list, list[Output]]:
        with Rig(
            models, head, k, mode, target=TARGET_OF[head], disable_radix_cache=True, sabotage=graphs_on_cpu
        ) as rig:
            taken = record_drafts(rig)
            outputs = rig.run([(ids, n, {}) for ids, n in zip(PROMPTS, LENGTHS)])
            rig.idle_check()
            return taken, outputs

    taken, outputs = run_case(case)
    assert_prefixes(outputs, LENGTHS, oracle.greedy(PROMPTS[: len(LENGTHS)], target=TARGET_OF[head]))
    assert len(taken) > 20
    assert_replica(models, head, taken, k)
