"""The Triton kernels, compiled, against their readable twins."""

from __future__ import annotations

import pytest
import torch

from tests import kernel_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]


def test_kernels_agree_with_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "VOCABULARIES", (*kernel_cases.VOCABULARIES, 151936))
    report = kernel_cases.run("cuda")
    assert report["law_cases"] > 20 and report["noise_cases"] > 5
    assert report["failures"] == []
