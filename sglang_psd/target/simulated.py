"""``SGLANG_SIMULATE_ACC_LEN``: SGLang's knob for measuring overhead with weights that mean nothing.

Replaces what the acceptance rule said by a chosen number of tokens, on average as many a round as stock SGLang emits
under the same variables (source: ``sglang/srt/speculative/spec_utils.py``, ``generate_simulated_accept_index``). The
verify and the acceptance are computed as always; the texts are meaningless.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_psd.errors import PSDConfigError

if TYPE_CHECKING:
    from sglang_psd.target.sampler import StagedDrafts

logger = logging.getLogger(__name__)

METHODS = ("match-expected", "multinomial")
TOKEN_MODES = ("fixed", "real-draft-token")
# What stock SGLang emits in the mode "fixed".
FIXED_TOKEN = 100


class SimulatedAcceptance:
    """One number of tokens for all requests of a round, as in stock SGLang.

    Parameters
    ----------
    accept_length : float
        Tokens a round on average; kept between 1 and ``chunk``.
    chunk : int
        Most tokens a round, K + 1.
    method : {"match-expected", "multinomial"}
        Draw between the whole numbers around ``accept_length``; or round a normal draw of deviation 1.
    token_mode : {"fixed", "real-draft-token"}
        Emit token 100; or the drafts and the token that the acceptance rule ended with.
    seed : int
        Equal on all tensor-parallel ranks, which then draw the same numbers.
    """

    def __init__(self, accept_length: float, chunk: int, method: str, token_mode: str, seed: int):
        for name, value, known in (("METHOD", method, METHODS), ("TOKEN_MODE", token_mode, TOKEN_MODES)):
            if value not in known:
                raise PSDConfigError(f"SGLANG_SIMULATE_ACC_{name} must be one of {', '.join(known)}, got {value!r}.")
        self._accept_length = accept_length
        self._chunk = chunk
        self._method = method
        self._fixed = token_mode == "fixed"
        self._random = np.random.default_rng([seed, 0x53494D])

    @classmethod
    def from_environment(cls, chunk: int, seed: int) -> SimulatedAcceptance | None:
        """What the environment asks for; None, the rule, when it asks for nothing."""
        from sglang.srt.environ import envs

        accept_length = envs.SGLANG_SIMULATE_ACC_LEN.get()
        if accept_length <= 0:
            return None
        logger.warning(
            "PSD: SGLANG_SIMULATE_ACC_LEN=%s replaces the acceptance rule and texts mean nothing; unset it to serve.",
            accept_length,
        )
        method, token_mode = envs.SGLANG_SIMULATE_ACC_METHOD.get(), envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get()
        return cls(accept_length, chunk, method, token_mode, seed)

    def draw(self) -> int:
        """Tokens of one round, between 1 and ``chunk``."""
        wanted = self._accept_length
        if self._method == "multinomial":
            return int(np.clip(np.rint(self._random.normal(wanted, 1.0)), 1, self._chunk))
        wanted = min(float(self._chunk), max(1.0, wanted))
        lower = int(wanted)
        return lower + int(self._random.random() < wanted - lower)

    def replace(self, tokens: torch.Tensor, drafts: StagedDrafts) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[B, K + 1] int64`` and lengths ``[B] int32`` in place of the rule's.

        A request never gets more than its drafts and one token: one whose drafts were late makes no progress that real
        acceptance could not make.
        """
        lengths = (drafts.count + 1).clamp(max=self.draw())
        if self._fixed:
            return torch.full_like(tokens, FIXED_TOKEN), lengths.to(torch.int32)
        chain = torch.cat([drafts.tokens, tokens[:, -1:]], dim=1)
        # The rule's tokens lie behind its accepted drafts; elsewhere its columns hold drafts: any token will do there.
        last = (lengths - 1).view(-1, 1)
        return chain.scatter(1, last, tokens.gather(1, last)), lengths.to(torch.int32)
