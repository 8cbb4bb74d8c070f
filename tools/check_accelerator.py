"""The dispatch to a GPU or NPU on the real device: see check_accelerator.sh. Exit status 1 where a row is wrong."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch

import ringspan as rs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))

import oracle

LENGTH = 520  # not a multiple of any block
MASKS = {
    "full": (rs.full(), ("full",)),
    "causal": (rs.causal(), ("causal",)),
    "window": (rs.window(100), ("window", 100, 0)),
    "documents": (rs.documents(lengths=[200, 7, 313]), ("ids", (1,) * 200 + (2,) * 7 + (3,) * 313)),
}
SPLITS = {"rows in order": rs.ShardMap.contiguous, "rows in another order": None}
# Largest error relative to the largest value: one rounding of each result, with room for products in 16 bits.
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}
REFUSED = {
    "softcap": {"softcap": 20.0},
    "dropout_p": {"dropout_p": 0.5, "seed": 1},
    "attn_mask": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool)},
}


def find_device() -> str | None:
    """The first of the devices that is there."""
    if torch.cuda.is_available():
        return "cuda"
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu

        return "npu" if torch_npu.npu.is_available() else None
    return None


def shuffled(seq_len: int, world: int) -> rs.ShardMap:
    """Two runs of every second position: rows and columns of a tile keep their strides."""
    half = -(-seq_len // 2)
    return rs.ShardMap.from_segments([[(0, 0, half, 2), (half, 1, seq_len - half, 2)]])


def row(device: str, mask: str, dtype: torch.dtype, split: str) -> tuple[float, float]:
    """The largest relative error of out and gradients, and the seconds of the call."""
    product, rule = MASKS[mask]
    smap = (SPLITS[split] or shuffled)(LENGTH, 1)
    arrays = oracle.draw(1, LENGTH, 8, 2, 64, batch=2)
    whole = [torch.from_numpy(x).to(dtype) for x in arrays]
    right = oracle.attend(*(x.double().numpy() for x in whole[:3]), oracle.keep_of(rule, LENGTH, LENGTH),
                          whole[3].double().numpy())  # fmt: skip
    q, k, v, dout = (smap.shard(x, 0, dim=2).to(device) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    begin = time.perf_counter()
    out = rs.attention(*leaves, mask=product, shard_map=smap)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    back = [x.detach().cpu().double().numpy() for x in found]
    seconds, order = time.perf_counter() - begin, smap.positions(0).numpy()
    pairs = zip(back, (right.out, right.dq, right.dk, right.dv), strict=True)
    return max(float(np.abs(one - other[:, :, order]).max() / np.abs(other).max()) for one, other in pairs), seconds


def is_refused(device: str, arguments: dict) -> bool:
    """Whether the call raises NotImplementedError."""
    q = torch.randn(1, 8, LENGTH, 64, device=device, dtype=torch.bfloat16)
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    try:
        rs.attention(q, q, q, **moved)
    except NotImplementedError:
        return True
    return False


def main() -> int:
    """Prints the table."""
    device = find_device()
    if device is None:
        print("no GPU and no NPU on this machine: nothing was checked")
        return 0
    name = torch.cuda.get_device_name() if device == "cuda" else torch.npu.get_device_name()
    print(f"{device}: {name}, torch {torch.__version__}\n\n{'mask':<12}{'dtype':<12}{'rows':<24}{'error':>10}  seconds")
    wrong = 0
    for mask, dtype, split in itertools.product(MASKS, LIMITS, SPLITS):
        error, seconds = row(device, mask, dtype, split)
        good = error <= LIMITS[dtype]
        wrong += not good
        text = str(dtype).removeprefix("torch.")
        print(f"{mask:<12}{text:<12}{split:<24}{error:>10.2e}  {seconds:7.3f}  {'' if good else 'WRONG'}")
    for argument, arguments in REFUSED.items():
        good = is_refused(device, arguments)
        wrong += not good
        print(f"{argument:<48}{'refused' if good else 'NOT REFUSED'}")
    print(f"\n{wrong} rows are wrong" if wrong else "\nall rows are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
