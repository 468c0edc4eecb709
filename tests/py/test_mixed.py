"""Tensors between a parent and a worker that do not have the same libraries."""
from __future__ import annotations

import pathlib

import pytest

import comfy_zerocopy as zcx

WORKER = """
import sys
sys.modules["torch"] = None   # as in an environment without it

from comfy_zerocopy.worker import expose

@expose
def parts(x):
    whole = x + 1
    return whole[::2], whole[1:, ::3], whole.T[::2], x[:, 5]
"""


def test_strided_arrays_of_a_worker_without_torch_are_tensors(tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    (tmp_path / "arrays.py").write_text(WORKER)
    x = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    with zcx.Worker(tmp_path / "arrays.py", timeout=60) as w:
        got = w.call("parts", x)
    whole = x + 1
    for part, wanted in zip(got, (whole[::2], whole[1:, ::3], whole.T[::2], x[:, 5]), strict=True):
        assert type(part) is torch.Tensor and torch.equal(part, wanted)
