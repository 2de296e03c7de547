"""``sglang-psd bench`` on the tiny pair: one server, one cell, then what is made of its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.flags import ENVIRONMENT, ON_GPU

pytestmark = pytest.mark.e2e

ACCEPT_LENGTH = 2.0


def bench(*arguments: str) -> subprocess.CompletedProcess:
    """Run ``sglang-psd bench`` in a fresh interpreter."""
    command = [sys.executable, "-m", "sglang_psd.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, traces and results of this file's one run."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def grid(folder: Path) -> list[str]:
    """The run: simulated acceptance, so that the accept length is known."""
    flags = ["--arms", "parallel", "--concurrency", "4", "--output-len", "24", "--batches", "1", "--waves", "2"]
    flags += ["--simulate", str(ACCEPT_LENGTH), "--out", str(folder / "bench_tiny.json"), "--logs", str(folder)]
    return [*flags, "--", "--attention-backend", "flashinfer"] if ON_GPU else flags


@pytest.fixture(scope="module")
def result(folder: Path, grid: list[str]) -> dict:
    """What the run wrote."""
    done = bench(*grid)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "bench_tiny.json").read_text())


def test_cell_holds_every_kind_of_figure(result: dict) -> None:
    (cell,) = result["cells"].values()
    (measured,) = cell["measurements"]
    assert (cell["arm"], cell["k"], cell["n"], measured["completed"], measured["failed"]) == ("parallel", 3, 4, 8, 0)
    assert measured["output_tokens"] == 8 * 24
    for name in ("tok_s", "ttft_p50_ms", "tpot_p99_ms", "itl_p99_ms"):
        assert measured[name] > 0
    for name in ("verify_ms_p50", "draft_ms_p50", "round_ms_p50"):
        assert measured["rounds"][name] > 0
    assert 0 <= measured["rounds"]["overlap"] <= 1 and 0 <= measured["rounds"]["target_bubble"] < 1
    (server,) = result["servers"].values()
    assert server["kv_tokens"] > 0 and "--psd-mode parallel" in server["command"]
    assert result["runs"][-1]["environment"]["packages"]["sglang"]


def test_simulated_acceptance_is_what_was_asked_for(result: dict, folder: Path) -> None:
    (cell,) = result["cells"].values()
    (measured,) = cell["measurements"]
    # The last round of an answer is cut, and late drafts cost some: 2 tokens a round, within a tenth.
    assert measured["accept_length"] == pytest.approx(ACCEPT_LENGTH, rel=0.1)
    assert measured["bench_serving_accept_length"] == pytest.approx(ACCEPT_LENGTH, rel=0.1)
    assert "replaces the acceptance rule" in (folder / "fair-parallel-k3-0.log").read_text()


def test_finished_cells_are_not_measured_again(result: dict, folder: Path, grid: list[str]) -> None:
    before = (folder / "fair-parallel-k3-0.log").stat().st_mtime_ns
    again = bench(*grid)
    assert again.returncode == 0, again.stderr[-2000:]
    assert (folder / "fair-parallel-k3-0.log").stat().st_mtime_ns == before, "no server was started"
    assert json.loads((folder / "bench_tiny.json").read_text())["cells"] == result["cells"]


def test_another_run_does_not_mix_with_it(result: dict, folder: Path) -> None:
    refused = bench("--arms", "parallel", "--temperature", "1", "--out", str(folder / "bench_tiny.json"))
    assert refused.returncode == 2 and "--fresh" in refused.stderr and "Traceback" not in refused.stderr


def test_report_from_it(result: dict, folder: Path) -> None:
    done = bench("--report", str(folder / "performance.md"), "--results", str(folder / "bench_tiny.json"))
    assert done.returncode == 0, done.stderr
    page = (folder / "performance.md").read_text()
    assert "Rounds against the limit" in page and "no claim about end-to-end" in page and str(folder) not in page
