"""What SGLang's log lines and gauges say of a server with two slots."""

from __future__ import annotations

import pytest

from tests.rig.oracle import make_prompts
from tests.rig.rig import Output, Rig
from tests.rig.together import LOOPS

METRICS = {"enable_metrics": True, "decode_log_interval": 1}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_reports_count_all_slots(run_case, models, mode, loop) -> None:
    """Running requests and their context, after prompts were read and after every round."""

    def case() -> tuple[list[int], list[int], list[tuple[int, int]]]:
        with Rig(models, "D_mid", 3, mode, loop, **METRICS) as rig:
            reporter, slots = rig.scheduler.metrics_reporter, rig.scheduler.psd_slots
            for ids in make_prompts(8):
                rig.submit(ids, 60)
            rig.turns(8)
            sizes, running, context = [len(slot.live_requests()) for slot in slots], [], []
            for _ in range(4):
                rig.turn()
                live = [req for slot in slots for req in slot.live_requests()]
                running.append(reporter.stats.num_running_reqs.total)
                context.append((reporter.stats.decode_sum_seq_lens, sum(req.seqlen for req in live)))
            rig.submit(make_prompts(9)[8], 60)
            rig.turns(2)
            running.append(reporter.stats.num_running_reqs.total)
            rig.run_until_done()
            rig.idle_check()
            return sizes, running, context

    sizes, running, context = run_case(case)
    assert sizes == ([4, 4] if mode == "parallel" else [8])
    assert running[:4] == [8] * 4 and running[4] in (8, 9), running
    assert all(reported == real for reported, real in context), context


def test_retractions_that_make_room_for_the_other_slot_are_counted(run_case, models) -> None:
    def case() -> tuple[list[int], list[Output]]:
        with Rig(models, "D_mid", 3, **METRICS) as rig:
            scheduler = rig.scheduler
            collector = scheduler.metrics_reporter.metrics_collector
            counted: list[int] = []
            count = collector.increment_retracted_reqs

            def listen(*, num_retracted_reqs: int, **more: int) -> None:
                counted.append(num_retracted_reqs)
                count(num_retracted_reqs=num_retracted_reqs, **more)

            collector.increment_retracted_reqs = listen
            rids = [rig.submit(ids, 40) for ids in make_prompts(6)]
            rig.turns(6)
            for slot in scheduler.psd_slots:
                scheduler._psd_retract(slot.running, slot.running.reqs[0])
            rig.run_until_done()
            rig.idle_check()
            return counted, [rig.output(rid) for rid in rids]

    counted, outputs = run_case(case)
    assert sum(counted) == sum(output.retractions for output in outputs) == 2
