"""Shared by all tests: one thread per process, quiet libraries, and the tiny models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported anywhere: the rig forks, and a forked thread pool never wakes up. One thread is also the
# fastest setting for models of this size.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the models of ``tests/models.py``."""
    from tests.models import build_models

    return build_models(tmp_path_factory.mktemp("models"))
