"""ProcessGroupGloo corrupts the heap: one process, no peer, PyTorch alone. `upstream.py [SECONDS] [short]`.

Two collectives whose works have names of 19 and 8 characters are kept in flight. With `short` the first one is posted
under a name of 9 characters, and nothing happens.
"""

import sys
import time

import torch
import torch.distributed as dist

IN_FLIGHT = 8


def exchange(short: bool = False) -> None:
    """Posts a few collectives of the default group, and waits for them."""
    group = dist.group.WORLD
    ones, name = [1] * group.size(), group.group_name
    x = torch.ones(group.size())
    works, tensors = [], []
    for _ in range(IN_FLIGHT):
        if short:  # ALLGATHER
            works.append(group._allgather_base(torch.empty(group.size() ** 2), x))
        else:  # ALLGATHER_COALESCED
            tensors.append(torch.ops._c10d_functional.all_gather_into_tensor(x, group.size(), name))
        tensors.append(torch.ops._c10d_functional.all_to_all_single(x, ones, ones, name))  # ALLTOALL
    for work in works:
        work.wait()
    for tensor in tensors:
        torch.ops._c10d_functional.wait_tensor(tensor)


def main(seconds: float, short: bool) -> None:
    """Exchanges until the time is up, and says how often."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        exchange(short)
        rounds += 1
    print(f"PyTorch {torch.__version__}: alive after {rounds} rounds", flush=True)


if __name__ == "__main__":
    main(float((sys.argv[1:] or ["60"])[0]), "short" in sys.argv)
