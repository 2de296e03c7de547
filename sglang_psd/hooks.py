"""Every place where this package changes SGLang beyond its public plugin API.

Each hook has a file in ``patches/`` that says why it exists and what upstream change would make it needless;
``sglang-psd check`` holds both against the installed SGLang. Hooks leave servers of other algorithms alone.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_psd.config import ALGORITHM, uses_psd
from sglang_psd.errors import PatchError

_SRT = "sglang.srt."
# Position of ``spec_info`` in FlashInferIndicesUpdaterPrefill.call_begin_forward, without self.
SPEC_INFO_ARGUMENT = 11
# A split size no sequence reaches, in tokens.
UNSPLIT = 1 << 20


@dataclass(frozen=True)
class Hook:
    """One entry of the ledger.

    Attributes
    ----------
    name : str
        File name in ``patches/``, without ``.md``.
    target : str
        Dotted path in SGLang.
    kind : {"AROUND", "AFTER", "REPLACE", "IMPORT"}
        As SGLang's ``HookType``; ``IMPORT`` hooks are set by ``cpu/bootstrap.py`` when the module is imported, or by
        ``cpu/defaults.py`` when the plugin is loaded without a GPU.
    load : callable or None
        Returns the function or class to put there; called when the plugin is loaded. None for ``IMPORT``.
    """

    name: str
    target: str
    kind: str
    load: Callable[[], Any] | None


def is_psd(algorithm: Any) -> bool:
    """Whether SGLang's algorithm object is ours."""
    return getattr(algorithm, "name", None) == ALGORITHM


def no_draft_kv_pool(original, *, draft_worker, spec_algorithm, server_args):
    """The draft's KV pool lives in another process."""
    if is_psd(spec_algorithm):
        return None
    return original(draft_worker=draft_worker, spec_algorithm=spec_algorithm, server_args=server_args)


def capture_verify_input(original, runner, num_tokens: int):
    """What the CUDA graph runner captures a verify with: a chain, no mask."""
    if not is_psd(runner.model_runner.spec_algorithm):
        return original(runner, num_tokens)
    from sglang_psd.draft_method import head_of
    from sglang_psd.target.verify_input import chain_verify_input

    hidden = head_of(runner.model_runner.server_args) is not None
    return chain_verify_input(runner.captured_req_width, None, hidden)


def warm_up_verify_input(original, spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker):
    """The same for the runner's warm-up forward."""
    if not is_psd(spec_algorithm):
        return original(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)
    from sglang_psd.draft_method import head_of
    from sglang_psd.target.verify_input import chain_verify_input

    return chain_verify_input(num_tokens_per_req, None, head_of(server_args) is not None)


def batch_invariant_verify(original, updater, *args, **kwargs):
    """Under deterministic inference, plan a verify without splitting KV, as a decode is planned.

    FlashInfer would split long KV differently for each batch size, and the logits of a chunk would differ from
    those of single tokens in their last bits.
    """
    if updater.attn_backend.enable_deterministic and kwargs.get("fixed_split_size") is None:
        from sglang_psd.target.verify_input import ChainVerifyInput

        spec_info = args[SPEC_INFO_ARGUMENT] if len(args) > SPEC_INFO_ARGUMENT else kwargs.get("spec_info")
        if isinstance(spec_info, ChainVerifyInput):
            kwargs["fixed_split_size"] = UNSPLIT
    return original(updater, *args, **kwargs)


