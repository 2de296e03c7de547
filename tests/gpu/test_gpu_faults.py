"""The fault matrix and a short soak on two GPUs: what ``scripts/fault_matrix.py`` and ``scripts/soak.py`` do.

With ``PSD_RESULTS`` set, the figures are written there as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from scripts.fault_matrix import run_losses
from scripts.faults.starts import STARTS, try_start
from scripts.record_result import machine
from scripts.soak import soak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one for each model"),
]


def keep(name: str, test: str, result: object) -> None:
    """Write what was seen where ``PSD_RESULTS`` says."""
    folder = os.environ.get("PSD_RESULTS")
    if folder:
        command = f"PSD_RESULTS=docs/results python -m pytest tests/gpu/test_gpu_faults.py -k {test}"
        head = {"command": command, "machine": machine(), "result": result}
        Path(folder, name).write_text(json.dumps(head, indent=1) + "\n")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Every attack three times, under load."""
    found = run_losses(3, 32, tmp_path_factory.mktemp("faults") / "server.log")
    keep("faults_gpu.json", "losses", found)
    return found


@pytest.mark.timeout(1200)
def test_losses_fail_no_request(losses: dict) -> None:
    for row in losses["rows"]:
        assert row["failed_or_different"] == 0, row


def test_losses_are_noticed_at_once_and_mended(losses: dict) -> None:
    """Noticed within two polls of the pulse's limit; a stopped drafter is killed after ``hung_after_s``."""
    for row in losses["rows"]:
        assert row["detected_s"]["max"] < 2.0, row
        assert row["recovered_s"]["max"] < 60.0, row


@pytest.mark.timeout(1800)
def test_soak_of_two_minutes(tmp_path: Path) -> None:
    found = soak(2, 20, 64, tmp_path / "server.log")
    keep("soak_gpu_short.json", "soak", found)
    assert found["requests"] > 100 and found["failed_or_different"] == 0, found["errors"]
    assert len(found["strikes"]) >= 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STARTS)
def test_a_failed_start_leaves_no_memory_behind(name: str) -> None:
    before = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    obstacle, needle = STARTS[name]
    with obstacle() as (flags, port, environment):
        start = try_start(flags, port, environment, needle)
    assert start.exit_code != 0 and start.sentence and start.processes_left == 0, start
    after = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    assert all(late >= early - (64 << 20) for early, late in zip(before, after)), (before, after)
