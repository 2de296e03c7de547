"""Breaks the real drafter from inside, in its own process, at a moment of the test's choice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def _at_call(number: int, method: str, action: Callable[[Any], None]) -> None:
    """Do ``action`` (given the engine or model) right before the ``number``-th call of ``Class.method``."""
    from sglang_psd.drafter import engine, model

    owner = {"DraftModel": model.DraftModel, "DraftEngine": engine.DraftEngine}[method.split(".")[0]]
    name = method.split(".")[1]
    original, calls = getattr(owner, name), 0

    def wrapped(self, *args: Any, **kwargs: Any):
        nonlocal calls
        calls += 1
        if calls == number:
            action(self)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def die(_: Any) -> None:
    """As a segmentation fault would: no last words."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(_: Any) -> None:
    """A real failed allocation."""
    import torch

    torch.empty(1 << 52, dtype=torch.uint8)


def die_in_prefill() -> None:
    """Crash while the second prompt batch is read."""
    _at_call(2, "DraftModel.extend", die)


def die_in_round() -> None:
    """Crash in the middle of a chain."""
    _at_call(8, "DraftModel._decode", die)


def no_memory_in_round() -> None:
    """Out of memory in the middle of a chain."""
    _at_call(8, "DraftModel._decode", run_out_of_memory)


def no_memory_at_start() -> None:
    """Out of memory while the model is loaded."""
    from sglang_psd.drafter import model

    original = model.load_worker

    def load(spec: Any) -> Any:
        run_out_of_memory(None)
        return original(spec)

    model.load_worker = load


def hide_mailbox() -> None:
    """It says that it is ready, and its mailbox is not where it says."""
    import msgspec

    from sglang_psd.channel import mailbox

    original = mailbox.Mailbox.handle

    def handle(self):
        found = original(self)
        return msgspec.structs.replace(found, path=found.path + "-gone")

    mailbox.Mailbox.handle = handle


def die_at_start() -> None:
    """Crash while loading."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang_in_round() -> None:
    """The main thread waits for what never comes; the pulse goes on."""
    import threading

    _at_call(8, "DraftModel._decode", lambda _: threading.Event().wait())


def leak_kv() -> None:
    """A slot gets lost."""
    _at_call(8, "DraftModel._decode", lambda model: model._allocator.alloc(1))


def scramble_requests() -> None:
    """Its picture of every open request becomes wrong, once: only handing them over again mends it."""

    def scramble(engine: Any) -> None:
        engine._tell()
        for state in engine._states.values():
            state.tokens[:] = [10 + (31 * i) % 200 for i in range(len(state.tokens))]
            state.fed.clear()

    _at_call(40, "DraftEngine.draft_known", scramble)  # which every round tries first


def spoil_weights() -> None:
    """From some round on every draft is nonsense, whatever it is told."""
    from sglang_psd.drafter import model

    original, calls = model.DraftModel._decode, 0

    def decode(self, *args: Any):
        nonlocal calls
        calls += 1
        logits = original(self, *args)
        return logits if calls < 120 else logits.roll(97, dims=-1)

    model.DraftModel._decode = decode
