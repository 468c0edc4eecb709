"""Read without importing torch by ComfyUI's cuda_malloc.py; so it stands alone."""
import os

__version__ = "2.99.0+cu130"
cuda = os.environ.get("FAKE_TORCH_CUDA", "13.0") or None
