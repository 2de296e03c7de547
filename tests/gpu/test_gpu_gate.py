"""Work queued behind a gate waits for it, and sees what the host wrote meanwhile."""

from __future__ import annotations

import time

import pytest
import torch

from sglang_psd.target import gate as module
from sglang_psd.target.gate import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def gate() -> Gate:
    gate = Gate()
    gate._number = (1 << 32) - 3  # the numbers begin anew within the test
    gate._open(gate._number)
    return gate


def test_what_is_queued_sees_what_is_written_later(gate: Gate) -> None:
    table = torch.zeros(64, 5, dtype=torch.int64, pin_memory=True)
    device = torch.empty_like(table, device="cuda")
    graph = torch.cuda.CUDAGraph()
    total = torch.zeros(1, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        total.copy_(device.sum().view(1))
    for round_id in range(1, 7):
        end = torch.cuda.Event()
        with gate.closed():
            device.copy_(table, non_blocking=True)
            graph.replay()
            end.record()
            time.sleep(0.02)
            assert not end.query(), "it went before the gate was opened"
            table.fill_(round_id)
        end.synchronize()
        assert int(total) == round_id * table.numel() and not gate.forced


def test_an_error_inside_opens_it(gate: Gate) -> None:
    with pytest.raises(ValueError), gate.closed():
        raise ValueError
    torch.cuda.synchronize()


def test_a_stuck_host_is_helped(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.5)
    with gate.closed():
        torch.cuda.synchronize()  # what nobody may do in here
        assert gate.forced
    with gate.closed():
        assert not gate.forced
    torch.cuda.synchronize()
