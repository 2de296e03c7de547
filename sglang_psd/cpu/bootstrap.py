"""Import hook: SGLang without a GPU driver, and what no plugin can reach in time or at no cost.

``sgl_kernel`` loads a CUDA library on import and raises without a driver, although its Python
files are all that the CPU path needs. SGLang's child processes import it while they unpickle
their target function, before any plugin runs, so the remedy has to be in place when Python
starts: a ``.pth`` file imports this module. It must stay cheap and free of imports beyond
``sys``: nothing happens until somebody imports one of seven modules, and kernel library and grammar
backend are left alone where ``libcuda`` can be loaded.

``sglang serve --help`` prints its flags before it loads plugins; the second hook loads them first. The chat endpoint is
mended when it is imported, which schedulers and drafters never do: a plugin's hook would import it there. The HTTP
processes of ``--tokenizer-worker-num`` load no plugins and would not know the algorithm: another hook loads them. One
more does where a program makes ``ServerArgs`` before that (``sgl.Runtime``, SGLang's offline benchmarks).

A scheduler that is about to import SGLang starts its drafter's imports first, see ``sglang_psd/early.py``.
"""

import os
import sys

_KERNEL_LOADER = "sgl_kernel.load_utils"
_SERVE = "sglang.cli.serve"
_GRAMMAR = "sglang.srt.constrained.xgrammar_backend"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat"
_HTTP = "sglang.srt.entrypoints.http_server"
_ARGUMENTS = "sglang.srt.server_args"


def gpu_driver_present() -> bool:
    """Whether a CUDA driver library can be loaded in this process."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _ImportHook:
    """Meta path finder: watches seven module names, changes nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name == _SERVE:
            return _with_patch(name, path, target, _load_plugins_before_help)
        if name == _CHAT:
            return _with_patch(name, path, target, _tell_tokens_of_a_chunk_apart)
        if name == _HTTP:
            return _with_patch(name, path, target, _load_plugins_in_workers)
        if name == _ARGUMENTS:
            return _with_patch(name, path, target, _load_plugins_for_arguments)
        if name not in ("sglang", _KERNEL_LOADER, _GRAMMAR) or gpu_driver_present():
            return None
        if name == _GRAMMAR:
            return _with_patch(name, path, target, _mask_on_cpu)
        if name == _KERNEL_LOADER:
            return _with_patch(name, path, target, _skip_kernel_libraries)
        # sglang.srt.utils.is_cpu() reads this once, at import.
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        return None


class _PatchingLoader:
    """Runs a module as usual, then hands it to ``patch``."""

    def __init__(self, inner, patch):
        self._inner = inner
        self._patch = patch

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        self._patch(module)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def _with_patch(name, path, target, patch):
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(name, path, target)
    if spec is not None and spec.loader is not None:
        spec.loader = _PatchingLoader(spec.loader, patch)  # type: ignore[assignment]
    return spec


def _skip_kernel_libraries(module) -> None:
    module._load_architecture_specific_ops = lambda: None
    module._preload_cuda_library = lambda: None


def _mask_on_cpu(module) -> None:
    from sglang_psd.cpu.grammar import patch

    patch(module)


def _load_plugins_before_help(module) -> None:
    serve = module.serve

    def serve_with_plugins(args, extra_argv):
        if any(flag in extra_argv for flag in ("-h", "--help")):
            from sglang.srt.plugins import load_plugins

            load_plugins()
        return serve(args, extra_argv)

    serve_with_plugins.__wrapped__ = serve  # type: ignore[attr-defined]
    module.serve = serve_with_plugins


def _load_plugins_for_arguments(module) -> None:
    from sglang_psd.plain_args import patch

    patch(module)


def _load_plugins_in_workers(module) -> None:
    init_worker = module.init_multi_tokenizer

    async def init_with_plugins():
        from sglang.srt.plugins import load_plugins

        load_plugins()
        return await init_worker()

    init_with_plugins.__wrapped__ = init_worker  # type: ignore[attr-defined]
    module.init_multi_tokenizer = init_with_plugins


def _tell_tokens_of_a_chunk_apart(module) -> None:
    from sglang_psd.hooks import own_alternatives

    serving = module.OpenAIServingChat
    original = serving._process_logprobs_tokens

    def process(self, logprobs, use_token_index=False):
        return own_alternatives(original, self, logprobs, use_token_index)

    process.__wrapped__ = original  # type: ignore[attr-defined]
    serving._process_logprobs_tokens = process


def install() -> None:
    """Put the hook first on ``sys.meta_path``; a second call does nothing."""
    if not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook())


install()
if "SGLANG_PSD_EARLY_START" in os.environ:
    from sglang_psd.early import accept

    accept()
