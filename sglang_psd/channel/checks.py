"""What a message has to fulfil beyond its types.

Raises ``ProtocolError`` everywhere: the message is refused, the connection goes on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sglang_psd.channel.arrays import PROB, TOKEN
from sglang_psd.errors import ProtocolError

# Times are seconds since boot.
LATEST_S = 1e12

if TYPE_CHECKING:
    from sglang_psd.channel.messages import Open, Proposals


def check_open(message: Open) -> None:
    """Refuse a prompt that is none, and sampling parameters that no law comes of."""
    if not message.tokens or len(message.tokens) % TOKEN.itemsize:
        raise ProtocolError("The drafter channel carried a prompt that is not a whole number of tokens.")
    if int(np.frombuffer(message.tokens, TOKEN).min()) < 0:
        raise ProtocolError("The drafter channel carried a prompt with a negative token.")
    sampling = message.sampling
    sound = (
        math.isfinite(sampling.temperature)
        and (sampling.greedy or sampling.temperature > 0)
        and 0.0 <= sampling.top_p <= 1.0
        and 0.0 <= sampling.min_p <= 1.0
        and (sampling.seed is None or abs(sampling.seed) < 1 << 63)
        and 1 <= sampling.top_k < 1 << 62
    )
    if not sound:
        raise ProtocolError("The drafter channel carried sampling parameters out of range.")


def check_proposals(message: Proposals) -> None:
    """Refuse arrays that do not match their header: no reader looks outside them."""
    rows, steps = len(message.rids), message.num_steps
    law = len(message.sampled) * steps * message.top_m
    sound = (
        len(message.base_lens) == rows
        and len(message.counts) == rows
        and len(message.tokens) == rows * steps * TOKEN.itemsize
        and len(message.law_ids) == law * TOKEN.itemsize
        and len(message.law_probs) == law * PROB.itemsize
        and _within(message.counts, steps)
        and _within(message.sampled, rows - 1)
        and _within(message.unknown, rows - 1)
        and all(0.0 <= moment < LATEST_S for moment in (message.received_s, message.started_s, message.finished_s))
        # A sampled row without a law would pass for one that was proposed with certainty.
        and (message.top_m > 0 or not message.sampled)
    )
    if not sound:
        raise ProtocolError("The drafter sent proposals whose arrays do not match their header.")


def _within(numbers: list[int], most: int) -> bool:
    return not numbers or (min(numbers) >= 0 and max(numbers) <= most)


def check_contents(message: Proposals, num_steps: int, vocab_limit: int) -> None:
    """Refuse proposals that the target could not verify: too long, tokens it does not have, laws that are none.

    Raises
    ------
    ProtocolError
        Names what is wrong. The round goes on without these drafts.
    """
    if message.num_steps > num_steps:
        raise ProtocolError(f"The drafter sent {message.num_steps} drafts a request, {num_steps} are wanted at most.")
    for part in (message.tokens, message.law_ids):
        if part and not 0 <= (ids := np.frombuffer(part, TOKEN)).min() <= ids.max() < vocab_limit:
            raise ProtocolError("The drafter proposed a token that the target does not have.")
    if not message.law_probs:
        return
    probs = np.frombuffer(message.law_probs, PROB)
    # Written so that NaN fails it.
    if not (float(probs.min()) >= 0.0 and float(probs.max()) <= 1.001):
        raise ProtocolError("The drafter sent probabilities that are no distribution.")
