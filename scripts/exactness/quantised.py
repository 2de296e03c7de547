"""The embedded target with weights of four bits, in the formats of GPTQ and AWQ, rounded to nearest.

Rounding is the plainest of quantisers; these checkpoints show that such targets are served and verified, not how good
they can be.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sglang_psd.resources import TINY_TARGET

GROUP = 128  # input columns that share a scale
BITS = 4
ZERO = 8
PER_WORD = 32 // BITS
# Where AWQ puts eight neighbouring output columns within a word.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    },
    "awq": {"quant_method": "awq", "bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def round_to_nearest(weight: Any) -> tuple[Any, Any]:
    """Four-bit numbers and scales of a weight.

    Parameters
    ----------
    weight : Tensor, ``[out, in]``

    Returns
    -------
    numbers : Tensor, ``[in, out] int32``
        In [0, 15]; ``ZERO`` stands for 0.
    scales : Tensor, ``[in / GROUP, out] float16``
    """
    import torch

    columns = weight.float().t().reshape(-1, GROUP, weight.shape[0])
    scales = (columns.abs().amax(dim=1) / (ZERO - 1)).clamp(min=1e-6).to(torch.float16)
    numbers = (columns / scales.float().unsqueeze(1)).round().clamp(-ZERO, ZERO - 1) + ZERO
    return numbers.reshape(-1, weight.shape[0]).to(torch.int32), scales


def packed(numbers: Any, order: tuple[int, ...] = tuple(range(PER_WORD))) -> Any:
    """Words of eight neighbours of the last dimension; ``order[i]`` stands in the i-th four bits."""
    import torch

    eights = numbers.reshape(*numbers.shape[:-1], -1, PER_WORD)[..., list(order)].to(torch.int64)
    words = (eights << (BITS * torch.arange(PER_WORD))).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq_tensors(weight: Any) -> dict[str, Any]:
    """What a GPTQ checkpoint holds of one weight."""
    import torch

    numbers, scales = round_to_nearest(weight)
    # The format stores zeros less one.
    zeros = torch.full_like(scales, ZERO - 1, dtype=torch.int32)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    words = packed(numbers.t().contiguous()).t().contiguous()
    return {"qweight": words, "qzeros": packed(zeros), "scales": scales, "g_idx": groups}


def awq_tensors(weight: Any) -> dict[str, Any]:
    """What an AWQ checkpoint holds of one weight."""
    import torch

    numbers, scales = round_to_nearest(weight)
    zeros = torch.full_like(scales, ZERO, dtype=torch.int32)
    return {"qweight": packed(numbers, AWQ_ORDER), "qzeros": packed(zeros, AWQ_ORDER), "scales": scales}


def quantised(folder: Path, method: str) -> Path:
    """Write the target in the format ``method``: every matrix of its layers, neither embedding nor norms."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY_TARGET, folder)
    make = {"gptq": gptq_tensors, "awq": awq_tensors}[method]
    tensors: dict[str, Any] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made = make(weight)
            tensors.update({f"{name.removesuffix('weight')}{part}": tensor for part, tensor in made.items()})
        else:
            tensors[name] = weight
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[method]}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
