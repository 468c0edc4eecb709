"""What tests ask of every worker on the simulated driver: what that counts, and that it fails. To be imported first: it hides libraries."""
import ctypes
import os
import sys

sys.modules["torch"] = sys.modules["numpy"] = None  # as in an environment without them

from comfy_zerocopy.worker import expose  # noqa: E402


def driver():
    return ctypes.CDLL(os.environ["ZCX_LIBCUDA"])


@expose
def count(*names):
    return [driver().simcuda_count(n.encode()) for n in names]


@expose
def fail(rules):
    """Driver calls of this process fail from now on as the rules say."""
    driver().simcuda_fail(rules.encode())


@expose
def injected():
    return driver().simcuda_injected()
