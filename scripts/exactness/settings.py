"""Engines that are compared: one without speculation and two with, in float32 and in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sglang_psd.resources import TINY_DRAFT, TINY_TARGET

PLAIN = "plain"
ARMS = (PLAIN, "parallel", "sequential")
MAX_RUNNING = {"cuda": 128, "cpu": 16}
# Tokens read at once by all requests together: one prompt is cut each time.
CHUNK = {"cuda": 256, "cpu": 64}


@dataclass(frozen=True)
class Setting:
    """How the numbers are computed, and what that excuses.

    Attributes
    ----------
    name : str
    engine : dict
        Keywords of ``sgl.Engine``.
    environment : dict
        Further environment variables.
    bound : float
        Difference of two logits, in nats, below which two tokens count as equally good.
    deterministic : bool
        Requests without a seed get SGLang's default one, and the plain engine's sampler fails an assertion where it has
        to draw from a law that top-k, top-p or min-p cut. So it is asked greedy requests only; laws are judged in
        another setting.
    law_every : int
        One request in so many belongs to a law; 0: none does, 1: all do.
    """

    name: str
    engine: dict[str, Any]
    bound: float
    environment: dict[str, str] = field(default_factory=dict)
    deterministic: bool = False
    law_every: int = 0


# FlashInfer has no float32 kernels and SGLang's RMSNorm kernel neither; Triton has, and SGLang's deterministic mode
# normalises in Triton and PyTorch. Triton multiplies float32 as TF32 unless told otherwise: three such products are as
# exact as float32 and fit into the shared memory of a Hopper GPU. What is left is the order of additions, which differs
# between the kernels of a decode and of a verify.
FLOAT32 = Setting(
    "float32",
    {
        "dtype": "float32",
        "attention_backend": "triton",
        "enable_deterministic_inference": True,
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
    },
    bound=1e-3,
    environment={"TRITON_F32_DEFAULT": "tf32x3"},
    deterministic=True,
)
# The tiny model's logits reach 16 to 32, where bfloat16 numbers are 0.125 apart: four of these steps. Measured against
# float32, the logits of the 24 best tokens are up to 0.36 apart from where they should be to each other, over 40,000
# positions of this traffic; two computations in bfloat16 may each be that wrong.
# Graphs of prefills are compiled for a minute and change no step of a round.
BFLOAT16 = Setting(
    "bfloat16",
    {"dtype": "bfloat16", "attention_backend": "flashinfer", "cuda_graph_backend_prefill": "disabled"},
    bound=0.5,
)
FA3 = replace(BFLOAT16, name="fa3", engine={**BFLOAT16.engine, "attention_backend": "fa3"})
# Laws need an engine without default seeds, and numbers whose rounding differs less between kernels and batches than
# the test can see: in bfloat16 a law is off by some percent, and the edge of a cut (top-k, top-p, min-p) moves.
FLOAT16 = Setting(
    "float16",
    {"dtype": "float16", "attention_backend": "triton", "cuda_graph_backend_prefill": "disabled"},
    bound=0.1,
    law_every=1,
)
CPU = Setting("float32", {"dtype": "float32"}, bound=1e-4, law_every=10)
SETTINGS = {
    "cuda": {setting.name: setting for setting in (FLOAT32, BFLOAT16, FA3, FLOAT16)},
    "cpu": {CPU.name: CPU},
}


def number_of_gpus(device: str) -> int:
    """How many GPUs the engines share."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def engine_keywords(setting: Setting, arm: str, device: str, num_gpus: int) -> dict[str, Any]:
    """Keywords of one engine.

    The parallel one has a KV pool too small for all requests and, where SGLang allows it, reads prompts in chunks; the
    sequential one has pages of 16 tokens and five drafts a round.
    """
    keywords: dict[str, Any] = {
        "model_path": str(TINY_TARGET),
        "random_seed": 1,
        "log_level": "warning",
        "max_running_requests": MAX_RUNNING[device],
        "reasoning_parser": "qwen3",
        "grammar_backend": "xgrammar",
        **setting.engine,
    }
    small, large = (8192, 65536) if device == "cuda" else (1024, 8192)
    keywords["max_total_tokens"] = small if arm == "parallel" else large
    if device == "cuda":
        # All engines share the GPUs and start side by side: slack in what SGLang measures. FlashInfer's sampling
        # kernels would be compiled for minutes, in the plain engine only.
        keywords.update(mem_fraction_static=0.8, sampling_backend="pytorch")
    if arm == PLAIN:
        # SGLang's overlap scheduler plans a step before the one ahead of it is processed; its penalties count
        # ``req.output_ids[-1]`` of that moment (``ScheduleBatch.cumulate_penalty_output_tokens``): a token late, at
        # first the prompt's last one, and never the token that a prefill in between makes it miss. The reference has
        # to count what was generated. CPUs run without that scheduler anyway.
        keywords.update(disable_overlap_schedule=True)
        if num_gpus > 1:
            keywords.update(base_gpu_id=num_gpus - 1)  # beside the drafters, away from the four other targets
        return keywords
    keywords.update(
        speculative_algorithm="PSD",
        speculative_draft_model_path=str(TINY_DRAFT),
        speculative_num_steps=3 if arm == "parallel" else 5,
        psd_mode=arm,
        psd_config={"standby": False},  # nobody attacks these drafters; another import would take a core of each
    )
    if arm == "parallel":
        keywords.update(schedule_conservativeness=0.05)
        if not setting.deterministic:  # SGLang cuts prompts at multiples of 4,096 there
            keywords.update(chunked_prefill_size=CHUNK[device])
    else:
        keywords.update(page_size=16)
    if device == "cuda":
        keywords["psd_drafter_mem_fraction"] = 0.8 if num_gpus > 1 else 0.1
        if num_gpus == 1:
            keywords["psd_drafter_device"] = "cuda:0"
    return keywords
