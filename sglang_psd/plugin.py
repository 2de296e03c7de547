"""Entry point ``sglang.srt.plugins``: registers the algorithm, the flags and the hooks.

The only composition root: everything else can be imported without effect.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Called once per process by SGLang's plugin loader, before arguments are parsed."""
    from sglang_psd.cpu import defaults

    if defaults.cpu_only():
        defaults.install()
    _register_algorithm()
    _register_hooks()
    _update_engine_class()


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_psd.algorithm import PSDAlgorithm, validate_server_args
    from sglang_psd.config import ALGORITHM

    @SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=validate_server_args, spec_class=PSDAlgorithm
    )
    def create_worker_class(server_args) -> type:
        from sglang_psd.target.worker import PSDWorker

        return PSDWorker


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_psd.hooks import HOOKS

    for hook in HOOKS:
        if hook.load is not None:
            HookRegistry.register(hook.target, hook.load(), HookType[hook.kind])


def _update_engine_class() -> None:
    """``Engine`` bound the original ServerArgs as a class attribute when it was imported.

    ``Engine.__init__`` loads plugins and reads that attribute right after, so it is set here. An ``Engine`` imported
    later finds the replaced class by itself.
    """
    engine_module = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine_module is not None:
        from sglang_psd.server_args import PSDServerArgs

        engine_module.Engine.server_args_class = PSDServerArgs
