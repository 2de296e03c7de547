"""The arms of a comparison: what each server is started with, and what it occupies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_psd.errors import PSDConfigError, UnsupportedFeatureError

EAGER = ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    Attributes
    ----------
    name : str
    drafts : bool
        Whether there is a draft model or an EAGLE head, so that k matters.
    psd : bool
        Whether it is served by this package.
    copies : bool
        Whether it fills all GPUs with data-parallel copies.
    needs_gpu : bool
        Stock SGLang cannot serve it on a CPU.
    flags : callable
        ``(draft, k) -> list of str``, what sets it apart from a plain server.
    """

    name: str
    drafts: bool
    psd: bool
    copies: bool
    needs_gpu: bool
    flags: Callable[[str, int], list[str]]


def _plain(draft: str, k: int) -> list[str]:
    return []


def _standalone(draft: str, k: int) -> list[str]:
    flags = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
    flags += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
    return [*flags, "--speculative-num-draft-tokens", str(k + 1)]


def _eagle3(draft: str, k: int) -> list[str]:
    return ["--speculative-algorithm", "EAGLE3", *_standalone(draft, k)[2:]]


def _psd(mode: str) -> Callable[[str, int], list[str]]:
    def flags(draft: str, k: int) -> list[str]:
        shared = ["--speculative-algorithm", "PSD", "--speculative-draft-model-path", draft]
        # A standby imports beside the first measurements; a drafter that is lost spoils them in any case.
        shared += ["--psd-config", '{"standby": false}']
        return [*shared, "--speculative-num-steps", str(k), "--psd-mode", mode]

    return flags


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("plain", False, False, False, False, _plain),
        Arm("replicas", False, False, True, False, _plain),
        Arm("standalone", True, False, False, True, _standalone),
        Arm("replicas-standalone", True, False, True, True, _standalone),
        Arm("eagle3", True, False, False, True, _eagle3),
        Arm("replicas-eagle3", True, False, True, True, _eagle3),
        Arm("sequential", True, True, False, False, _psd("sequential")),
        Arm("parallel", True, True, False, False, _psd("parallel")),
    )
}
# Names kept for schemes that are planned.
RESERVED = ("auto", "pearl", "tetris")


def find_arms(names: list[str], *, gpus: int, tp_size: int) -> list[Arm]:
    """The arms of these names, in this order.

    Parameters
    ----------
    gpus : int
        GPUs of this machine; 0 on a CPU.
    tp_size : int
        GPUs of one target.

    Raises
    ------
    PSDConfigError, UnsupportedFeatureError
        Unknown, not built yet, or more than this machine can serve.
    """
    found = []
    for name in names:
        if name in RESERVED:
            raise UnsupportedFeatureError(f"The arm {name!r} of --arms does not exist yet; leave it out.")
        if name not in ARMS:
            raise PSDConfigError(f"--arms knows {', '.join(ARMS)}, got {name!r}.")
        arm = ARMS[name]
        if arm.needs_gpu and not gpus:
            raise PSDConfigError(f"The arm {name!r} of --arms needs a GPU: stock SGLang cannot serve it on a CPU.")
        if arm.copies and gpus // tp_size < 2:
            raise PSDConfigError(
                f"The arm {name!r} of --arms needs room for two copies of the target, {2 * tp_size} GPUs, and this "
                f"machine shows {gpus}; leave it out."
            )
        found.append(arm)
    return found


def server_flags(
    arm: Arm, *, target: str, draft: str, k: int | None, gpus: int, tp_size: int, eager: bool, sizes: list[int]
) -> list[str]:
    """Flags of one arm's server; what the user adds comes after them and wins.

    Parameters
    ----------
    sizes : list of int
        Numbers of requests that are measured. Every arm captures graphs of just these and of their halves: what a
        slot holds; all arms start fast and pad alike.
    """
    flags = ["--model-path", target, "--random-seed", "1", "--log-level", "info"]
    flags += ["--max-running-requests", str(max(sizes))]
    if eager and gpus:
        flags += EAGER
    elif gpus:
        flags += ["--cuda-graph-bs-decode", *map(str, graph_sizes(sizes))]
    if arm.copies:
        flags += ["--dp-size", str(gpus // tp_size)]
    return flags + arm.flags(draft, k or 0)


def graph_sizes(sizes: list[int]) -> list[int]:
    """Batch sizes to capture for these numbers of requests in flight."""
    return sorted({1} | set(sizes) | {(size + 1) // 2 for size in sizes})


def tp_size_of(extra: list[str]) -> int:
    """GPUs of one target, from the flags that the user passes on."""
    for i, flag in enumerate(extra):
        name, _, value = flag.partition("=")
        if name in ("--tp-size", "--tensor-parallel-size", "--tp"):
            value = value or (extra[i + 1] if i + 1 < len(extra) else "")
            if value.isdecimal() and int(value):
                return int(value)
            raise PSDConfigError(f"{name} must be a whole number of GPUs, got {value!r}.")
    return 1


def occupied(server_info: dict[str, Any]) -> dict[str, Any]:
    """What a running server occupies, from its ``/server_info``.

    Returns
    -------
    dict
        ``gpus``: how many, at least 1 (on a CPU the whole machine counts as one device); ``shared``: whether a drafter
        process shares the target's GPU; ``kv_tokens``: the target's KV capacity, all copies together; ``drafter``;
        ``attention``: the target's attention backend.
    """
    states = server_info.get("internal_states") or [{}]
    tp_size, copies = server_info.get("tp_size") or 1, server_info.get("dp_size") or 1
    base = server_info.get("base_gpu_id") or 0
    drafter = (states[0].get("psd") or {}).get("drafter")
    target = {f"cuda:{base + i}" for i in range(tp_size)}
    device = (drafter or {}).get("device")
    on_cpu = server_info.get("device") == "cpu"
    shared = drafter is not None and (on_cpu or device in target)
    capacity = server_info.get("max_total_num_tokens") or states[0].get("max_total_num_tokens") or 0
    return {
        "gpus": 1 if on_cpu else tp_size * copies + (1 if drafter is not None and not shared else 0),
        "shared": shared,
        "kv_tokens": capacity * copies,
        "attention": server_info.get("attention_backend"),
        "drafter": drafter,
    }
