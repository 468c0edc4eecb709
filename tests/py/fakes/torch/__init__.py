"""What the package asks of torch, and nothing else: how it was built and what it allocates with. For tests of the hook."""
import os

from . import version

if os.environ.pop("FAKE_TORCH_BREAKS_ONCE", None):
    raise ImportError("torch breaks half way")

from . import cuda  # noqa: E402,F401

__version__ = version.__version__
