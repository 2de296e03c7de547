"""The target's matrices, from whatever a checkpoint looks like; nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_psd.drafter.head_weights import read_target_matrices
from sglang_psd.errors import DrafterStartError

EMBEDDING, OUTPUT = torch.randn(10, 4), torch.randn(10, 4)


def read(folder: Path, *, want_output: bool = True):
    return read_target_matrices(str(folder), None, want_output=want_output)


def test_one_file(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OUTPUT}, tmp_path / "model.safetensors")
    embedding, output = read(tmp_path)
    assert torch.equal(embedding, EMBEDDING) and output is not None and torch.equal(output, OUTPUT)
    assert read(tmp_path, want_output=False)[1] is None


def test_tied(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING}, tmp_path / "model.safetensors")
    embedding, output = read(tmp_path)
    assert output is embedding


def test_only_the_files_that_hold_them_are_opened(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": OUTPUT}, tmp_path / "c.safetensors")
    index = {
        "model.embed_tokens.weight": "a.safetensors",
        "model.layers.0.w": "missing",
        "lm_head.weight": "c.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    embedding, output = read(tmp_path)
    assert torch.equal(embedding, EMBEDDING) and output is not None and torch.equal(output, OUTPUT)


def test_the_language_model_of_a_multimodal_target(tmp_path: Path) -> None:
    tensors = {
        "language_model.model.embed_tokens.weight": EMBEDDING,
        "vision_tower.some.deeper.embed_tokens.weight": torch.randn(3, 3),
        "language_model.lm_head.weight": OUTPUT,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    embedding, output = read(tmp_path)
    assert torch.equal(embedding, EMBEDDING) and output is not None and torch.equal(output, OUTPUT)


def test_quantized(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(DrafterStartError, match=r"embed_tokens\.weight as int32; an EAGLE head needs it unq"):
        read(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DrafterStartError, match="holds no safetensors files"):
        read(tmp_path)
    save_file({"lm_head.weight": OUTPUT}, tmp_path / "model.safetensors")
    with pytest.raises(DrafterStartError, match=r"holds no embed_tokens\.weight"):
        read(tmp_path)
