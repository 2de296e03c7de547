"""Relatives of the embedded models that some cases need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from scripts.exactness.quantised import quantised
from sglang_psd.resources import TINY_DRAFT, TINY_TARGET

PADDING = 64
SHIFT = 37


def make_checkpoints(folder: Path) -> dict[str, str]:
    """Paths by name; makes those that are not embedded in ``folder``."""
    return {
        "target": str(TINY_TARGET),
        "tiny-target": str(TINY_TARGET),
        "tiny-draft": str(TINY_DRAFT),
        "tiny-eagle3": str(TINY_TARGET.with_name("tiny-eagle3")),
        "noisy": str(_noisy(folder / "noisy")),
        "padded": str(_padded(folder / "padded")),
        "permuted": str(_permuted(folder / "permuted")),
        "gptq": str(quantised(folder / "gptq", "gptq")),
        "awq": str(quantised(folder / "awq", "awq")),
    }


def _copy(folder: Path) -> Path:
    shutil.copytree(TINY_TARGET, folder)
    return folder


def _noisy(folder: Path) -> Path:
    """The target, a little different everywhere: another text."""
    import torch
    from safetensors.torch import load_file, save_file

    path = _copy(folder) / "model.safetensors"
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(path)
    for name, weight in tensors.items():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator) * 0.1 * weight.float().std()
            tensors[name] = (weight.float() + noise).to(weight.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _padded(folder: Path) -> Path:
    """The target with rows in its vocabulary that would win if nobody cut them off."""
    import torch
    from safetensors.torch import load_file, save_file

    path = _copy(folder) / "model.safetensors"
    tensors = load_file(path)
    config = json.loads((folder / "config.json").read_text())
    for name, weight in tensors.items():
        if weight.shape[0] == config["vocab_size"]:
            tensors[name] = torch.cat([weight, 4 * weight[:PADDING]])
    config["vocab_size"] += PADDING
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _permuted(folder: Path) -> Path:
    """The target with a tokenizer that reads its ids differently."""
    path = _copy(folder) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    plain = sorted(index for index in vocab.values() if index not in special)
    moved = dict(zip(plain, [*plain[SHIFT:], *plain[:SHIFT]]))
    tokenizer["model"]["vocab"] = {token: moved.get(index, index) for token, index in vocab.items()}
    path.write_text(json.dumps(tokenizer))
    return folder
