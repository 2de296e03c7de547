"""Cells of result files arranged for comparison: which arm wins where. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from sglang_psd.bench.table import median

# What stock SGLang offers.
BASELINES = ("plain", "replicas", "standalone", "replicas-standalone", "eagle3", "replicas-eagle3")
# PSD with a GPU for the drafter, and with the drafter on the target's.
OWN_GPU = ("sequential", "parallel")
SHARED_GPU = tuple(f"{arm}, shared GPU" for arm in OWN_GPU)
PSD_ARMS = OWN_GPU + SHARED_GPU
SIMULATED = "simulated accept length "
# What two files must share for the arms without a draft model of one to count for the other.
CONDITIONS = ("target", "dataset", "temperature", "waves", "extra")


@dataclass(frozen=True, order=True)
class Group:
    """Cells that may be compared: everything but arm and requests in flight is the same."""

    target: str
    draft: str
    protocol: str
    k: int
    input_len: int
    output_len: int
    acceptance: str
    attention: str

    @property
    def lengths(self) -> str:
        """Tokens of prompt and answer."""
        return f"{self.input_len or 'prompts'}+{self.output_len}"

    @property
    def title(self) -> str:
        """One line for people."""
        models = f"{self.target}, draft {self.draft}, k={self.k}"
        return (
            f"{models}, {self.lengths} tokens, {self.acceptance}, {self.protocol} protocol, {self.attention} attention"
        )

    @property
    def slug(self) -> str:
        """The same for file names."""
        text = f"{self.target}-{self.draft}-k{self.k}-{self.lengths}-{self.acceptance}-{self.protocol}-{self.attention}"
        return "".join(c if c.isalnum() or c in ".+-" else "_" for c in text)


@dataclass(frozen=True)
class Point:
    """One arm at one number of requests in flight.

    Attributes
    ----------
    n : int
        Requests in flight of the row.
    per_gpu, total_per_gpu : float or None
        Output tok/s per GPU: decoding alone, and with prefill.
    per_user : float or None
        Output tok/s that one request sees while decoding.
    entry : dict
        The cell of the result file.
    """

    n: int
    per_gpu: float | None
    total_per_gpu: float | None
    per_user: float | None
    entry: dict[str, Any]


def acceptance_of(data: dict[str, Any], k: int) -> str:
    """How drafts were accepted, in words."""
    settings = data["settings"]
    simulated = settings["simulated"].get(str(k)) or settings["environment_accept_length"]
    if simulated is not None:
        return f"{SIMULATED}{float(simulated):g}"
    return "made-up weights" if settings["dummy_weights"] else "real acceptance"


def series_of(results: Sequence[dict[str, Any]]) -> dict[Group, dict[str, list[Point]]]:
    """Closed-loop points by group and arm, by rising n.

    Arms without a draft model do not depend on draft and k: they appear in every group of the same target, lengths,
    flags and hardware, also when they were measured in another file; a group's own file comes first.
    """
    series: dict[Group, dict[str, dict[int, Point]]] = {}
    owners: dict[Group, dict[str, Any]] = {}
    for data in results:
        for cell in _closed_loop(data):
            if cell["k"] is not None:
                group = _group(data, cell)
                owners.setdefault(group, data)
                series.setdefault(group, {}).setdefault(_arm_of(data, cell), {}).setdefault(cell["row"], _point(cell))
    for group, arms in series.items():
        owner = owners[group]
        for data in sorted(results, key=lambda data: data is not owner):
            for cell in _closed_loop(data) if _same_conditions(data, owner) else ():
                lengths = (cell["protocol"], cell["input_len"], cell["output_len"])
                if cell["k"] is None and lengths == (group.protocol, group.input_len, group.output_len):
                    arms.setdefault(cell["arm"], {}).setdefault(cell["row"], _point(cell))
    return {
        group: {arm: [points[n] for n in sorted(points)] for arm, points in sorted(series[group].items())}
        for group in sorted(series)
    }


def _closed_loop(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in data["cells"].values() if cell["measurements"] and cell["rate"] is None]


def _arm_of(data: dict[str, Any], cell: dict[str, Any]) -> str:
    """The cell's arm; a drafter on the target's GPU makes it another one. Without a GPU all share the cores."""
    arm: str = cell["arm"]
    if arm not in OWN_GPU or not data["runs"][-1]["environment"]["gpus"]:
        return arm
    its_own = ("arm", "k", "protocol")
    shared = any(s["shared"] for s in data["servers"].values() if all(s[name] == cell[name] for name in its_own))
    return SHARED_GPU[OWN_GPU.index(arm)] if shared else arm


def _same_conditions(one: dict[str, Any], other: dict[str, Any]) -> bool:
    # How many GPUs a machine shows does not matter to an arm that uses one of them.
    return all(one["settings"][name] == other["settings"][name] for name in CONDITIONS) and (
        set(one["runs"][-1]["environment"]["gpus"]) == set(other["runs"][-1]["environment"]["gpus"])
    )


def _group(data: dict[str, Any], cell: dict[str, Any]) -> Group:
    settings, k = data["settings"], cell["k"]
    names = (PurePath(settings["target"]).name, PurePath(settings["draft"]).name)
    lengths = cell["input_len"], cell["output_len"]
    return Group(*names, cell["protocol"], k, *lengths, acceptance_of(data, k), _attention_of(settings["extra"]))


def _attention_of(flags: Sequence[str]) -> str:
    """The attention backend that all servers were asked to take."""
    flag = "--attention-backend"
    return flags[flags.index(flag) + 1] if flag in flags else "default"


def _point(cell: dict[str, Any]) -> Point:
    decode = median(cell, "decode_tok_s")
    return Point(
        n=cell["row"],
        per_gpu=median(cell, "decode_tok_s_per_gpu"),
        total_per_gpu=median(cell, "tok_s_per_gpu"),
        per_user=None if decode is None else decode / cell["n"],
        entry=cell,
    )


def at(series: dict[str, list[Point]], arm: str, n: int) -> Point | None:
    """An arm's point at ``n``."""
    return next((point for point in series.get(arm, []) if point.n == n), None)


