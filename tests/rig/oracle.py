"""What SGLang says without any of this package: the text every test compares with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.models import BOS
from tests.rig.rig import Ask, Output, Rig

LONGEST = 48


def make_prompts(count: int, first: int = 0) -> list[list[int]]:
    """Different prompts of 3 to 29 tokens; any two lists agree where they overlap."""
    return [
        [BOS] + [(7 * i + 13 * j + i * j) % 250 + 10 for j in range(2 + (5 * i) % 27)]
        for i in range(first, first + count)
    ]


def _plain_outputs(models: Path, target: str, asks: list[Ask]) -> list[Output]:
    """SGLang's own scheduler, no prefix cache, one request at a time."""
    with Rig(models, None, target=target, disable_radix_cache=True) as rig:
        return rig.run_each(asks)


class Oracle:
    """Plain outputs, computed once per question.

    Parameters
    ----------
    run_case : callable
        The fixture of that name.
    models : Path
    """

    def __init__(self, run_case: Callable[..., Any], models: Path):
        self._run_case = run_case
        self._models = models
        self._known: dict[str, Output] = {}

    def outputs(self, asks: Sequence[Ask], *, target: str = "T") -> list[Output]:
        """Plain outputs, in order."""
        keys = [repr((target, ids, length, sorted(options.items()))) for ids, length, options in asks]
        missing = {key: ask for key, ask in zip(keys, asks) if key not in self._known}
        if missing:
            found = self._run_case(_plain_outputs, self._models, target, list(missing.values()))
            self._known.update(zip(missing, found))
        return [self._known[key] for key in keys]

    def greedy(self, prompts: Sequence[list[int]], *, target: str = "T") -> list[list[int]]:
        """The first ``LONGEST`` greedy tokens of each prompt; shorter requests are prefixes of them."""
        return [output.ids for output in self.outputs([(ids, LONGEST, {}) for ids in prompts], target=target)]


def assert_prefixes(outputs: Sequence[Output], lengths: Sequence[int], truth: Sequence[list[int]]) -> None:
    """Each output is exactly the plain text, cut to its length."""
    for i, (output, length) in enumerate(zip(outputs, lengths, strict=True)):
        expected = truth[i][:length]
        assert output.ids == expected, (
            f"request {i} left the plain text at token "
            f"{next((j for j, (a, b) in enumerate(zip(output.ids, expected)) if a != b), min(len(output.ids), length))}"
        )
        assert output.finish == {"type": "length", "length": length}
