"""One rank of test_gloo_race, in a process of its own: `gloo_race_jobs.py JOB RANK WORLD PORT ROUNDS LONGEST_NAP_US`.

Prints one line of JSON at its end: how often a worker of gloo was delayed (-1 where the place was not found, with the
reason), and the largest error where the job computes.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import oracle

sys.path[:0] = [str(Path(__file__).parent.parent / "python")]

PAGE = Path(__file__).parents[2] / "docs" / "gloo-race.md"
REPORT = PAGE.with_suffix("") / "upstream.py"
RUN_LOOP = b"_ZN4c10d16ProcessGroupGloo7runLoopEi"
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
NOT_FOUND = {1: "libtorch_cpu.so is not where it is in a wheel", 2: "no symbol", 3: "a symbol without a size"}
TIMEOUT = datetime.timedelta(seconds=20)


class Attention:
    """Forward and backward of `ringspan.attention` under schedule "gather", and `unshard` of its result.

    `error` is the largest one against dense attention in double.
    """

    LENGTH = 64

    def __init__(self) -> None:
        import oracle

        import ringspan as rs

        self.oracle, self.rs = oracle, rs
        whole = oracle.draw(7, self.LENGTH, 2, 2, 8)
        right = oracle.attend(*whole[:3], oracle.keep_of(("causal",), self.LENGTH, self.LENGTH), whole[3])
        self.smap = rs.ShardMap.head_tail(self.LENGTH, dist.get_world_size())
        self.leaves = [self.mine(x).float().requires_grad_() for x in whole[:3]]
        self.dout = torch.from_numpy(whole[3]).float()
        self.right = [torch.from_numpy(right.out), *(self.mine(x) for x in (right.dq, right.dk, right.dv))]
        self.error = 0.0

    def mine(self, whole: oracle.Array) -> torch.Tensor:
        return self.smap.shard(torch.from_numpy(whole), dist.get_rank(), dim=2).contiguous()

    def __call__(self) -> None:
        group = dist.group.WORLD
        out = self.rs.attention(
            *self.leaves, mask=self.rs.causal(), shard_map=self.smap, schedule="gather", exchange="all_gather",
            group=group,
        )  # fmt: skip
        whole = self.smap.unshard(out, dim=2, group=group, grad="slice")
        grads = torch.autograd.grad(whole, self.leaves, self.dout)
        for got, right in zip((whole.detach(), *grads), self.right, strict=True):
            self.error = max(self.error, self.oracle.error(got.numpy(), right.numpy()))


class Counted(Attention):
    """The same while collectives are counted: they are PyTorch's functional ones then."""

    def __call__(self) -> None:
        from torch.distributed.tensor.debug import CommDebugMode

        with CommDebugMode():
            super().__call__()


def of_report(**arguments: bool) -> Callable[[], None]:
    """A round of the script that the report to PyTorch has."""
    exchange = runpy.run_path(str(REPORT))["exchange"]
    return lambda: exchange(**arguments)


JOBS = {
    "functional": of_report,
    "one_thread": of_report,
    "short": lambda: of_report(short=True),
    "attention": Attention,
    "counted": Counted,
}


def make_the_group_of_the_page() -> None:
    """What docs/gloo-race.md tells programs to do, but for its last line."""
    [script] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    end = "dist.destroy_process_group()\n"
    assert script.endswith(end)
    exec(compile(script.removesuffix(end), str(PAGE), "exec"), {"__name__": "snippet"})


def arm(longest_nap_us: int) -> tuple[Callable[[], int], str]:
    """The count of delays, and why there will be none."""
    delays = ctypes.CDLL(os.environ["LD_PRELOAD"])
    delays.gloo_delay_arm.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long]
    missing = delays.gloo_delay_arm(str(LIBRARY).encode(), RUN_LOOP, longest_nap_us)
    return delays.gloo_delay_naps, NOT_FOUND.get(missing, "")


def main() -> None:
    """Runs the job so many times."""
    name, rank, world, port, rounds, longest_nap_us = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    naps, missing = arm(longest_nap_us)
    if missing:
        print(json.dumps({"naps": -1, "missing": missing}))
        return
    if name == "one_thread":
        make_the_group_of_the_page()
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT) if world > 1 else dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    job = JOBS[name]()
    for _ in range(rounds):
        job()
    dist.barrier()
    print(json.dumps({"naps": naps(), "error": getattr(job, "error", 0.0)}), flush=True)
    # A worker that still sleeps frees its work later, and may not do so in an interpreter that has ended.
    os._exit(0)


if __name__ == "__main__":
    main()