def best(
    series: dict[str, list[Point]], arms: Sequence[str], n: int, figure: str = "per_gpu"
) -> tuple[str, float] | None:
    """The best of ``arms`` at ``n`` and its figure; None when none was measured."""
    found = []
    for arm in arms:
        point = at(series, arm, n)
        value = None if point is None else getattr(point, figure)
        if value is not None:
            found.append((arm, value))
    return max(found, key=lambda pair: pair[1]) if found else None


def gains(series: dict[str, list[Point]], arm: str, base: str) -> list[tuple[int, float]]:
    """(n, ratio of decoding tok/s per GPU) wherever both were measured."""
    ratios = []
    for point in series.get(arm, []):
        other = at(series, base, point.n)
        if other is not None and point.per_gpu is not None and other.per_gpu:
            ratios.append((point.n, point.per_gpu / other.per_gpu))
    return ratios


def crossover(points: Sequence[tuple[int, float]]) -> list[float]:
    """Where a curve of gains passes 1, interpolated between neighbours over the logarithm of n."""
    places = []
    for (left, before), (right, after) in itertools.pairwise(points):
        if (before - 1) * (after - 1) < 0:
            share = (1 - before) / (after - before)
            places.append(math.exp(math.log(left) + share * (math.log(right) - math.log(left))))
    return places


@dataclass(frozen=True)
class Region:
    """One line of the map.

    Attributes
    ----------
    group : Group
    n : int
    stock : (str, float)
        The best stock arm and its decoding tok/s per GPU.
    psd : dict
        Those of PSD's arms.
    total_gain, level_gain : float or None
        Best PSD arm over best stock arm with prefill; and while decoding, had every arm had exactly the accept length
        that was simulated (a few hundred draws miss it by some percent).
    """

    group: Group
    n: int
    stock: tuple[str, float]
    psd: dict[str, float]
    total_gain: float | None
    level_gain: float | None

    @property
    def winner(self) -> str:
        """The arm with the most decoding tok/s per GPU."""
        return max([*self.psd.items(), self.stock], key=lambda pair: pair[1])[0]

    @property
    def gain(self) -> float:
        """Best PSD arm over best stock arm."""
        return max(self.psd.values()) / self.stock[1]


def regions(series: dict[Group, dict[str, list[Point]]], protocol: str = "fair") -> list[Region]:
    """Every (group, n) in which both sides were measured, losing ones first."""
    found = []
    for group, arms in series.items():
        if group.protocol != protocol:
            continue
        for n in sorted({point.n for points in arms.values() for point in points}):
            stock = best(arms, BASELINES, n)
            psd = {arm: p.per_gpu for arm in PSD_ARMS if (p := at(arms, arm, n)) is not None and p.per_gpu is not None}
            if stock is None or not psd:
                continue
            totals = best(arms, BASELINES, n, "total_per_gpu"), best(arms, PSD_ARMS, n, "total_per_gpu")
            gain = totals[1][1] / totals[0][1] if totals[0] and totals[1] else None
            found.append(Region(group, n, stock, psd, gain, _level_gain(group, arms, n)))
    return sorted(found, key=lambda region: region.gain)


def _level_gain(group: Group, arms: dict[str, list[Point]], n: int) -> float | None:
    prefix, _, simulated = group.acceptance.partition(SIMULATED)
    if prefix or not simulated:
        return None
    sides = []
    for side in (PSD_ARMS, BASELINES):
        points = [point for arm in side if (point := at(arms, arm, n)) is not None]
        rates = [rate for point in points if (rate := _level_rate(point, float(simulated))) is not None]
        sides.append(max(rates, default=None))
    ours, theirs = sides
    return ours / theirs if ours and theirs else None


def _level_rate(point: Point, accept_length: float) -> float | None:
    """Decoding tok/s per GPU at this accept length; that of an arm without drafts does not depend on it."""
    measured = median(point.entry, "accept_length")
    if point.per_gpu is None or point.entry["k"] is None:
        return point.per_gpu
    return point.per_gpu * accept_length / measured if measured else None
