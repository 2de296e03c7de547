"""Which attention backend the target verifies with on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_psd.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from sglang_psd.server_args import PSDServerArgs

# Those whose verifies have been compared with the plain server's text on GPUs (tests/gpu/test_gpu_identity.py).
VERIFIED = ("flashinfer", "triton", "fa3")
_FLOAT32 = ("float32", "float")
_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's configuration names latent attention (MLA), for which SGLang has other kernels."""
    return bool(config.get("kv_lora_rank"))


def default_backend(
    config: Mapping[str, Any], *, dtype: str, deterministic: bool, blackwell: bool, flashinfer: bool
) -> str | None:
    """The backend for a target whose user names none; None leaves the choice to SGLang.

    SGLang chooses by model and GPU (``ServerArgs._get_default_attn_backend``, ``arg_groups/overrides.py``). This is for
    cases in which its choice has not been compared or does not work.

    Parameters
    ----------
    config : mapping
        The target checkpoint's configuration.
    dtype : str
        As ``--dtype``.
    deterministic : bool
        Whether SGLang chooses among its deterministic backends.
    blackwell : bool
        Whether the GPU is one for which SGLang has backends of its own.
    flashinfer : bool
        Whether FlashInfer is installed.
    """
    # FlashInfer knows no attention sinks and no float32; neither does fa3 know float32.
    if has_latent_attention(config) or config.get("model_type") == "gpt_oss" or dtype in _FLOAT32:
        return "triton"
    if not blackwell or deterministic:
        return None
    return "flashinfer" if flashinfer else "triton"


def with_kernels_for(dtype: str, backend: str) -> str:
    """``backend``, or triton where it has no kernels for ``dtype``: fa3 computes in 16 bits or less."""
    return "triton" if backend == "fa3" and dtype in _FLOAT32 else backend


def fill_attention_backend(args: PSDServerArgs) -> None:
    """Choose a backend whose verifies have been compared where SGLang would choose another."""
    if args.device not in (None, "cuda") or any(getattr(args, field) is not None for field in _FIELDS):
        return
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return
    from sglang.srt.utils import is_flashinfer_available, is_sm100_supported, is_sm120_supported

    config = _target_config(args)
    if config is not None:
        args.attention_backend = default_backend(
            config,
            dtype=args.dtype,
            deterministic=args.enable_deterministic_inference or args.rl_on_policy_target is not None,
            blackwell=is_sm100_supported() or is_sm120_supported(),
            flashinfer=is_flashinfer_available(),
        )


def _target_config(args: PSDServerArgs) -> Mapping[str, Any] | None:
    """The target's configuration; None when it cannot be read: SGLang says what is wrong with the target."""
    from sglang_psd.draft_method import read_config

    try:
        return read_config(str(args.model_path), args.trust_remote_code, args.revision)
    except (OSError, ValueError):
        return None


def refuse_unverified_attention(args: PSDServerArgs) -> None:
    """Refuse a backend whose verifies nobody has compared with the plain server's text.

    Raises
    ------
    UnsupportedFeatureError
        Names the flag and the backends that work.
    """
    if args.device == "cpu":
        return
    for field in _FIELDS:
        backend = getattr(args, field)
        if backend not in (None, *VERIFIED):
            raise UnsupportedFeatureError(
                f"PSD does not work with --{field.replace('_', '-')} {backend} yet; leave that flag out, or name "
                f"{', '.join(VERIFIED[:-1])} or {VERIFIED[-1]}."
            )
        if backend == "fa3" and has_latent_attention(_target_config(args) or {}):
            raise UnsupportedFeatureError(
                f"PSD does not work with --{field.replace('_', '-')} fa3 and the latent attention of {args.model_path} "
                "yet; leave that flag out, or name triton."
            )
