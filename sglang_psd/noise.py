"""Reproducible noise for seeded requests.

A seeded request's token at position ``p`` is ``argmax(log probs + gumbel(seed, p))``: it depends on the
target's law and on ``(seed, p)`` alone, so the text is the same in any batch, slot or mode, with any
drafter or none. The drafter perturbs its own law with the same noise, which makes both sides
agree more often than independent draws would (Gumbel coupling).
"""

from __future__ import annotations

import torch

# Multipliers of the splitmix64 finaliser, as signed 64-bit numbers: torch integers wrap around.
GOLDEN = -0x61C8864680B583EB
MIX_1 = -0x40A7B892E31B1A47
MIX_2 = -0x6B2FB644ECCEEE15


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of ``int64``."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def seeded_uniforms(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Uniform numbers in (0, 1) that depend on seed, position and token id only.

    Parameters
    ----------
    seeds, positions : Tensor, ``[...] int64``
        Broadcast against each other.
    vocab_size : int

    Returns
    -------
    Tensor, ``[..., vocab_size] float64``
    """
    stream = _mix(_mix(seeds.long() + GOLDEN) ^ (positions.long() * GOLDEN))
    tokens = torch.arange(vocab_size, device=stream.device, dtype=torch.int64) * MIX_1
    bits = _shift_right(_mix(stream.unsqueeze(-1) + tokens), 11)  # 53 bits, as a double holds
    return (bits.double() + 0.5) * 2.0**-53


def gumbel_argmax(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from ``probs`` with the noise of ``(seed, position)``.

    ``probs`` is ``[..., V]`` (zeros are never drawn), the result ``[...] int64``. On a GPU a kernel does it
    (``kernels.noisy_argmax``).
    """
    if probs.is_cuda:
        from sglang_psd.kernels import noisy_argmax

        shape = probs.shape[:-1]
        rows = (x.long().expand(shape).reshape(-1) for x in (seeds, positions))
        return noisy_argmax(probs.float().reshape(-1, probs.shape[-1]), *rows).view(shape)
    return gumbel_argmax_reference(probs, seeds, positions)


def gumbel_argmax_reference(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``gumbel_argmax`` in plain PyTorch."""
    noise = -torch.log(-torch.log(seeded_uniforms(seeds, positions, probs.shape[-1])))
    return torch.argmax(probs.double().log() + noise, dim=-1)
