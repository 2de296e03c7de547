"""Triton kernels behind ``law`` and ``noise`` on a GPU: no sort, no intermediate of the vocabulary's size.

Each has a readable PyTorch twin (``target/acceptance.py``, ``noise.py``) that the tests hold it against: on a GPU and,
in Triton's interpreter, without one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_psd.noise import GOLDEN, MIX_1, MIX_2

_BLOCK = 8192
_NOISE_SPAN = 16384
_ONE_BITS = 0x3F800000  # 1.0 as float32
_PASSES = 17  # a quarter of 2**30 patterns a pass, and two more for rounding

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def _weights(logits, row, offsets, vocab_size, stride, peak, inverse_temperature):
    x = tl.load(logits + row * stride + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.exp((x - peak) * inverse_temperature)


@triton.jit
def _stays(mass, count, allowed, top_k, top_p):
    return (tl.sum(count, axis=0) < top_k) & ((tl.sum(mass, axis=0) <= allowed) | (top_p >= 1.0))


@triton.jit
def _filtered_law(
    logits,
    law,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    vocab_size,
    stride,
    rows_per_request,
    ONE_BITS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_per_request
    inverse_temperature = 1.0 / tl.load(temperatures + request)
    top_k, top_p, min_p = tl.load(top_ks + request), tl.load(top_ps + request), tl.load(min_ps + request)
    lanes = tl.arange(0, BLOCK)

    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        offsets = start + lanes
        x = tl.load(logits + row * stride + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, axis=0)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        masses += _weights(logits, row, start + lanes, vocab_size, stride, peak, inverse_temperature)
    allowed = top_p * tl.sum(masses, axis=0)

    # A token stays if fewer than top_k tokens, and a mass of at most top_p, lie above it. That holds from some weight
    # on: search the bit patterns of float32, which order non-negative numbers as integers do. Three probes a pass
    # leave a quarter of the interval.
    unlimited = (top_k >= vocab_size) & (top_p >= 1.0)
    low = tl.full([], -1, tl.int32)
    high = tl.where(unlimited, 0, ONE_BITS).to(tl.int32)
    passes = tl.where(unlimited | (top_k <= 1), 0, PASSES)
    for _ in range(passes):
        quarter = (high - low) // 4
        first, second, third = low + quarter, (low + high) // 2, high - quarter
        first, third = tl.maximum(first, low + 1), tl.minimum(third, high - 1)
        t1, t2, t3 = (
            first.to(tl.float32, bitcast=True),
            second.to(tl.float32, bitcast=True),
            third.to(tl.float32, bitcast=True),
        )
        mass1, mass2, mass3 = (
            tl.zeros([BLOCK], tl.float32),
            tl.zeros([BLOCK], tl.float32),
            tl.zeros([BLOCK], tl.float32),
        )
        count1, count2, count3 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            weight = _weights(logits, row, start + lanes, vocab_size, stride, peak, inverse_temperature)
            mass1 += tl.where(weight > t1, weight, 0.0)
            mass2 += tl.where(weight > t2, weight, 0.0)
            mass3 += tl.where(weight > t3, weight, 0.0)
            count1 += (weight > t1).to(tl.int32)
            count2 += (weight > t2).to(tl.int32)
            count3 += (weight > t3).to(tl.int32)
        stays1, stays2, stays3 = (
            _stays(mass1, count1, allowed, top_k, top_p),
            _stays(mass2, count2, allowed, top_k, top_p),
            _stays(mass3, count3, allowed, top_k, top_p),
        )
        # An interval of one step has been searched: the passes that are left change nothing.
        if high - low > 1:
            low, high = (
                tl.where(stays1, low, tl.where(stays2, first, tl.where(stays3, second, third))),
                tl.where(stays1, first, tl.where(stays2, second, tl.where(stays3, third, high))),
            )
    least = tl.maximum(high.to(tl.float32, bitcast=True), min_p)

    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        weight = _weights(logits, row, start + lanes, vocab_size, stride, peak, inverse_temperature)
        masses += tl.where(weight >= least, weight, 0.0)
    scale = 1.0 / tl.sum(masses, axis=0)
    for start in range(0, vocab_size, BLOCK):
        offsets = start + lanes
        weight = _weights(logits, row, offsets, vocab_size, stride, peak, inverse_temperature)
        kept = tl.where(weight >= least, weight * scale, 0.0)
        tl.store(law + row * vocab_size + offsets, kept, mask=offsets < vocab_size)


def filtered_law(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Temperature, top-k, top-p and min-p of every row, without a sort.

    The rule is that of ``sglang_psd.law.cut_law``; of tokens that tie at the edge of a cut all stay.

    Parameters
    ----------
    logits : Tensor, ``[B, N, V]``, any float dtype, the last dimension contiguous
        Not a row of minus infinity only.
    temperatures, top_ps, min_ps : Tensor, ``[B]`` float32
    top_ks : Tensor, ``[B]`` integer

    Returns
    -------
    Tensor, ``[B, N, V] float32``
    """
    batch, positions, vocab_size = logits.shape
    flat = logits.reshape(batch * positions, vocab_size)
    law = torch.empty(batch, positions, vocab_size, dtype=torch.float32, device=logits.device)
    _filtered_law[(batch * positions,)](
        flat,
        law,
        temperatures.contiguous(),
        top_ks.contiguous(),
        top_ps.contiguous(),
        min_ps.contiguous(),
        vocab_size,
        flat.stride(0),
        positions,
        ONE_BITS=_ONE_BITS,
        PASSES=_PASSES,
        BLOCK=_BLOCK,
        num_warps=16,
    )
    return law


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def _noisy_best(
    probs, seeds, positions, best_scores, best_tokens, vocab_size, spans, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stream = _mix(_mix(tl.load(seeds + row) + _GOLDEN) ^ (tl.load(positions + row) * _GOLDEN))
    best, best_token = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int64)
    for start in range(0, SPAN, BLOCK):
        tokens = span.to(tl.int64) * SPAN + start + tl.arange(0, BLOCK)
        p = tl.load(probs + row * vocab_size + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float64)
        bits = _shift_right(_mix(stream + tokens * _MIX_1), 11)
        uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2 ** -53
        score = tl.where(p > 0, tl.log(p) - tl.log(-tl.log(uniform)), float("-inf"))
        top = tl.max(score, axis=0)
        # The first of equal scores wins, as in torch.argmax.
        first = tl.min(tl.where(score == top, tokens, vocab_size), axis=0)
        best_token = tl.where(top > best, first, best_token)
        best = tl.maximum(best, top)
    tl.store(best_scores + row * spans + span, best)
    tl.store(best_tokens + row * spans + span, best_token)


def noisy_argmax(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``noise.gumbel_argmax`` without temporaries.

    Parameters
    ----------
    probs : Tensor, ``[R, V] float32``
    seeds, positions : Tensor, ``[R] int64``

    Returns
    -------
    Tensor, ``[R] int64``
    """
    rows, vocab_size = probs.shape
    spans = triton.cdiv(vocab_size, _NOISE_SPAN)
    scores = torch.empty(rows, spans, dtype=torch.float64, device=probs.device)
    tokens = torch.empty(rows, spans, dtype=torch.int64, device=probs.device)
    # The kernel knows no strides, and a row expanded to several has stride 0.
    probs, seeds, positions = probs.contiguous(), seeds.contiguous(), positions.contiguous()
    _noisy_best[(rows, spans)](
        probs, seeds, positions, scores, tokens, vocab_size, spans, SPAN=_NOISE_SPAN, BLOCK=2048, num_warps=8
    )
    return tokens.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
