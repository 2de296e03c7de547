"""What the drafter is told at start: its share of memory, its pool, its type."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_psd import early
from sglang_psd.config import PSDConfig
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.drafter.standby import StandbyProcess
from sglang_psd.resources import TINY_DRAFT, TINY_TARGET
from sglang_psd.scheduler import launch
from sglang_psd.scheduler.devices import DrafterDevice
from sglang_psd.scheduler.launch import DrafterLauncher, drafter_spec

ARGS: dict[str, Any] = {
    "model_path": str(TINY_TARGET),
    "revision": None,
    "dtype": "auto",
    "psd_draft_method": None,
    "speculative_draft_model_path": str(TINY_DRAFT),
    "speculative_draft_model_revision": None,
    "speculative_draft_load_format": None,
    "speculative_draft_model_quantization": None,
    "load_format": "auto",
    "trust_remote_code": False,
    "attention_backend": "flashinfer",
    "max_running_requests": 10,
    "speculative_num_steps": 3,
    "random_seed": 1,
    "max_total_tokens": None,
    "disable_cuda_graph": False,
    "cuda_graph_config": None,
    "enable_deterministic_inference": False,
    "speculative_token_map": None,
    "log_level": "info",
}
OWN, SHARED, CPU = DrafterDevice(1, shared=False), DrafterDevice(0, shared=True), DrafterDevice(None, shared=False)


def spec(device: DrafterDevice, config: dict | None = None, **args: Any):
    """The specification for a device."""
    return drafter_spec(SimpleNamespace(**{**ARGS, **args}), PSDConfig(**(config or {})), device, 320)


@pytest.mark.parametrize(
    ("device", "config", "fraction"),
    [
        (OWN, {}, 0.8),
        (SHARED, {}, 0.1),
        (OWN, {"drafter_mem_fraction": 0.3}, 0.3),
        (SHARED, {"drafter_mem_fraction": 0.3}, 0.3),
    ],
)
def test_share_of_memory(device: DrafterDevice, config: dict, fraction: float) -> None:
    """Most of a GPU of its own, little of the target's, unless told otherwise."""
    assert spec(device, config).mem_fraction == fraction


def test_the_pool_holds_what_the_target_may_hold_and_the_drafts() -> None:
    assert spec(OWN, max_total_tokens=1000).kv_tokens == 1000 + 10 * 4
    assert spec(OWN).kv_tokens is None


def test_the_draft_keeps_its_own_type() -> None:
    """The target's ``--dtype`` is no argument of this function at all; on a CPU arithmetic is exact."""
    assert (spec(OWN).dtype, spec(CPU).dtype) == ("auto", "float32")
    assert spec(CPU, {"drafter_dtype": "bfloat16"}).dtype == "bfloat16"
    assert spec(OWN, speculative_draft_load_format="dummy").load_format == "dummy"


