"""What kind of drafter a checkpoint is, and whether it fits."""

from __future__ import annotations

import pytest

from sglang_psd.draft_method import Head, infer_method, resolve_head
from sglang_psd.errors import DraftMismatchError, PSDConfigError

TARGET = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 8}


def head(architecture: str, **more: object) -> dict:
    return {"architectures": [architecture], "hidden_size": 64, "vocab_size": 320, **more}


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("LlamaForCausalLM", "draft_model"),
        ("Qwen3ForCausalLM", "draft_model"),
        ("LlamaForCausalLMEagle", "eagle"),
        ("Qwen2ForCausalLMEagle", "eagle"),
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("Eagle3DeepseekV2ForCausalLM", "eagle3"),
    ],
)
def test_inference(architecture: str, method: str) -> None:
    assert infer_method([architecture]) == method
    found = resolve_head(method, head(architecture), TARGET, "x")
    assert (found.method if found else "draft_model") == method


def test_no_architecture() -> None:
    assert infer_method([]) == "draft_model"


def test_what_a_head_reads() -> None:
    assert resolve_head(None, head("LlamaForCausalLMEagle"), TARGET, "x") == Head("eagle", None, 64)
    assert resolve_head(None, head("LlamaForCausalLMEagle3"), TARGET, "x") == Head("eagle3", None, 192)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
    assert resolve_head(None, head("LlamaForCausalLMEagle3", **layers), TARGET, "x") == Head("eagle3", (1, 3), 128)
    last = {"eagle_config": {"use_aux_hidden_state": False}}
    found = resolve_head(None, head("LlamaForCausalLMEagle3", **last), TARGET, "x")
    assert found == Head("eagle3", (), 64) and not found.reads_layers


def test_another_kind_than_the_flag_says() -> None:
    with pytest.raises(PSDConfigError, match=r"--psd-draft-method eagle3 does not fit .* used as draft_model"):
        resolve_head("eagle3", head("LlamaForCausalLM"), TARGET, "x")
    with pytest.raises(PSDConfigError, match="used as eagle3; leave the flag out"):
        resolve_head("draft_model", head("LlamaForCausalLMEagle3"), TARGET, "x")


def test_another_target() -> None:
    with pytest.raises(DraftMismatchError, match="reads hidden states of 32 numbers, the target's have 64"):
        resolve_head(None, head("LlamaForCausalLMEagle3", target_hidden_size=32), TARGET, "x")
    with pytest.raises(DraftMismatchError, match="made for 100 tokens, the target has 320"):
        resolve_head(None, head("LlamaForCausalLMEagle", vocab_size=100), TARGET, "x")


@pytest.mark.parametrize("layers", [[1, 3, 7], [1, 3, 20], [2, 2, 4], [-2, 1, 3]])
def test_layers_that_the_target_does_not_hand_out(layers: list[int]) -> None:
    options = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    with pytest.raises(DraftMismatchError, match="of a target of 8 layers only 0 to 6 can be read"):
        resolve_head(None, head("LlamaForCausalLMEagle3", **options), TARGET, "x")
    with pytest.raises(DraftMismatchError, match="of a target of 4 layers"):
        resolve_head(None, head("LlamaForCausalLMEagle3"), {**TARGET, "num_hidden_layers": 4}, "x")
