"""How SGLang loads a draft model: as a server of its own would, in a world of one.

``DraftModel`` runs what comes of it; all flags that the drafter's part of SGLang is given stand here.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from sglang_psd.drafter.spec import DrafterSpec


def load_worker(spec: DrafterSpec, **overrides: Any) -> Any:
    """Build SGLang's worker for the draft model, as a plain model in a world of its own.

    ``overrides`` replace fields of its ``ServerArgs``.
    """
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    if spec.device == "cpu":
        from sglang_psd.cpu.defaults import CORES_OF_RANKS, share_cores

        os.environ.pop(CORES_OF_RANKS, None)  # the target's ranks
        share_cores()
    args: dict[str, Any] = {
        "model_path": spec.model_path,
        "revision": spec.revision,
        "load_format": spec.load_format,
        "quantization": spec.quantization,
        "trust_remote_code": spec.trust_remote_code,
        "context_length": spec.context_length,
        "device": spec.device,
        "dtype": spec.dtype,
        "attention_backend": spec.attention_backend,
        # Each request stands twice in a chain's first step; SGLang sizes its static buffers by this.
        "max_running_requests": 2 * spec.max_requests,
        "max_total_tokens": spec.kv_tokens,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,  # whole chains are captured instead (``graphs.py``)
        "enable_deterministic_inference": spec.deterministic,
        "page_size": 1,
        "random_seed": spec.random_seed,
        "log_level": spec.log_level,
    }
    if spec.device != "cpu":
        args["mem_fraction_static"] = spec.mem_fraction
    server_args = ServerArgs(**{**args, **overrides})
    publish(server_args, role="scheduler")
    # A world of one meets in a file: a port that is free now may be taken by the target a moment later.
    with tempfile.TemporaryDirectory(prefix="sglang-psd-") as folder:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/world"
        worker = TpModelWorker(server_args=server_args, gpu_id=0, ps=ParallelState.trivial(), nccl_port=0)
        worker.alloc_memory_pool()
        worker.init_attention_backends()
        worker.init_cuda_graphs()
    return worker
