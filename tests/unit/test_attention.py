from types import SimpleNamespace

import pytest

from sglang_psd.attention import default_backend, refuse_unverified_attention
from sglang_psd.errors import UnsupportedFeatureError


@pytest.mark.parametrize(
    ("config", "flashinfer", "backend"),
    [
        ({"model_type": "qwen3"}, True, "flashinfer"),
        ({"model_type": "qwen3"}, False, "triton"),
        ({"model_type": "gpt_oss"}, True, "triton"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, True, "triton"),
        ({"model_type": "qwen3", "kv_lora_rank": None}, True, "flashinfer"),
    ],
)
def test_default(config: dict, flashinfer: bool, backend: str) -> None:
    assert default_backend(config, flashinfer=flashinfer) == backend


def args(device: str = "cuda", **given: str) -> SimpleNamespace:
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return SimpleNamespace(device=device, **{**dict.fromkeys(fields), **given})


def test_what_has_been_compared_is_accepted() -> None:
    for given in ({}, {"attention_backend": "flashinfer"}, {"attention_backend": "triton"}):
        refuse_unverified_attention(args(**given))  # type: ignore[arg-type]
    refuse_unverified_attention(args("cpu", attention_backend="torch_native"))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_others_are_refused_by_name(field: str) -> None:
    with pytest.raises(UnsupportedFeatureError) as refused:
        refuse_unverified_attention(args(**{field: "fa3"}))  # type: ignore[arg-type]
    sentence = str(refused.value)
    assert f"--{field.replace('_', '-')} fa3" in sentence and "flashinfer or triton" in sentence
