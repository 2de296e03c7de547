"""Vocabularies of target and draft."""

from __future__ import annotations

import pytest

from sglang_psd.compat import compare_vocabularies
from sglang_psd.errors import DraftMismatchError

WORDS = {"a": 0, "b": 1, "c": 2}


def test_equal_and_padded() -> None:
    compare_vocabularies(WORDS, WORDS, 3, 3)
    compare_vocabularies(WORDS, WORDS, 3, 64)
    compare_vocabularies(WORDS, WORDS, 128, 64)


def test_tokens_beyond_the_embedding_do_not_matter() -> None:
    """Some tokenizers know more tokens than their model has rows."""
    compare_vocabularies({**WORDS, "x": 3}, {**WORDS, "y": 3}, 3, 3)


def test_other_meaning_names_an_example() -> None:
    with pytest.raises(DraftMismatchError, match=r"disagree on token 1: .*'b'.*'z'.*--speculative-draft-model-path"):
        compare_vocabularies(WORDS, {"a": 0, "z": 1, "c": 2}, 3, 3)


@pytest.mark.parametrize(
    ("target", "draft", "side"), [(WORDS, {"a": 0, "b": 1}, "target"), ({"a": 0, "b": 1}, WORDS, "draft")]
)
def test_missing_tokens(target, draft, side) -> None:
    with pytest.raises(DraftMismatchError, match=rf"Only the {side} knows token 2 \('c'\)"):
        compare_vocabularies(target, draft, 3, 3)
