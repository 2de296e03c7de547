"""Which models a chain of drafts can be verified with, or drafted by: a question to a checkpoint's config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang_psd.draft_method import head_of, readable_draft
from sglang_psd.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from sglang_psd.server_args import PSDServerArgs


def refuse_unsupported_models(args: PSDServerArgs) -> None:
    """Refuse targets and draft models whose forward leaves more behind than KV, or that continue no text.

    Raises
    ------
    UnsupportedFeatureError
        Which of the two, and why.
    """
    target = _read(str(args.model_path), args.trust_remote_code, args.revision)
    problem = _problem_of(target) or ("multimodal" if _is_multimodal(target) else None)
    if problem is not None:
        raise UnsupportedFeatureError(
            f"PSD does not work with {problem} targets yet, and --model-path names a {_name(target)}; serve it "
            "without drafts by --psd-mode off."
        )
    if head_of(args) is not None:
        return
    path = str(args.speculative_draft_model_path)
    with readable_draft(path):
        draft = _read(path, args.trust_remote_code, args.speculative_draft_model_revision)
    problem = _problem_of(draft)
    if problem is not None:
        raise UnsupportedFeatureError(
            f"PSD does not work with {problem} draft models, and --speculative-draft-model-path names a "
            f"{_name(draft)}; name another model of the target's tokenizer."
        )


def _read(path: str, trust_remote_code: bool, revision: str | None) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(path, trust_remote_code=trust_remote_code, revision=revision)


def _name(config: Any) -> str:
    return (config.architectures or [config.model_type])[0]


def _problem_of(config: Any) -> str | None:
    from sglang.srt.configs.model_config import is_generation_model

    if not is_generation_model(config.architectures or []):
        return "embedding"
    return "recurrent" if is_recurrent(config) else None


def is_recurrent(config: Any) -> bool:
    """Whether layers carry a state from token to token (Mamba, linear attention, short convolutions).

    A verify would have to write the state behind the last accepted token back, and a rejected draft would have to be
    taken out of the drafter's (``commit_mamba_states_after_verify``, ``sglang/srt/speculative/spec_utils.py``).
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config

    # What SGLang's function reads of a ``ModelConfig``; making one would settle arguments that are not complete yet.
    asked = SimpleNamespace(
        hf_config=config, is_draft_model=False, linear_attn_registry_result=get_linear_attn_config(config)
    )
    return mambaish_config(asked) is not None


def _is_multimodal(config: Any) -> bool:
    """Positions of images and their embeddings are more than a chain of drafts carries."""
    from sglang.srt.configs.model_config import is_multimodal_model

    return bool(is_multimodal_model(config.architectures or []))
