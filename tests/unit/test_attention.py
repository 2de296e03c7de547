from types import SimpleNamespace

import pytest

from sglang_psd import attention
from sglang_psd.attention import VERIFIED, default_backend, refuse_unverified_attention, with_kernels_for
from sglang_psd.errors import UnsupportedFeatureError


@pytest.mark.parametrize(
    ("config", "given", "backend"),
    [
        ({"model_type": "qwen3"}, {}, None),
        ({"model_type": "qwen3"}, {"blackwell": True}, "flashinfer"),
        ({"model_type": "qwen3"}, {"blackwell": True, "flashinfer": False}, "triton"),
        ({"model_type": "qwen3"}, {"blackwell": True, "deterministic": True}, None),
        ({"model_type": "qwen3"}, {"dtype": "float32"}, "triton"),
        ({"model_type": "gpt_oss"}, {}, "triton"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, {"deterministic": True}, "triton"),
        ({"model_type": "qwen3", "kv_lora_rank": None}, {}, None),
    ],
)
def test_default(config: dict, given: dict, backend: str | None) -> None:
    usual = {"dtype": "auto", "deterministic": False, "blackwell": False, "flashinfer": True}
    assert default_backend(config, **{**usual, **given}) == backend


def test_a_float32_drafter_does_not_take_fa3() -> None:
    assert with_kernels_for("float32", "fa3") == "triton"
    assert with_kernels_for("bfloat16", "fa3") == "fa3" and with_kernels_for("float32", "flashinfer") == "flashinfer"


def args(device: str = "cuda", **given: str) -> SimpleNamespace:
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return SimpleNamespace(device=device, model_path="a/model", **{**dict.fromkeys(fields), **given})


@pytest.mark.parametrize("backend", VERIFIED)
def test_what_has_been_compared_is_accepted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_target_config", lambda args: {"model_type": "qwen3"})
    refuse_unverified_attention(args())  # type: ignore[arg-type]
    refuse_unverified_attention(args(attention_backend=backend))  # type: ignore[arg-type]
    refuse_unverified_attention(args("cpu", attention_backend="torch_native"))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_others_are_refused_by_name(field: str) -> None:
    with pytest.raises(UnsupportedFeatureError) as refused:
        refuse_unverified_attention(args(**{field: "fa4"}))  # type: ignore[arg-type]
    sentence = str(refused.value)
    assert f"--{field.replace('_', '-')} fa4" in sentence and "flashinfer, triton or fa3" in sentence


def test_latent_attention_is_refused_with_fa3_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_target_config", lambda args: {"model_type": "deepseek_v2", "kv_lora_rank": 512})
    refuse_unverified_attention(args(attention_backend="triton"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeatureError, match="--decode-attention-backend fa3 and the latent attention"):
        refuse_unverified_attention(args(decode_attention_backend="fa3"))  # type: ignore[arg-type]