def test_drafter_standby_and_successor_start_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One command, one environment with the drafter's device alone in it, whatever the server sets later on."""
    started: list[tuple[dict, dict]] = []

    def start(command: list[str], env: dict[str, str], stdin: Any) -> subprocess.Popen:
        started.append((json.loads(command[-1]), env))
        return popen([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("sglang_psd.compat.vocab_limit", lambda args: 320)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    args = SimpleNamespace(**ARGS)
    launcher = DrafterLauncher(args, PSDConfig(), OWN)  # type: ignore[arg-type]
    first = launcher.launch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    monkeypatch.setenv("SET_LATER", "1")
    args.max_running_requests = 3
    standby, successor = launcher.launch_standby(), launcher.launch()
    for process in (first, successor):
        process.stop()
    standby.end()
    (first_spec, env), (standby_spec, standby_env), (next_spec, next_env) = started
    assert env == standby_env == next_env and env["CUDA_VISIBLE_DEVICES"] == "GPU-b" and "SET_LATER" not in env
    endpoints = ("endpoint", "pulse_endpoint", "schema_version")
    assert not standby_spec["endpoint"] and first_spec["endpoint"] != next_spec["endpoint"]
    for spec in (first_spec, standby_spec, next_spec):
        for name in endpoints:
            del spec[name]
    assert first_spec == standby_spec == next_spec


@pytest.mark.parametrize("change", [{}, {"max_running_requests": 3}, {"visible": "GPU-c"}])
def test_the_first_drafter_takes_the_process_that_was_started_for_it(monkeypatch, caplog, change: dict) -> None:
    """What began early becomes the drafter if the scheduler would start just that, and ends if not."""
    monkeypatch.setattr("sglang_psd.compat.vocab_limit", lambda args: 320)
    monkeypatch.setattr(launch, "choose_device", lambda *_: OWN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    offers: list[tuple[DrafterSpec, str | None]] = []
    monkeypatch.setattr(early, "offer", lambda *offered: offers.append(offered))
    args = SimpleNamespace(**ARGS, psd=lambda: PSDConfig(), base_gpu_id=0, gpu_id_step=1, tp_size=1, nnodes=1)
    args.device = "cuda"
    launch.offer_early_start(args)  # type: ignore[arg-type]
    ((offered, visible_device),) = offers
    spec = msgspec.structs.replace(offered, parent_pid=os.getpid(), import_niceness=0)
    begun = Waiting(spec, os.environ)
    process = begun._process
    visible = change.get("visible", visible_device)
    monkeypatch.setattr(early, "_started", early.EarlyStart(begun, spec, visible))
    monkeypatch.setattr("sglang_psd.drafter.process.start_interpreter", lambda *_: no_drafter())
    args.max_running_requests = change.get("max_running_requests", args.max_running_requests)
    with caplog.at_level("INFO"):
        drafter = DrafterLauncher(args, PSDConfig(), OWN).launch_first()  # type: ignore[arg-type]
    said, _ = process.communicate(timeout=30)
    taken = drafter.pid == process.pid
    drafter.stop()
    assert taken == (not change) and early.take() is None
    if taken:
        assert json.loads(said)["endpoint"].startswith("ipc://")
        assert "began its imports with this process" in caplog.text
    else:
        assert process.returncode != 0
        named = "CUDA_VISIBLE_DEVICES" if "visible" in change else "max_requests"
        assert f"what began with this process is another drafter ({named})" in caplog.text


def test_a_drafter_that_begins_late_says_why(monkeypatch, caplog) -> None:
    monkeypatch.setattr("sglang_psd.compat.vocab_limit", lambda args: 320)
    monkeypatch.setattr("sglang_psd.drafter.process.start_interpreter", lambda *_: no_drafter())
    monkeypatch.setattr(early, "_absence", "taking the offer failed with OSError: no more processes")
    DrafterLauncher(SimpleNamespace(**ARGS), PSDConfig(), CPU).launch_first().stop()  # type: ignore[arg-type]
    (said,) = [record for record in caplog.records if record.name == launch.__name__]
    assert said.levelname == "WARNING" and said.getMessage() == (
        "PSD: the drafter begins its imports only now; this process could not begin them earlier: "
        "taking the offer failed with OSError: no more processes."
    )


class Waiting(StandbyProcess):
    """Prints what it is told."""

    def _start(self, spec: DrafterSpec, environment: Any, control: socket.socket) -> subprocess.Popen:
        command = [sys.executable, "-c", "print(input())"]
        return subprocess.Popen(command, stdin=control.fileno(), stdout=subprocess.PIPE, text=True)


def no_drafter() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "pass"])


def test_ranks_on_other_nodes_take_no_gpu_here() -> None:
    args = SimpleNamespace(tp_size=8, nnodes=2, gpu_id_step=1)
    assert launch.target_gpus(args, 0) == [0, 1, 2, 3]  # type: ignore[arg-type]
