"""Context parallel attention in a few lines of PyTorch, to be read: split, local statistics, merge, ledger.

The product computes the same (`ringspan.attention`, in C++); this package shows why it is right. docs/tutorial explains
it, and `python -m ringspan.mechanism` has an exercise to write it yourself.
"""

from ringspan.mechanism.communication import estimate_ring_kv_communication
from ringspan.mechanism.simulation import context_parallel_attention_sim
from ringspan.mechanism.softmax import local_softmax_statistics, merge_softmax_statistics
from ringspan.mechanism.split import split_sequence_contiguous

__all__ = [
    "context_parallel_attention_sim",
    "estimate_ring_kv_communication",
    "local_softmax_statistics",
    "merge_softmax_statistics",
    "split_sequence_contiguous",
]
