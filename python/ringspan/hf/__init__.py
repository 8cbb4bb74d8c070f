"""ringspan as an attention implementation of transformers, on one rank and under context parallelism.

    import ringspan.hf

    ringspan.hf.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ringspan")
    logits = model(input_ids).logits  # one rank: as before

    with ringspan.hf.context_parallel(model, group=group, shard_map=smap):
        logits = model(input_ids=local_ids, position_ids=local_positions).logits  # this rank's tokens

    model          pre-hook: checks arguments, gathers positions and padding          (context.py)
      masks        closures of transformers' mask functions -> a `StructuredMask`     (patterns.py, masks.py)
      each layer   attention(..., attention_mask=StructuredMask) -> rs.attention      (attention.py)

A `StructuredMask` carries all that a layer's attention needs, the group too. So a layer that is computed again in
backward, outside the context, computes the same. docs/transformers.md says what is honoured and what is refused.
"""

from ringspan.hf.context import CHECKED_MODELS, context_parallel
from ringspan.hf.models import NAME
from ringspan.hf.register import register

__all__ = ["CHECKED_MODELS", "NAME", "context_parallel", "register"]
