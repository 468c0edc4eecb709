"""Exposes what cannot be called across."""
from comfy_zerocopy.worker import expose


@expose
def numbers():
    yield 1
