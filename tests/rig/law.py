"""The exact law of short texts, and a test of samples against it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.models import BOS, SMALL_VOCAB_SIZE

# Fewest expected observations of a bin: the usual condition for the chi-square approximation.
MIN_EXPECTED = 8.0


def cut(probs: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Top-k, top-p and min-p of each row of ``probs``, all measured on the uncut law; renormalised."""
    order = np.argsort(-probs, axis=-1, kind="stable")
    ranked = np.take_along_axis(probs, order, -1)
    keep = (np.cumsum(ranked, -1) - ranked <= top_p) & (ranked >= ranked[..., :1] * min_p)
    if top_k:
        keep[..., top_k:] = False
    kept = np.zeros_like(probs)
    np.put_along_axis(kept, order, np.where(keep, ranked, 0.0), -1)
    return kept / kept.sum(-1, keepdims=True)


def exact_law(models: Path, target: str, length: int, temperature: float = 1.0, **cuts: Any) -> np.ndarray:
    """Probability of every text of ``length`` tokens after ``BOS``.

    Returns
    -------
    ndarray, ``[16 ** length] float64``
        Indexed by the text read as a number, first token most significant.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / target, dtype=torch.float64).eval()
    law = np.ones(1)
    prefixes = np.full((1, 1), BOS)
    for _ in range(length):
        with torch.inference_mode():
            logits = model(torch.from_numpy(prefixes)).logits[:, -1] / temperature
        probs = cut(torch.softmax(logits, -1).numpy(), **cuts)
        law = (law[:, None] * probs).reshape(-1)
        tokens = np.tile(np.arange(SMALL_VOCAB_SIZE), len(prefixes))[:, None]
        prefixes = np.concatenate([np.repeat(prefixes, SMALL_VOCAB_SIZE, 0), tokens], 1)
    return law


def p_value(texts: Iterable[list[int]], law: np.ndarray) -> float:
    """How well ``texts`` fit ``law``: chi-square tests of the whole texts and of every one- and two-token window.

    Windows have fewer cells than texts, so they see smaller errors. The result is the smallest p-value times the number
    of tests (Bonferroni).
    """
    found = np.array(list(texts))
    length = found.shape[1]
    table = law.reshape((SMALL_VOCAB_SIZE,) * length)
    windows = {(i, min(i + width, length)) for i in range(length) for width in (1, 2, length)}
    values = []
    for start, end in windows:
        weights = SMALL_VOCAB_SIZE ** np.arange(end - start)[::-1]
        counts = np.bincount(found[:, start:end] @ weights, minlength=SMALL_VOCAB_SIZE ** (end - start))
        others = tuple(axis for axis in range(length) if not start <= axis < end)
        values.append(_chi_square(counts, table.sum(axis=others).reshape(-1)))
    return min(1.0, min(values) * len(values))


def _chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square test; rare cells are pooled with others of like probability. An impossible observation gives 0."""
    from scipy import stats

    if counts[law == 0].any():
        return 0.0
    order = np.argsort(-law)
    expected, found = law[order] * counts.sum(), counts[order]
    # Bins are runs of the sorted cells; each run ends once enough is expected in it.
    bins, current, mass = np.zeros(len(law), dtype=int), 0, 0.0
    for i, value in enumerate(expected):
        bins[i] = current
        mass += value
        if mass >= MIN_EXPECTED:
            current, mass = current + 1, 0.0
    bins = np.minimum(bins, max(current - 1, 0))
    if bins[-1] == 0:
        return 1.0
    return float(stats.chisquare(np.bincount(bins, found), np.bincount(bins, expected)).pvalue)
