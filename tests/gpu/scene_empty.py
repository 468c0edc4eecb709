"""One process of test_processes.py: how tensors of zcx.empty() cross in a mode, with the backend that PYTORCH_CUDA_ALLOC_CONF names.

    python scene_empty.py MODE BYTES …

Prints one line of JSON: torch's backend, the mode's state, and for each size {bytes, rung, copied, right}; right: the worker's torch found the
bytes that this one wrote, all of them fresh random ones, and not those of another seed.
"""
import json
import os
import random
import sys

import torch
from test_large import fill

import comfy_zerocopy as zcx


def main():
    state, rows = zcx.install(sys.argv[1]).state, []
    torch.zeros(1, device="cuda")
    with zcx.Worker(os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker_torch.py"), name="empty", timeout=60) as w:
        for nbytes in map(int, sys.argv[2:]):
            seed = random.getrandbits(40)
            x = zcx.empty((nbytes,), torch.uint8, "cuda")
            assert isinstance(x, torch.Tensor) and x.is_cuda and x.numel() == nbytes
            fill(x, seed)
            right = w.call("holds_parts", x, seed)
            (crossed,) = w.last_report.transfers
            right = right is True and w.call("holds_parts", x, seed + 1) is False
            rows.append({"bytes": nbytes, "rung": crossed.rung, "copied": crossed.copied, "right": right})
            del x
    print(json.dumps({"backend": torch.cuda.get_allocator_backend(), "state": state, "rows": rows}))


if __name__ == "__main__":
    main()
