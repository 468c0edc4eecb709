"""Writes more than a pipe holds before anybody asks for anything."""
import sys

from comfy_zerocopy.worker import expose

for i in range(20_000):
    print(f"out {i}")
    print(f"err {i}", file=sys.stderr)


@expose
def echo(x):
    return x
