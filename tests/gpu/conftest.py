"""Tests that need a real card: skipped, with the reason, where there is none. ComfyUI's own setting is made before torch."""
import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")

import pytest  # noqa: E402

import comfy_zerocopy as zcx  # noqa: E402

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.fixture(scope="session", autouse=True)
def swapped():
    status = zcx.install("swap")
    assert status.state == "on", str(status)
    return status


@pytest.fixture(scope="module")
def worker():
    with zcx.Worker(os.path.join(os.path.dirname(__file__), "worker_torch.py"), name="torch") as w:
        yield w


@pytest.fixture(scope="module")
def bare():
    with zcx.Worker(os.path.join(os.path.dirname(__file__), "worker_bare.py"), name="bare") as w:
        yield w
