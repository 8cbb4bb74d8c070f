"""Which positions the shards of DTensors hold, as far as calls of this moment are concerned."""

from __future__ import annotations

from dataclasses import dataclass

from ringspan.dtensor import private
from ringspan.dtensor.balancer import BalancerWatch
from ringspan.dtensor.operands import MakeMap
from ringspan.shard_map import ShardMap


@dataclass(frozen=True)
class Split:
    """How DTensors that are sharded along the sequence are split, and how their calls exchange."""

    make_map: MakeMap = ShardMap.contiguous
    exchange: str = "auto"

    @property
    def is_contiguous(self) -> bool:
        """Whether shards hold neighbouring positions, in order."""
        return self.make_map is ShardMap.contiguous


_UNTOLD = Split()


class _Enabled:
    """What `enable_cp_dtensor_dispatcher` has enabled, innermost last; the watch knows better than that."""

    def __init__(self) -> None:
        self.splits: list[Split] = []
        self.watch: BalancerWatch | None = None


ENABLED = _Enabled()


def split_in_effect() -> Split:
    """What a call of this moment is to go by."""
    if not ENABLED.splits:
        return _UNTOLD
    enabled = ENABLED.splits[-1]
    if ENABLED.watch is None:
        return enabled
    return Split(*ENABLED.watch.split(enabled.make_map))


def check_traceable(split: Split) -> Split:
    """`split`, for code that no guard of torch.compile watches: what is traced there would stay for good."""
    if not split.is_contiguous and private.is_tracing():
        raise NotImplementedError(
            "an op on DTensors that are not contiguous along the sequence is traced by torch.compile, which would keep "
            "today's shard map whatever is enabled later; call ringspan.attention or F.scaled_dot_product_attention"
        )
    return split
