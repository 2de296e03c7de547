"""Where the drafter goes."""

from __future__ import annotations

import pytest

from sglang_psd.errors import PSDConfigError
from sglang_psd.scheduler.devices import DrafterDevice, choose_device, visible_name


@pytest.mark.parametrize(
    ("wanted", "target", "gpus", "expected"),
    [
        (None, [0], 2, DrafterDevice(1, False)),
        (None, [0], 1, DrafterDevice(0, True)),
        (None, [0, 1], 4, DrafterDevice(2, False)),
        (None, [0, 1], 2, DrafterDevice(0, True)),
        (None, [2], 3, DrafterDevice(2, True)),
        ("cuda:0", [1], 2, DrafterDevice(0, False)),
        ("cuda:1", [0, 1], 2, DrafterDevice(1, True)),
        ("cuda", [1], 2, DrafterDevice(0, False)),
        ("cpu", [], 0, DrafterDevice(None, False)),
        (None, [], 0, DrafterDevice(None, False)),
    ],
)
def test_choice(wanted, target, gpus, expected) -> None:
    assert choose_device(wanted, target, gpus) == expected


def test_impossible_wishes() -> None:
    with pytest.raises(PSDConfigError, match=r"cuda:2 does not exist: this process sees 2 GPU"):
        choose_device("cuda:2", [0], 2)
    with pytest.raises(PSDConfigError, match="runs on the CPU"):
        choose_device("cuda:0", [], 0)
    with pytest.raises(PSDConfigError, match="a target on the CPU only"):
        choose_device("cpu", [0], 2)


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        (DrafterDevice(1, False), None, "1"),
        (DrafterDevice(1, False), "", "1"),
        (DrafterDevice(1, False), "4,5", "5"),
        (DrafterDevice(0, False), " GPU-aa , GPU-bb", "GPU-aa"),
        (DrafterDevice(None, False), "4,5", None),
    ],
)
def test_visible_name(device, visible, expected) -> None:
    """The drafter counts its one GPU as 0; the parent may see a selection itself."""
    assert visible_name(device, visible) == expected


def test_labels() -> None:
    assert DrafterDevice(3, False).label == "cuda:3" and DrafterDevice(None, False).label == "cpu"
