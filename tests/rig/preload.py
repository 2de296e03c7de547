"""Loads SGLang and this package into a process that is going to fork: half a minute once, not once per case."""

from __future__ import annotations

import importlib

# What building a scheduler and a drafter imports late: seconds per case, unless the test process has it already.
PRELOADED = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.model_loader.loader",
    "sglang_psd.drafter.engine",
    "sglang_psd.drafter.serve",
    "sglang_psd.scheduler.psd_scheduler",
    "sglang_psd.target.worker",
)


def preload() -> None:
    """Import what a scheduler needs and let SGLang load its plugins."""
    import gc

    gc.disable()  # nothing that is imported goes away
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    # SGLang compiles its penalty kernels; a fork would call the C++ compiler for half a minute to run them twice.
    torch._dynamo.config.disable = True
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in PRELOADED:
        importlib.import_module(module)
    # Imported objects live for ever: a collection in a fork need not walk (and copy) them.
    gc.enable()
    gc.collect()
    gc.freeze()
