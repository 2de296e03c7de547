"""Programs that make SGLang's ``ServerArgs`` before plugins are loaded know PSD as well.

``launch_server``, ``sglang serve`` and ``Engine`` load plugins first. ``sgl.Runtime``, SGLang's offline benchmarks and
a program of one's own with ``from sglang.srt.server_args import ServerArgs`` have the original class in hand by then,
to which the algorithm is unknown and a ``psd_*`` keyword unexpected. Imported with ``sglang.srt.server_args``: nothing
heavy may be imported here.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sglang_psd.config import ALGORITHM

_PREFIX = "psd_"


def patch(module: ModuleType) -> None:
    """Let the original class load plugins where it is asked for PSD, or for all flags there are.

    Parameters
    ----------
    module : module
        ``sglang.srt.server_args``, right after it was imported; its ``ServerArgs`` is the original.
    """
    plain = module.ServerArgs
    add_cli_args, from_cli_args = plain.add_cli_args, plain.from_cli_args.__func__

    def add_all_cli_args(parser: Any) -> None:
        _load_plugins()
        add_cli_args(parser)  # adds the flags of ``module.ServerArgs``

    def from_all_cli_args(cls: type, args: Any) -> Any:
        return from_cli_args(cls, args) if cls is not plain else module.ServerArgs.from_cli_args(args)

    def new(cls: type, *args: Any, **keywords: Any) -> Any:
        if cls is plain and _asks_for_psd(keywords):
            _load_plugins()
            cls = module.ServerArgs
        return object.__new__(cls)

    add_all_cli_args.__wrapped__ = add_cli_args  # type: ignore[attr-defined]
    plain.add_cli_args = staticmethod(add_all_cli_args)
    plain.from_cli_args = classmethod(from_all_cli_args)
    plain.__new__ = new


def _asks_for_psd(keywords: dict[str, Any]) -> bool:
    algorithm = keywords.get("speculative_algorithm")
    asked = isinstance(algorithm, str) and algorithm.upper() == ALGORITHM
    return asked or any(name.startswith(_PREFIX) for name in keywords)


def _load_plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
