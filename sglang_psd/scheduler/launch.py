"""From the server's arguments to a drafter process."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_psd import early
from sglang_psd.attention import with_kernels_for
from sglang_psd.config import PSDConfig
from sglang_psd.draft_method import head_of, read_config
from sglang_psd.drafter.process import DrafterProcess
from sglang_psd.drafter.spec import DrafterSpec, HeadSpec
from sglang_psd.drafter.standby import StandbyProcess
from sglang_psd.scheduler.devices import (
    OWN_GPU_FRACTION,
    SHARED_GPU_FRACTION,
    DrafterDevice,
    choose_device,
    visible_name,
)

if TYPE_CHECKING:
    from sglang_psd.server_args import PSDServerArgs

logger = logging.getLogger(__name__)

LATE = "PSD: the drafter begins its imports only now"  # not with the scheduler's: see early.py


def target_gpus(args: PSDServerArgs, first: int) -> list[int]:
    """GPUs of this node that the target takes, beginning with ``first`` (SGLang's ``_calculate_rank_ranges``)."""
    return [first + rank * args.gpu_id_step for rank in range(args.tp_size // args.nnodes)]


def visible_drafter_device(args: PSDServerArgs, config: PSDConfig, gpu_id: int) -> DrafterDevice:
    """Choose the drafter's device and warn where it is the target's own."""
    if args.device == "cpu":
        return choose_device(config.drafter_device, [], 0)
    import torch

    device = choose_device(config.drafter_device, target_gpus(args, gpu_id), torch.cuda.device_count())
    if device.shared:
        logger.warning(
            "PSD: the drafter shares %s with the target, so the two take turns instead of working side by side; "
            "give it a GPU of its own with --psd-drafter-device%s.",
            device.label,
            " or, since two batches cannot pay then, choose --psd-mode sequential" if config.mode == "parallel" else "",
        )
    return device


def drafter_spec(args: Any, config: PSDConfig, device: DrafterDevice, vocab_limit: int) -> DrafterSpec:
    """Everything the drafter is told at start."""
    on_cpu = device.index is None
    head = head_spec(args)
    # A head computes with the target's numbers: its checkpoint's own dtype may be too narrow for them.
    own_dtype = "auto" if head is None else target_dtype(args)
    dtype = config.drafter_dtype or ("float32" if on_cpu else own_dtype)
    target_backend = "torch_native" if on_cpu else with_kernels_for(dtype, args.attention_backend)
    default_fraction = SHARED_GPU_FRACTION if device.shared else OWN_GPU_FRACTION
    return DrafterSpec(
        endpoint="",  # filled in by DrafterProcess
        parent_pid=os.getpid(),
        model_path=str(args.speculative_draft_model_path),
        revision=args.speculative_draft_model_revision,
        load_format=args.speculative_draft_load_format or args.load_format,
        quantization=args.speculative_draft_model_quantization,
        trust_remote_code=args.trust_remote_code,
        device="cpu" if on_cpu else "cuda",
        device_label=device.label,
        dtype=dtype,
        attention_backend=config.drafter_attention_backend or target_backend,
        mem_fraction=config.drafter_mem_fraction or default_fraction,
        max_requests=args.max_running_requests,
        vocab_limit=vocab_limit,
        num_steps=args.speculative_num_steps,
        top_m=config.proposal_top_m,
        random_seed=args.random_seed,
        kv_tokens=draft_kv_tokens(args),
        cuda_graphs=not on_cpu and not decode_graphs_disabled(args),
        deterministic=args.enable_deterministic_inference,
        shares_device=device.shared,
        integrity_checks=config.integrity_checks,
        log_level=args.log_level,
        head=head,
    )


def head_spec(args: Any) -> HeadSpec | None:
    """What the drafter is told about an EAGLE head; None when it drafts with a model."""
    from sglang_psd.compat import context_of

    head = head_of(args)
    if head is None:
        return None
    # Room for the largest prefill and for a verify of every request, twice.
    chunk = args.chunked_prefill_size or 0
    prefill = chunk if chunk > 0 else args.max_prefill_tokens
    return HeadSpec(
        feature_size=head.feature_size,
        mailbox_rows=2 * (prefill + args.max_running_requests * (args.speculative_num_steps + 1)),
        context_len=context_of(args),
        target_path=str(args.model_path),
        target_revision=args.revision,
        target_load_format=args.load_format,
        token_map=args.speculative_token_map,
    )


def target_dtype(args: Any) -> str:
    """What the target computes with, as ``--dtype`` names it."""
    if args.dtype != "auto":
        return args.dtype
    config = read_config(str(args.model_path), args.trust_remote_code, args.revision)
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return stored if stored in ("bfloat16", "float16") else "auto"


def draft_kv_tokens(args: Any) -> int | None:
    """Bound of the drafter's pool: what the target may hold, and the drafts beyond it.

    None without ``--max-total-tokens``: the target's own size is not known yet when the drafter starts.
    """
    if args.max_total_tokens is None:
        return None
    return args.max_total_tokens + args.max_running_requests * (args.speculative_num_steps + 1)


def decode_graphs_disabled(args: PSDServerArgs) -> bool:
    """Whether the user switched CUDA graphs off for decoding."""
    config = args.cuda_graph_config
    backend = getattr(getattr(config, "decode", None), "backend", None)
    return bool(args.disable_cuda_graph) or getattr(backend, "value", backend) == "disabled"


class DrafterLauncher:
    """Starts the drafter, its successors and their standby, all alike: what they are told and the environment they get
    are those of the moment when the first one is started.

    Parameters
    ----------
    args : PSDServerArgs
    config : PSDConfig
    device : DrafterDevice
    """

    def __init__(self, args: PSDServerArgs, config: PSDConfig, device: DrafterDevice):
        from sglang_psd.compat import vocab_limit

        self._config = config
        self._device = device
        self._vocab_limit = vocab_limit(args)
        self.draft_with(args)
        self.environment = drafter_environment(device, os.environ)

    def draft_with(self, args: PSDServerArgs) -> None:
        """Start drafters with the draft model that ``args`` name, from now on."""
        self.spec = drafter_spec(args, self._config, self._device, self._vocab_limit)

    def launch_first(self) -> DrafterProcess:
        """Start the first drafter, in the process whose imports began with this one's if it was started for it."""
        begun = early.take()
        if begun is None:
            logger.warning("%s; this process could not begin them earlier: %s.", LATE, early.why_none())
            return self.launch()
        if others := self._differences(begun):
            logger.warning("%s; what began with this process is another drafter (%s).", LATE, ", ".join(others))
            begun.standby.end()
            return self.launch()
        logger.info("PSD: the drafter began its imports with this process.")
        return self.launch(begun.standby)

    def _differences(self, begun: early.EarlyStart) -> list[str]:
        """In what the drafter that was started early is not the one to start."""
        expected = msgspec.structs.asdict(msgspec.structs.replace(self.spec, import_niceness=0))
        names = [name for name, value in msgspec.structs.asdict(begun.spec).items() if value != expected[name]]
        visible = visible_name(self._device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return names if begun.visible_device == visible else [*names, "CUDA_VISIBLE_DEVICES"]

    def launch(self, standby: StandbyProcess | None = None) -> DrafterProcess:
        """Start a drafter, or let ``standby`` become one; returns at once, ``join`` waits for it."""
        return DrafterProcess(self.spec, self.environment, standby)

    def launch_standby(self) -> StandbyProcess:
        """Start a process that can become a drafter; returns at once."""
        return StandbyProcess(self.spec, self.environment)


def offer_early_start(args: PSDServerArgs) -> None:
    """Let the scheduler that is about to be spawned begin its drafter's imports together with its own."""
    import torch

    from sglang_psd.compat import vocab_limit

    config = args.psd()
    gpus = [] if args.device == "cpu" else target_gpus(args, args.base_gpu_id)
    device = choose_device(config.drafter_device, gpus, torch.cuda.device_count() if gpus else 0)
    spec = drafter_spec(args, config, device, vocab_limit(args))
    early.offer(spec, visible_name(device, os.environ.get("CUDA_VISIBLE_DEVICES")))


def drafter_environment(device: DrafterDevice, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a drafter process: its server's, with the drafter's device as the only visible one."""
    visible = visible_name(device, environment.get("CUDA_VISIBLE_DEVICES"))
    return {**environment, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
