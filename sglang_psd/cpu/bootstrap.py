"""Import hook that lets SGLang be imported where no GPU driver exists.

``sgl_kernel`` loads a CUDA library on import and raises without a driver, although its Python
files are all that the CPU path needs. SGLang's child processes import it while they unpickle
their target function, before any plugin runs, so the remedy has to be in place when Python
starts: a ``.pth`` file imports this module. It must stay cheap and free of imports beyond
``sys``: nothing happens until somebody imports ``sglang`` or ``sgl_kernel``, and nothing
happens at all where ``libcuda`` can be loaded.
"""

import sys

_KERNEL_LOADER = "sgl_kernel.load_utils"


def gpu_driver_present() -> bool:
    """Whether a CUDA driver library can be loaded in this process."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _CpuImportHook:
    """Meta path finder: watches two module names, changes nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("sglang", _KERNEL_LOADER) or gpu_driver_present():
            return None
        if name == "sglang":
            import os

            # sglang.srt.utils.is_cpu() reads this once, at import.
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _KernelFreeLoader(spec.loader)
        return spec


class _KernelFreeLoader:
    """Runs ``sgl_kernel.load_utils``, then turns its two library loaders into no-ops."""

    def __init__(self, inner):
        self._inner = inner

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        module._load_architecture_specific_ops = lambda: None
        module._preload_cuda_library = lambda: None


def install() -> None:
    """Put the hook first on ``sys.meta_path``; a second call does nothing."""
    if not any(isinstance(finder, _CpuImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CpuImportHook())  # type: ignore[arg-type]


install()
