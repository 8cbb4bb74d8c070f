"""enable_cp_dtensor_dispatcher and its opposite: which positions DTensor's shards hold, and what is hooked meanwhile.

    enable(A)     plain tensors count as replicated; PyTorch's own rules are registered; SDPA comes to us; map A
      enable(B)   map B
      disable()   map A
    disable()     everything is as it was

What a call needs of this is read once, in its forward: the backward takes it from the graph, whatever is enabled then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ringspan.dtensor import private
from ringspan.dtensor.balancer import BalancerWatch
from ringspan.dtensor.sdpa_hook import SdpaHook
from ringspan.dtensor.split import ENABLED, Split
from ringspan.shard_map import ShardMap


class ContextParallelWatch:
    """Meets SDPA, and learns which load balancers PyTorch uses, from its creation until `remove()`.

    Enabling includes it. Who lets PyTorch's context parallelism enable ringspan needs it before: buffers are sharded
    and SDPA is replaced first there.
    """

    def __init__(self) -> None:
        _WATCHES.append(self)
        if len(_WATCHES) == 1:
            ENABLED.watch = BalancerWatch()
        self._sdpa = SdpaHook()

    def remove(self) -> None:
        """The last one restores all."""
        self._sdpa.remove()
        _WATCHES.remove(self)
        if not _WATCHES and ENABLED.watch is not None:
            watch, ENABLED.watch = ENABLED.watch, None
            watch.remove()


_WATCHES: list[ContextParallelWatch] = []


def _open() -> ExitStack:
    """Makes what is in force while anything is enabled; closing it restores everything."""
    stack = ExitStack()
    stack.callback(ContextParallelWatch().remove)
    if ENABLED.watch is not None:
        stack.callback(ENABLED.watch.forget)
    stack.callback(private.allow_implicit_replication, private.allows_implicit_replication())
    private.allow_implicit_replication(True)
    rules = private.context_parallel_rules()
    if not rules._cp_strategy_contexts:
        stack.callback(rules.unregister_cp_sharding_rules)
    rules.register_cp_sharding_rules()
    return stack


_OPENED: list[ExitStack] = []  # one while anything is enabled


def enable_cp_dtensor_dispatcher(*, shard_map: Callable[[int, int], ShardMap] = ShardMap.contiguous) -> None:
    """From now on DTensors that are sharded along the sequence hold the positions that `shard_map` says.

    shard_map(seq_len, world_size) makes the ShardMap; it must give every rank as many rows as DTensor does (chunks of
    ceil(seq_len / world_size)). Until the matching `disable_cp_dtensor_dispatcher()`:

    - `ringspan.attention`, the contract's ops and `F.scaled_dot_product_attention` on DTensors run in the group that
      shares out the sequence. (Contiguous DTensors do so without this call, SDPA excepted.)
    - plain tensors beside DTensors count as replicated, for every op;
    - inside PyTorch's `context_parallel` and after `_context_parallel_shard` the positions are those of the load
      balancer that was used there, and the exchange is what `set_rotate_method` says
      ("allgather": schedule gather, whose K/V come by one all_gather);
    - PyTorch's sharding rules for flash, efficient and cudnn attention are registered.

    Calls nest; the innermost map counts.
    """
    if not callable(shard_map):
        raise ValueError(
            f"shard_map is {shard_map!r}; give a function of (seq_len, world_size), such as ringspan.ShardMap.head_tail"
        )
    if not ENABLED.splits:
        _OPENED.append(_open())
    ENABLED.splits.append(Split(shard_map))


def disable_cp_dtensor_dispatcher() -> None:
    """Takes back the last `enable_cp_dtensor_dispatcher()`. RuntimeError where there is none."""
    if not ENABLED.splits:
        raise RuntimeError("disable_cp_dtensor_dispatcher() without a matching enable_cp_dtensor_dispatcher()")
    ENABLED.splits.pop()
    if not ENABLED.splits:
        _OPENED.pop().close()
