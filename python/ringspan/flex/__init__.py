"""FlexAttention over a sequence that is split over ranks: `mask_mod` and `score_mod` see global positions.

from ringspan import flex

out = flex.flex_attention(q, k, v, score_mod=relative, block_mask=document_causal, shard_map=smap, group=group)

    mask_mod, BlockMask --> every pair of the whole grid --> bands, or a bool tensor of this rank's rows
    score_mod           --> the operations on the score  --> scale, softcap, bias, mask; all others are refused

What comes out are arguments of `ringspan.attention`: `flex_attention` passes them on, `to_mask` and `to_arguments` hand
them over. docs/flex.md says what is exact and what is refused.
"""

from ringspan.flex.attention import flex_attention, to_arguments
from ringspan.flex.masks import MAX_BANDS, to_mask

__all__ = ["MAX_BANDS", "flex_attention", "to_arguments", "to_mask"]