def exact_decode_reserve(original, server_args=None):
    """One chunk per round: lengths are exact when a slot is planned, so SGLang's double buffer is not needed."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode
    from sglang.srt.runtime_context import get_server_args

    args = server_args if server_args is not None else get_server_args()
    if not uses_psd(args):
        return original(server_args)
    return get_alloc_len_per_decode(args)


def count_other_slots(result, adder, *args, **kwargs):
    """Admission counts the future tokens of requests in other slots."""
    from sglang_psd.scheduler.room import count_elsewhere

    count_elsewhere(adder)


def keep_committed_tokens(original, sessions, req, *args, **kwargs):
    """A streaming session keeps KV of committed tokens alone, of a request that ends or is retracted."""
    from sglang.srt.runtime_context import get_server_args

    if uses_psd(get_server_args()):
        from sglang_psd.target.sessions import release_draft_room

        release_draft_room(sessions, req)
    return original(sessions, req, *args, **kwargs)


def lend_guidance_masks(result, backend, *args, **kwargs):
    """Reasoning before a grammar asks the backend for its mask functions; llguidance has them on its grammars only."""
    from sglang.srt.constrained.llguidance_backend import GuidanceGrammar

    if not hasattr(backend, "allocate_vocab_mask"):
        # A method there, of grammars that know the same tokenizer.
        backend.allocate_vocab_mask = functools.partial(GuidanceGrammar.allocate_vocab_mask, backend)
        backend.move_vocab_mask = GuidanceGrammar.move_vocab_mask
        backend.apply_vocab_mask = GuidanceGrammar.apply_vocab_mask


def own_alternatives(original, serving, logprobs, use_token_index):
    """Each token of a streamed chat chunk has its own ``top_logprobs``; SGLang counts on one token a chunk."""
    return original(serving, logprobs, use_token_index or uses_psd(serving.tokenizer_manager.server_args))


def due_across_intervals(original, streamer, *, req):
    """A stream is due where a round has reached or passed the next multiple of its interval.

    SGLang asks for a length right behind a multiple, which a round of many tokens passes over.
    """
    params = req.sampling_params
    interval = params.stream_interval or streamer.default_stream_interval
    if not is_psd(streamer.spec_algorithm) or not req.stream or req.finished():
        return original(streamer, req=req)
    # A floor of -1: nothing was sent yet.
    if (len(req.output_ids) - 1) // interval == (req.send_token_offset - 1) // interval:
        return None
    asked, params.stream_interval = params.stream_interval, 1
    try:
        return original(streamer, req=req)
    finally:
        params.stream_interval = asked


def look_behind_one_token(original, req, new_accepted_len: int = 1):
    """Stop strings are looked for as far back as the plain server looks, which has one new token at a time.

    Each earlier token of the chunk had its own look (``scheduler/stops.py``). SGLang's window grows with the chunk, so
    that whether a string is found would depend on how many drafts were accepted.
    """
    from sglang.srt.runtime_context import get_server_args

    if new_accepted_len > 1 and uses_psd(get_server_args()):
        new_accepted_len = 1
    return original(req, new_accepted_len)


def run_psd_loop(original, scheduler):
    """Run the two-slot loop where the scheduler serves PSD."""
    if getattr(scheduler, "psd", None) is None:
        return original(scheduler)
    return scheduler.event_loop_psd()


def _constant(value: Callable) -> Callable[[], Callable]:
    return lambda: value


def _server_args_class() -> type:
    from sglang_psd.server_args import PSDServerArgs

    return PSDServerArgs


def _scheduler_class() -> type:
    from sglang_psd.scheduler.psd_scheduler import PSDScheduler

    return PSDScheduler


HOOKS: tuple[Hook, ...] = (
    Hook("server_args", _SRT + "server_args.ServerArgs", "REPLACE", _server_args_class),
    Hook("scheduler", _SRT + "managers.scheduler.Scheduler", "REPLACE", _scheduler_class),
    Hook("event_loop", _SRT + "managers.scheduler.dispatch_event_loop", "AROUND", _constant(run_psd_loop)),
    Hook("draft_kv_pool", _SRT + "mem_cache.kv_cache_builder.get_draft_kv_pool", "AROUND", _constant(no_draft_kv_pool)),
    Hook(
        "verify_graph",
        _SRT + "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        "AROUND",
        _constant(capture_verify_input),
    ),
    Hook(
        "verify_warmup",
        _SRT + "speculative.spec_info.create_dummy_verify_input",
        "AROUND",
        _constant(warm_up_verify_input),
    ),
    Hook(
        "verify_split",
        _SRT + "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",
        "AROUND",
        _constant(batch_invariant_verify),
    ),
    Hook(
        "decode_reserve",
        _SRT + "mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
        "AROUND",
        _constant(exact_decode_reserve),
    ),
    Hook("admission", _SRT + "managers.schedule_policy.PrefillAdder.__init__", "AFTER", _constant(count_other_slots)),
    Hook(
        "session_tail",
        _SRT + "session.streaming_session.StreamingSession.try_cache_finished_req",
        "AROUND",
        _constant(keep_committed_tokens),
    ),
    Hook(
        "guidance_masks",
        _SRT + "constrained.llguidance_backend.GuidanceBackend.__init__",
        "AFTER",
        _constant(lend_guidance_masks),
    ),
    Hook(
        "chat_logprobs",
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._process_logprobs_tokens",
        "IMPORT",
        None,
    ),
    Hook(
        "stream_interval",
        _SRT + "managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
        "AROUND",
        _constant(due_across_intervals),
    ),
    Hook(
        "stop_window",
        _SRT + "managers.schedule_batch.Req._check_str_based_finish",
        "AROUND",
        _constant(look_behind_one_token),
    ),
    Hook("http_workers", _SRT + "entrypoints.http_server.init_multi_tokenizer", "IMPORT", None),
    Hook("plain_args", _SRT + "server_args.ServerArgs.add_cli_args", "IMPORT", None),
    Hook("serve_help", "sglang.cli.serve.serve", "IMPORT", None),
    Hook("kernel_loader", "sgl_kernel.load_utils._load_architecture_specific_ops", "IMPORT", None),
    Hook("cpu_grammar", _SRT + "constrained.xgrammar_backend._allocate_token_bitmask", "IMPORT", None),
    Hook("cpu_pages", _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend", "IMPORT", None),
    Hook("cpu_attention", _SRT + "layers.attention.attention_registry.create_torch_native_backend", "IMPORT", None),
)


def resolve(target: str) -> Any:
    """What stands at ``pkg.mod.Class.attr`` now; module names are lower case in SGLang.

    Raises
    ------
    ImportError, AttributeError
        There is no such module or attribute.
    """
    parts = target.split(".")
    split = next((i for i, part in enumerate(parts) if part.lstrip("_")[:1].isupper()), len(parts) - 1)
    return pkgutil.resolve_name(".".join(parts[:split]) + ":" + ".".join(parts[split:]))


def verify_applied() -> None:
    """Fail when SGLang's registry could not apply a hook: it only logs that.

    Raises
    ------
    PatchError
        Names the first hook that is not in place.
    """
    for hook in HOOKS:
        if hook.load is None:
            continue
        found, ours = resolve(hook.target), hook.load()
        if found is not ours and not hasattr(found, "__wrapped__"):
            raise PatchError(
                f"The hook {hook.name!r} on {hook.target} is not in place; run 'sglang-psd check' to see which SGLang "
                "this version of sglang-psd fits."
            )
