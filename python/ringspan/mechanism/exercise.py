"""Attention over a sequence that lies in parts: four functions to write.

Each function ends in a line that raises NotImplementedError; put your code in its place. Then run

    python -m ringspan.mechanism --check FILE

with the name of this file, as often as you like. It tells for each function what holds, shows the smallest example that
does not, and gives a hint. Letters: S positions of the whole sequence, D features, Sq queries, Sk keys of one part, Dv
features of a value. "..." in a shape stands for any number of batch axes, also for none.
"""

import torch

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def split_sequence_contiguous(tensor: torch.Tensor, cp_size: int) -> list[torch.Tensor]:
    """Give each rank its own run of positions.

    tensor: [..., S, D]; the sequence is the last axis but one. Return a list of cp_size tensors [..., S / cp_size, D]
    in the order of the ranks: joined again, they are the tensor. Raise ValueError where cp_size is less than 1 and
    where S positions cannot be dealt out in equal parts.
    """
    raise NotImplementedError("split_sequence_contiguous is still to be written")


def local_softmax_statistics(scores: torch.Tensor, value_shard: torch.Tensor) -> Statistics:
    """What a rank can say about its own keys, without having seen any others.

    scores: [..., Sq, Sk], one number for each query and key; value_shard: [..., Sk, Dv]. Return, for each query,

    - its largest score, [..., Sq, 1];
    - the sum of the exponentials of its scores, each taken relative to that largest score, [..., Sq, 1];
    - the values, weighted with the same exponentials and added up, [..., Sq, Dv].

    Scores may be in the thousands. A score of -inf is a key that the query must not see. Where a query sees no key at
    all, the three are -inf, 0 and 0.
    """
    raise NotImplementedError("local_softmax_statistics is still to be written")


def merge_softmax_statistics(running: Statistics | None, local: Statistics) -> Statistics:
    """Make one set of statistics of two: those of all keys so far, and those of a part that has just arrived.

    Both are what local_softmax_statistics returns. The result must be what it would have returned for all these keys at
    once. running is None before the first part. Either side may be that of a query without keys, (-inf, 0, 0), or both.
    """
    raise NotImplementedError("merge_softmax_statistics is still to be written")


def estimate_ring_kv_communication(
    sequence_length: int, hidden_size: int, dtype_bytes: int, cp_size: int
) -> dict[str, int]:
    """What one rank sends while the keys and values of all ranks travel once around the ring.

    hidden_size numbers of dtype_bytes bytes make the key of one position, as many its value. Return whole numbers:

    - "local_sequence_length": positions that one rank holds;
    - "rounds": how often the ranks pass something on, until each has met every part;
    - "payload_per_round_bytes": the keys and values of one rank, in bytes (also where nothing needs to be sent);
    - "total_payload_per_rank_bytes": all that one rank sends.

    Raise ValueError where a number is less than 1 and where the positions cannot be dealt out in equal parts.
    """
    raise NotImplementedError("estimate_ring_kv_communication is still to be written")
