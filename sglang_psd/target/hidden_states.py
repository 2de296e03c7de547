"""Hidden states of the target for an EAGLE head: which layers are kept, and which row belongs to which token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_psd.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_psd.draft_method import Head


@dataclass
class TargetFeatures:
    """Hidden states of one forward, on the device.

    The row of a token is the hidden state at that token's own position: what the target computed from it and from
    everything before it. Row j of request i stands at ``starts[i] + j`` and belongs to position ``firsts[i] + j``.

    Attributes
    ----------
    rows : Tensor, ``[N, feature_size]``
    starts, firsts : list of int
    counts : list of int or None
        Rows of each request after a prefill. None after a verify: the token that the drafts continue has one, and every
        accepted draft, which makes as many rows as tokens are gained.
    """

    rows: torch.Tensor
    starts: list[int]
    firsts: list[int]
    counts: list[int] | None


def capture_layers(model: Any, head: Head) -> None:
    """Make the target's model hand out what ``head`` reads; before CUDA graphs are captured.

    Raises
    ------
    UnsupportedFeatureError
        SGLang's class of this model cannot.
    """
    if not head.reads_layers:
        return
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise UnsupportedFeatureError(
            f"SGLang's {type(model).__name__} does not hand out the hidden states that an EAGLE-3 head reads; "
            "use a draft model, or serve without drafts by --psd-mode off."
        )
    model.set_eagle3_layers_to_capture(None if head.layers is None else list(head.layers))


def keep_features(batch: ScheduleBatch, output: LogitsProcessorOutput, width: int) -> TargetFeatures | None:
    """Take a forward's hidden states out of its result.

    They stay on the device. Unless the user asked for hidden states, SGLang must not find them: it would copy them to
    the host.

    Parameters
    ----------
    batch : ScheduleBatch
        As forwarded.
    output : LogitsProcessorOutput
    width : int
        Tokens per request of a verify; 0 after a prefill.
    """
    rows = output.hidden_states
    if not batch.return_hidden_states:
        output.hidden_states = None
    if rows is None:
        return None
    if rows.is_cuda and width:
        # A CUDA graph writes into the same memory again at the other slot's launch.
        rows = rows.clone()
    if width:
        firsts = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in batch.reqs]
        return TargetFeatures(rows, [i * width for i in range(len(firsts))], firsts, None)
    counts = list(batch.extend_lens)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return TargetFeatures(rows, starts, list(batch.prefix_lens), counts)
