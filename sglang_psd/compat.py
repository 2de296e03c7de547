"""Do target and draft speak the same token ids?

The comparison itself is pure Python over two vocabularies. Reading them from checkpoints uses SGLang's own
loaders, imported late.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_psd.draft_method import head_of, readable_draft
from sglang_psd.errors import DraftMismatchError

if TYPE_CHECKING:
    from sglang_psd.server_args import PSDServerArgs

logger = logging.getLogger(__name__)


def compare_vocabularies(
    target: Mapping[str, int], draft: Mapping[str, int], target_size: int, draft_size: int
) -> None:
    """Accept equal vocabularies and differences in padding; refuse everything else.

    Parameters
    ----------
    target, draft : mapping
        Token string to id, as a tokenizer's ``get_vocab``.
    target_size, draft_size : int
        ``vocab_size`` of the two model configs (rows of the embedding).

    Raises
    ------
    DraftMismatchError
        Some id means different tokens, or a model has fewer rows than its tokens need.
    """
    target_of = {index: token for token, index in target.items() if index < target_size}
    draft_of = {index: token for token, index in draft.items() if index < draft_size}
    for index in sorted(target_of.keys() & draft_of.keys()):
        if target_of[index] != draft_of[index]:
            raise DraftMismatchError(
                f"Target and draft disagree on token {index}: the target reads it as {target_of[index]!r}, the draft "
                f"as {draft_of[index]!r}; choose for --speculative-draft-model-path a draft of the same tokenizer."
            )
    missing = sorted(target_of.keys() ^ draft_of.keys())
    if missing:
        index = missing[0]
        side, token = ("target", target_of[index]) if index in target_of else ("draft", draft_of[index])
        raise DraftMismatchError(
            f"Only the {side} knows token {index} ({token!r}); choose for --speculative-draft-model-path a draft "
            "of the same tokenizer (the number of padding rows may differ)."
        )


@functools.lru_cache(maxsize=8)
def _read_vocabulary(tokenizer_path: str, mode: str, trust_remote_code: bool, revision: str | None) -> dict[str, int]:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer = get_tokenizer(
        tokenizer_path, tokenizer_mode=mode, trust_remote_code=trust_remote_code, tokenizer_revision=revision
    )
    return dict(tokenizer.get_vocab())


@functools.lru_cache(maxsize=8)
def _read_sizes(path: str, trust_remote_code: bool, revision: str | None) -> tuple[int, int]:
    from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length

    config = get_config(path, trust_remote_code=trust_remote_code, revision=revision)
    text_config = getattr(config, "text_config", config)
    return int(text_config.vocab_size), int(get_context_length(text_config))


def context_of(args: PSDServerArgs) -> int:
    """The target's context length."""
    _, context = _read_sizes(args.model_path, args.trust_remote_code, args.revision)
    return args.context_length or context


def vocab_limit(args: PSDServerArgs) -> int:
    """First id that must never be proposed: rows past either vocabulary are padding."""
    trust = args.trust_remote_code
    target_size, _ = _read_sizes(args.model_path, trust, args.revision)
    draft_size, _ = _read_sizes(str(args.speculative_draft_model_path), trust, args.speculative_draft_model_revision)
    return min(target_size, draft_size)


def check_draft_model(args: PSDServerArgs) -> None:
    """Compare the draft checkpoint with the target's before any weight is loaded.

    Raises
    ------
    DraftMismatchError
        The token ids differ in meaning, or an EAGLE head was made for another target.
    """
    if head_of(args) is not None:
        return  # it works with the target's own embedding
    draft_path = str(args.speculative_draft_model_path)
    trust = args.trust_remote_code
    target_size, target_context = _read_sizes(args.model_path, trust, args.revision)
    draft_size, draft_context = _read_sizes(draft_path, trust, args.speculative_draft_model_revision)
    if args.skip_tokenizer_init:
        if target_size != draft_size:
            logger.warning(
                "PSD: vocabularies differ in size (%d, %d) and --skip-tokenizer-init keeps their tokens from being "
                "compared; drafts above %d are never proposed.",
                target_size,
                draft_size,
                min(target_size, draft_size),
            )
    else:
        mode = args.tokenizer_mode
        target = _read_vocabulary(args.tokenizer_path or args.model_path, mode, trust, args.revision)
        with readable_draft(draft_path):
            draft = _read_vocabulary(draft_path, mode, trust, args.speculative_draft_model_revision)
        compare_vocabularies(target, draft, target_size, draft_size)
    context = args.context_length or target_context
    if draft_context < context:
        logger.warning(
            "PSD: the draft model's context (%d) is shorter than the target's (%d); longer requests run on "
            "without drafts.",
            draft_context,
            context,
        )
