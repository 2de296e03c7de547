"""The fault matrix and a short soak on two GPUs: what ``scripts/fault_matrix.py`` and ``scripts/soak.py`` do.

With ``PSD_RESULTS`` set, the figures are written there as JSON, after every attack. Losses take about eight minutes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.fault_matrix import run_losses
from scripts.faults.starts import STARTS, try_start
from scripts.faults.strikes import NO_STANDBY
from scripts.faults.subject import Subject
from scripts.record_result import provenance, write_result
from scripts.soak import soak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one for each model"),
]


def keep(name: str, result: dict[str, Any]) -> None:
    """Write what was seen where ``PSD_RESULTS`` says."""
    folder = os.environ.get("PSD_RESULTS")
    if folder:
        write_result(Path(folder, name), result)


def command(test: str) -> list[str]:
    """How a result is made again."""
    return ["python", "-m", "pytest", "tests/gpu/test_gpu_faults.py", "-k", test]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Every attack twice, under load."""

    def note(found: dict[str, Any]) -> None:
        keep("faults_gpu.json", {"losses": {**provenance(command("losses")), "result": found}})

    found = run_losses(Subject(32, tmp_path_factory.mktemp("faults") / "server.log"), 2, note)
    note(found)
    return found


def test_losses_fail_no_request(losses: dict) -> None:
    for row in losses["rows"]:
        assert row["failed_or_different"] == 0, row


def test_losses_are_noticed_at_once_and_mended(losses: dict) -> None:
    """Noticed within two polls of the pulse's limit; a stopped drafter is killed after ``hung_after_s``."""
    for row in losses["rows"]:
        assert row["detected_s"]["max"] < 2.0, row
        hung_s = losses["config"]["hung_after_s"] if row["fault"] == "SIGSTOP for good" else 0.0
        assert row["recovered_s"]["max"] < (60.0 if row["fault"] == NO_STANDBY else 12.0 + hung_s), row


def test_losses_left_a_standby_that_holds_no_gpu_memory(losses: dict) -> None:
    """A CUDA context alone would be hundreds of MB."""
    assert abs(losses["standby"]["gpu_mb"]) < 32, losses["standby"]


def test_soak_of_two_minutes(tmp_path: Path) -> None:

    def note(found: dict[str, Any]) -> None:
        keep("soak_gpu_short.json", {**provenance(command("soak")), **found})

    found = soak(Subject(64, tmp_path / "server.log"), 2, 20, note)
    note(found)
    assert found["requests"] > 100 and found["failed_or_different"] == 0, found["errors"]
    assert len(found["strikes"]) >= 3


@pytest.mark.parametrize("name", STARTS)
def test_a_failed_start_leaves_no_memory_behind(name: str) -> None:
    before = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    obstacle, needle = STARTS[name]
    with obstacle() as (flags, port, environment):
        start = try_start(flags, port, environment, needle)
    assert start.exit_code != 0 and start.sentence and start.processes_left == 0, start
    after = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    assert all(late >= early - (64 << 20) for early, late in zip(before, after)), (before, after)
