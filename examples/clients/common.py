"""What the clients share: the same script alone in one process, and the comparison with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import ringspan as rs

Results = dict[str, list[Tensor]]  # by the kind of what was measured

_LAUNCHER = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it, wherever FSDP keeps its parts."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_client(title: str, script: str, train: Callable[[int], Results], rtol: float = 1e-5) -> int:
    """Compares `train(world)`, with ringspan enabled, with `train(1)` in one process; the exit status of `script`.

    Under torchrun, rank 0 starts `script` once more, outside of torchrun and with a file for the results as argument.
    """
    if len(sys.argv) > 1:
        torch.save(train(1), sys.argv[1])
        return 0
    rs.enable_cp_dtensor_dispatcher()
    found = train(int(os.environ["WORLD_SIZE"]))
    equal = torch.zeros((), dtype=torch.bool)
    if dist.get_rank() == 0:
        equal.fill_(_compare(title, found, _run_alone(script), rtol))
    dist.broadcast(equal, 0)
    dist.destroy_process_group()
    return 0 if equal else 1


def _run_alone(script: str) -> Results:
    alone = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.pt"
        subprocess.run([sys.executable, script, str(path)], env=alone, check=True)
        return torch.load(path)


def _compare(title: str, found: Results, expected: Results, rtol: float) -> bool:
    """Each tensor by its largest difference, relative to its largest value. Prints the worst of each kind."""
    print(f"\n{title}, against one process\n{'':26}{'tensors':>9}{'difference':>12}{'allowed':>10}")
    equal = found.keys() == expected.keys()
    for kind in (kind for kind in expected if kind in found):
        pairs = list(zip(found[kind], expected[kind], strict=True))
        worst = torch.stack([(x.double() - right.double()).abs().max() / right.abs().max() for x, right in pairs]).max()
        equal = equal and bool(worst <= rtol)  # False for NaN too
        print(f"{kind:26}{len(pairs):9}{worst:12.1e}{rtol:10.0e}")
    print("equal within fp32 rounding" if equal else "DIFFERENT", flush=True)
    return equal
