"""Flags and environment of every process that the e2e tests start."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from sglang_psd.cpu.bootstrap import gpu_driver_present
from sglang_psd.resources import TINY_DRAFT

ON_GPU = gpu_driver_present()
NUM_STEPS = 3
BASE_FLAGS = ["--random-seed", "1", "--log-level", "info"]
BASE_KEYWORDS: dict = {"random_seed": 1, "log_level": "error"}
if ON_GPU:
    # Bit-equal texts need logits that do not depend on what else is in the batch; see sglang_psd/demo/run.py.
    BASE_FLAGS += ["--attention-backend", "flashinfer", "--enable-deterministic-inference"]
    BASE_FLAGS += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    # Several servers share the GPU and start side by side: a bounded pool each, and slack in what SGLang measures.
    BASE_FLAGS += ["--mem-fraction-static", "0.6", "--max-total-tokens", "65536"]
    BASE_KEYWORDS.update(
        attention_backend="flashinfer",
        enable_deterministic_inference=True,
        cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled",
        mem_fraction_static=0.6,
        max_total_tokens=65536,
    )
DRAFT_FLAGS = [
    "--speculative-algorithm",
    "PSD",
    "--speculative-draft-model-path",
    str(TINY_DRAFT),
    "--speculative-num-steps",
    str(NUM_STEPS),
]
# Importing everything once more takes a core for long; the server whose drafter is lost keeps a standby.
PSD_FLAGS = [*DRAFT_FLAGS, "--psd-config", '{"standby": false}']
PSD_KEYWORDS: dict = {
    "speculative_algorithm": "PSD",
    "speculative_draft_model_path": str(TINY_DRAFT),
    "speculative_num_steps": NUM_STEPS,
    "psd_config": {"standby": False},
}
if ON_GPU:
    PSD_FLAGS += ["--psd-drafter-mem-fraction", "0.6"]
    PSD_KEYWORDS["psd_drafter_mem_fraction"] = 0.6
# What SGLang's own tests expect of a server (``test_kits.py``).
KITS_FLAGS = ["--enable-return-hidden-states", "--enable-streaming-session"]
# SGLANG_IS_IN_CI would switch on assertions that expect SGLang's own overlap loop.
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT.pop("SGLANG_IS_IN_CI", None)
# SGLang imports every model it knows, in two processes of each server, for seconds; these are the ones served here.
_SERVED = {"llama", "qwen2", "qwen3", "llama_eagle", "llama_eagle3", "qwen2_eagle"}
_MODELS = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "models"  # type: ignore[union-attr,arg-type]
ENVIRONMENT["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted({file.stem for file in _MODELS.glob("*.py")} - _SERVED))
# Scripts that the tests start import this package.
_ROOT = str(Path(__file__).parents[2])
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))

_SCRIPT = Path(sys.executable).parent / "sglang"
# The console script, or what it does where the package lies on PYTHONPATH only.
SERVE = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-c", "from sglang.cli.main import main; main()"]
SERVE.append("serve")
