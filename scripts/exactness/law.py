"""Whether two samples of texts follow one law."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np

# Fewest observations, of both samples together, that a cell of the test needs.
MIN_OBSERVED = 10


def same_law(ours: dict[str, list[list[int]]], right: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Two-sample chi-square tests, of every token and of every two neighbours, for each group of equal requests.

    Parameters
    ----------
    ours, right : dict
        Texts by group.

    Returns
    -------
    dict
        Texts a group, the smallest p-value times the number of tests, and what that test was: its group, the tokens
        ``(start, end)`` and how often both samples had each combination, those that were seen too rarely together.
    """
    from scipy import stats

    tests: list[tuple[float, str, tuple[int, int], list[list[int]]]] = []
    for group, texts in ours.items():
        length = min((len(text) for text in [*texts, *right.get(group, [])]), default=0)
        windows = [(i, i + 1) for i in range(length)] + [(i, j + 1) for i, j in pairwise(range(length))]
        for start, end in windows:
            counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
            for side, sample in enumerate((texts, right.get(group, []))):
                for text in sample:
                    counts[tuple(text[start:end])][side] += 1
            table = [row for row in counts.values() if sum(row) >= MIN_OBSERVED]
            rare = np.sum([row for row in counts.values() if sum(row) < MIN_OBSERVED] or [[0, 0]], axis=0)
            if rare.sum() >= MIN_OBSERVED:
                table.append(rare.tolist())
            if len(table) > 1 and np.all(np.sum(table, axis=0) > 0):
                value = float(stats.chi2_contingency(np.array(table).T).pvalue)
                tests.append((value, group, (start, end), table))
    least = min(tests, default=None)
    return {
        "texts": {group: len(texts) for group, texts in sorted(ours.items())},
        "tests": len(tests),
        "p_value": None if least is None else min(1.0, least[0] * len(tests)),
        "least": None if least is None else {"group": least[1], "tokens": least[2], "counts": least[3]},
    }
