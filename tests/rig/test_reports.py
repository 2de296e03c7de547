"""What SGLang's log lines and gauges say of a server with two slots."""

from __future__ import annotations

import pytest

from tests.rig.oracle import make_prompts
from tests.rig.rig import Output, Rig
from tests.rig.together import LOOPS


@pytest.mark.parametrize("loop", LOOPS)
def test_reports_count_all_slots(run_case, models, loop) -> None:
    """Running requests and their context after every forward; retractions in either slot."""
    prompts = make_prompts(9)

    def case() -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[Output], int]:

        options = {"enable_metrics": True, "decode_log_interval": 1, "log_level": "info"}
        with Rig(models, "D_mid", 3, loop=loop, max_total_tokens=260, schedule_conservativeness=0.05, **options) as rig:
            reporter = rig.scheduler.metrics_reporter
            retracted = 0
            count = reporter.metrics_collector.increment_retracted_reqs

            def counted(*, num_retracted_reqs: int, **more: int) -> None:
                nonlocal retracted
                retracted += num_retracted_reqs
                count(num_retracted_reqs=num_retracted_reqs, **more)

            reporter.metrics_collector.increment_retracted_reqs = counted
            rids = [rig.submit(ids, 40) for ids in prompts]
            running, context = [], []
            while rig.unfinished():
                rig.turn()
                live = [req for slot in rig.scheduler.psd_slots for req in slot.live_requests()]
                running.append((reporter.stats.num_running_reqs.total, len(live)))
                context.append((reporter.stats.decode_sum_seq_lens, sum(req.seqlen for req in live)))
            rig.run_until_done()
            rig.idle_check()
            return running, context, [rig.output(rid) for rid in rids], retracted

    running, context, outputs, retracted = run_case(case)
    print(running, context)
    assert retracted == sum(output.retractions for output in outputs) > 0
