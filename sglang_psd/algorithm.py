"""The PSD entry in SGLang's table of speculative algorithms: predicates and argument checks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_psd.architectures import refuse_unsupported_models
from sglang_psd.attention import refuse_unverified_attention
from sglang_psd.compat import check_draft_model
from sglang_psd.config import MAX_NUM_STEPS
from sglang_psd.draft_method import head_of
from sglang_psd.errors import PSDConfigError, UnsupportedFeatureError
from sglang_psd.scheduler.devices import choose_device

if TYPE_CHECKING:
    from sglang_psd.server_args import PSDServerArgs

logger = logging.getLogger(__name__)

DEFAULT_NUM_STEPS = 3
DEFAULT_MAX_RUNNING_REQUESTS = 48
# SGLang's own: its list of choices grows by those that programs register.
SAMPLING_BACKENDS = ("flashinfer", "pytorch", "ascend")
CPU_ATTENTION_BACKENDS = ("torch_native", "intel_amx")


class PSDAlgorithm(CustomSpecAlgo):
    """Answers to the questions SGLang asks of every algorithm.

    Only the answers that differ from the base class, or that it lacks, stand here
    (source: ``sglang/srt/speculative/spec_info.py``, ``SpeculativeAlgorithm``).
    """

    def has_draft_kv(self) -> bool:
        """No: the draft's KV lives in another process, the target pool needs no room for it."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """No: a standard draft model reads tokens only (asked by ``Scheduler.init_disaggregation``)."""
        return False

    def need_topk(self) -> bool:
        """No: there is no tree (asked by ``FutureMap``)."""
        return False

    def create_future_map(self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False):
        """Stock relay; PSD's loop has every result on the host in time and never reads it."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


def validate_server_args(args: PSDServerArgs) -> None:
    """Check and complete the arguments of a PSD server; safe to run again on the same object.

    Raises
    ------
    PSDConfigError, UnsupportedFeatureError, DraftMismatchError
        One sentence that names the flag and the remedy.
    """
    if args.speculative_draft_model_path is None:
        raise PSDConfigError(
            "--speculative-algorithm PSD needs a draft model; name it with --speculative-draft-model-path, "
            "or serve without one by --psd-mode off."
        )
    _refuse_unsupported(args)
    _refuse_ignored(args)
    refuse_unverified_attention(args)
    refuse_unsupported_models(args)
    _refuse_vanishing_target(args)
    _complete_chain_shape(args)
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        logger.warning(
            "PSD: at most %d requests run at once, both slots together; raise it with --max-running-requests.",
            DEFAULT_MAX_RUNNING_REQUESTS,
        )
    _check_drafter_flags(args)
    # PSD brings its own overlapped loop: SGLang's result relay would only lag behind it.
    args.disable_overlap_schedule = True
    check_draft_model(args)


def _refuse_unsupported(args: PSDServerArgs) -> None:
    refusals = (
        (args.pp_size > 1, "--pp-size above 1"),
        (args.dp_size > 1, "--dp-size above 1"),
        (args.enable_dp_attention, "--enable-dp-attention"),
        (bool(args.enable_lora or args.lora_paths), "--enable-lora / --lora-paths"),
        (args.disaggregation_mode != "null", "--disaggregation-mode"),
        (args.enable_mixed_chunk, "--enable-mixed-chunk"),
        (args.enable_two_batch_overlap, "--enable-two-batch-overlap"),
        (args.enable_pdmux, "--enable-pdmux"),
        (args.speculative_adaptive, "--speculative-adaptive"),
        (args.enable_hisparse, "--enable-hisparse"),
        (args.enable_prefill_delayer, "--enable-prefill-delayer"),
        (args.enable_mis, "--enable-mis"),
        # Both put another sampler in the place of SGLang's; tokens and log probabilities of a chunk are PSD's.
        (args.rl_on_policy_target is not None, "--rl-on-policy-target"),
        (
            args.sampling_backend not in (None, *SAMPLING_BACKENDS),
            f"--sampling-backend {args.sampling_backend}",
        ),
        (args.is_embedding, "--is-embedding"),
        # Its matcher cannot take a token back, and verifying a chain means trying drafts.
        (args.grammar_backend == "outlines", "--grammar-backend outlines"),
    )
    for used, flag in refusals:
        if used:
            raise UnsupportedFeatureError(
                f"PSD does not work with {flag} yet; remove that flag, or serve without drafts by --psd-mode off."
            )


def _refuse_ignored(args: PSDServerArgs) -> None:
    """Flags of SGLang's own drafters that would change nothing here; silence would let a user believe they do."""
    ignored = (
        (
            args.speculative_draft_attention_backend is not None,
            "--speculative-draft-attention-backend",
            "name the drafter's with --psd-drafter-attention-backend",
        ),
        (
            args.speculative_accept_threshold_single != 1.0,
            "--speculative-accept-threshold-single",
            "leave it out: every token is the target's",
        ),
        (
            args.speculative_accept_threshold_acc != 1.0,
            "--speculative-accept-threshold-acc",
            "leave it out: every token is the target's",
        ),
    )
    for used, flag, remedy in ignored:
        if used:
            raise UnsupportedFeatureError(f"{flag} has no effect on PSD; {remedy}.")


def _refuse_vanishing_target(args: PSDServerArgs) -> None:
    """A drafter that is started again with an EAGLE head takes the embedding from the target's checkpoint."""
    if args.delete_ckpt_after_loading and head_of(args) is not None:
        raise UnsupportedFeatureError(
            "PSD does not work with --delete-ckpt-after-loading and an EAGLE head: a drafter that is started again "
            "reads the target's checkpoint; remove that flag, or name a draft model."
        )


def _check_drafter_flags(args: Any) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    backend = args.psd_drafter_attention_backend
    if args.device == "cpu" and backend not in (None, *CPU_ATTENTION_BACKENDS):
        raise PSDConfigError(
            f"--psd-drafter-attention-backend must be one of {', '.join(CPU_ATTENTION_BACKENDS)} on a CPU, "
            f"got {backend!r}; leave the flag out."
        )
    if backend is not None and backend not in ATTENTION_BACKENDS:
        raise PSDConfigError(
            f"--psd-drafter-attention-backend must be one of {', '.join(sorted(ATTENTION_BACKENDS))}, got {backend!r}."
        )
    if args.device == "cpu":
        choose_device(args.psd_drafter_device, [], 0)
    else:
        import torch

        choose_device(args.psd_drafter_device, [args.base_gpu_id], torch.cuda.device_count())


def _complete_chain_shape(args: Any) -> None:
    steps = args.speculative_num_steps
    tokens = args.speculative_num_draft_tokens
    if steps is None:
        steps = DEFAULT_NUM_STEPS if tokens is None else tokens - 1
    if not 1 <= steps <= MAX_NUM_STEPS:
        raise PSDConfigError(f"--speculative-num-steps must lie between 1 and {MAX_NUM_STEPS}, got {steps}.")
    if tokens not in (None, steps + 1):
        raise PSDConfigError(
            f"--speculative-num-draft-tokens counts the drafts and the token they continue, so it must be "
            f"{steps + 1} with --speculative-num-steps {steps}, got {tokens}; leave it out."
        )
    if args.speculative_eagle_topk not in (None, 1):
        raise PSDConfigError(
            f"PSD drafts chains, so --speculative-eagle-topk must be 1, got {args.speculative_eagle_topk}."
        )
    args.speculative_num_steps = steps
    args.speculative_num_draft_tokens = steps + 1
    args.speculative_eagle_topk = 1
