"""Which attention backend the target verifies with on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_psd.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from sglang_psd.server_args import PSDServerArgs

# Those whose verifies have been compared with the plain server's text on GPUs (tests/gpu/test_gpu_identity.py).
VERIFIED = ("flashinfer", "triton")
_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def default_backend(config: Mapping[str, Any], *, flashinfer: bool) -> str:
    """The backend for a target whose user names none.

    Parameters
    ----------
    config : mapping
        The target checkpoint's configuration.
    flashinfer : bool
        Whether FlashInfer is installed.
    """
    # As SGLang's own choice (``ServerArgs._get_default_attn_backend``): FlashInfer knows no attention sinks. Latent
    # attention has a backend of its own there, whose verifies nobody has compared.
    unsuited = bool(config.get("kv_lora_rank")) or config.get("model_type") == "gpt_oss"
    return "flashinfer" if flashinfer and not unsuited else "triton"


def fill_attention_backend(args: PSDServerArgs) -> None:
    """Choose a verified backend before SGLang chooses the one that is fastest without speculation (fa3 on Hopper)."""
    if args.device not in (None, "cuda") or any(getattr(args, field) is not None for field in _FIELDS):
        return
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return
    from sglang.srt.utils import is_flashinfer_available

    from sglang_psd.draft_method import read_config

    try:
        config = read_config(str(args.model_path), args.trust_remote_code, args.revision)
    except (OSError, ValueError):
        return  # SGLang says what is wrong with the target
    args.attention_backend = default_backend(config, flashinfer=is_flashinfer_available())


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
                f"{' or '.join(VERIFIED)}."
            )
