"""Which device the drafter gets: pure arithmetic over counts and names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_psd.errors import PSDConfigError

OWN_GPU_FRACTION = 0.8
SHARED_GPU_FRACTION = 0.1


@dataclass(frozen=True)
class DrafterDevice:
    """Where the drafter runs.

    Attributes
    ----------
    index : int or None
        GPU, counted as the server process counts; None for the CPU.
    shared : bool
        Whether the target uses it as well.
    """

    index: int | None
    shared: bool

    @property
    def label(self) -> str:
        """Name for messages: ``cuda:1`` or ``cpu``."""
        return "cpu" if self.index is None else f"cuda:{self.index}"


def choose_device(wanted: str | None, target_gpus: Sequence[int], num_gpus: int) -> DrafterDevice:
    """Resolve ``--psd-drafter-device``.

    Parameters
    ----------
    wanted : str or None
        The flag; None picks the first GPU after the target's, or the target's first.
    target_gpus : sequence of int
        GPUs of the target; empty when it runs on the CPU.
    num_gpus : int
        GPUs this process can see.

    Raises
    ------
    PSDConfigError
        The wanted GPU does not exist.
    """
    if not target_gpus:
        if wanted not in (None, "cpu"):
            raise PSDConfigError(
                f"--psd-drafter-device {wanted} needs a GPU, and the server runs on the CPU; leave the flag out."
            )
        return DrafterDevice(None, shared=False)
    if wanted == "cpu":
        raise PSDConfigError(
            "--psd-drafter-device cpu works with a target on the CPU only; name a GPU, or leave the flag out."
        )
    if wanted is None:
        free = list(range(max(target_gpus) + 1, num_gpus))
        return DrafterDevice(free[0], False) if free else DrafterDevice(target_gpus[0], True)
    index = int(wanted.partition(":")[2] or 0)
    if index >= num_gpus:
        raise PSDConfigError(
            f"--psd-drafter-device {wanted} does not exist: this process sees {num_gpus} GPU(s), "
            f"cuda:0 to cuda:{num_gpus - 1}."
        )
    return DrafterDevice(index, shared=index in target_gpus)


def visible_name(device: DrafterDevice, visible: str | None) -> str | None:
    """Value of ``CUDA_VISIBLE_DEVICES`` that shows the drafter its device alone.

    ``visible`` is the parent's value; None there means that all GPUs are visible in order.
    """
    if device.index is None:
        return None
    if not visible:
        return str(device.index)
    return [name.strip() for name in visible.split(",")][device.index]
