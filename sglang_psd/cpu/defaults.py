"""Arguments that make stock SGLang start on a CPU, filled in where the user gave none."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from sglang_psd.cpu.bootstrap import gpu_driver_present

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# 64 k tokens are plenty for demo and tests; SGLang would size the pool to most of the host memory.
CPU_KV_TOKENS = 65_536
# Read by SGLang (``sglang/srt/utils/numa_utils.py``).
CORES_OF_RANKS = "SGLANG_CPU_OMP_THREADS_BIND"


def cpu_only() -> bool:
    """Whether this process may use the CPU path: no GPU driver is installed."""
    return not gpu_driver_present()


def install() -> None:
    """Define CPU operators, paged allocation and the verifying attention backend (call on CPU-only machines)."""
    from sglang_psd.cpu import attention, ops, pages

    ops.install()
    pages.install()
    attention.install()
    share_cores()


def share_cores() -> None:
    """Leave half of the cores to the other model, unless ``OMP_NUM_THREADS`` says otherwise.

    Target and drafter compute at the same time: two full thread pools on the same cores spend their time waiting for
    each other (a 60 ms verify of a tiny model took 180 ms).
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))


def fill_server_args(args: ServerArgs) -> None:
    """Give unset arguments the values that work without a GPU.

    Exact arithmetic is the point of the CPU path, so ``dtype="auto"`` becomes float32. CUDA graphs need a GPU:
    eager execution is the only choice.
    """
    if args.device not in (None, "cpu"):
        return
    args.device = "cpu"
    args.disable_cuda_graph = True
    args.disable_overlap_schedule = True
    # A scheduler that polls while idle takes a core from everybody else.
    args.sleep_on_idle = True
    if args.attention_backend is None:
        args.attention_backend = "torch_native"
    if args.dtype == "auto":
        args.dtype = "float32"
    if args.page_size is None:
        args.page_size = 1
    if args.max_total_tokens is None:
        args.max_total_tokens = CPU_KV_TOKENS
    if args.tp_size > 1:
        # Where torch is a CUDA build, SGLang finds its NCCL and takes it for usable.
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", os.devnull)
        os.environ.setdefault(CORES_OF_RANKS, deal_cores(args.tp_size, os.cpu_count() or 1))


def deal_cores(num_ranks: int, num_cores: int) -> str:
    """The cores of each tensor-parallel rank, as ``CORES_OF_RANKS`` has it; SGLang wants a NUMA node for each.

    Ranks share cores when there are too few.
    """
    each = max(1, num_cores // num_ranks)
    first = [rank * each % num_cores for rank in range(num_ranks)]
    return "|".join(f"{core}-{core + each - 1}" if each > 1 else str(core) for core in first)
