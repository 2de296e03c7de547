"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.rig.oracle import Oracle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a rig test."""
    for item in items:
        if "tests/rig/" in item.path.as_posix():
            item.add_marker(pytest.mark.rig)


@pytest.fixture(scope="session")
def oracle(run_case: Callable[..., Any], models: Path) -> Oracle:
    """What plain SGLang answers."""
    from tests.rig.oracle import Oracle

    return Oracle(run_case, models)
