"""Hidden states of the target for an EAGLE head: which layers are kept, and which row belongs to which token.

A forward hands out one kind of hidden states. Users may ask for those of the last layer where an EAGLE-3 head reads
others: both travel side by side through the forward, and through its CUDA graph, and part in ``keep_features``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_psd.errors import UnsupportedFeatureError
from sglang_psd.transfer import to_device

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


def capture_layers(model: Any, head: Head, *, last_too: bool) -> None:
    """Make the target's model hand out what ``head`` reads; before CUDA graphs are captured.

    Parameters
    ----------
    model : torch.nn.Module
    head : Head
    last_too : bool
        Whether users may ask for hidden states, which are those of the last layer.

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
    if last_too:
        model.logits_processor.register_forward_pre_hook(_append_last_layer, with_kwargs=True)


def _append_last_layer(processor: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Let the last layer's hidden states stand behind those of the layers that a head reads."""
    names = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
    given = {**dict(zip(names, args)), **kwargs}
    kept = given.get("aux_hidden_states")
    if kept is not None:
        layers = [kept] if isinstance(kept, torch.Tensor) else list(kept)
        given["aux_hidden_states"] = torch.cat([*layers, given["hidden_states"]], dim=-1)
    return (), given


def keep_features(
    batch: ScheduleBatch, output: LogitsProcessorOutput, width: int, feature_size: int, *, last_only: bool
) -> TargetFeatures | None:
    """Take a forward's hidden states out of its result.

    They stay on the device. Unless the user asked for hidden states, SGLang must not find any: it would copy them to
    the host.

    Parameters
    ----------
    batch : ScheduleBatch
        As forwarded.
    output : LogitsProcessorOutput
        Keeps what its users are to get.
    width : int
        Tokens per request of a verify; 0 after a prefill.
    feature_size : int
        Numbers per token that the head reads. Where there are more, the last layer's follow.
    last_only : bool
        Whether SGLang expects those of each prompt's last token alone after a prefill.
    """
    rows, output.hidden_states = output.hidden_states, None
    if rows is None:
        return None
    if rows.is_cuda and (width or not last_only):
        # A CUDA graph writes into the same memory again at the other slot's launch. Prefills that hand out all hidden
        # states are run by one only where the server was started for users who may ask for all of them.
        rows = rows.clone()
    counts = None if width else list(batch.extend_lens)
    if batch.return_hidden_states:
        shown = rows[:, feature_size:] if rows.shape[1] > feature_size else rows
        if counts is not None and last_only:
            ends = torch.tensor(counts, dtype=torch.int64).cumsum(0) - 1
            shown = shown.index_select(0, to_device(ends, rows.device.type))
        output.hidden_states = shown
    rows = rows[:, :feature_size]
    if counts is None:
        firsts = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in batch.reqs]
        return TargetFeatures(rows, [i * width for i in range(len(firsts))], firsts, None)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return TargetFeatures(rows, starts, list(batch.prefix_lens), counts)
