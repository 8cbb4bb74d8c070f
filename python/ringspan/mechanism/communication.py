"""What a ring moves: K and V of one rank per round, for one round less than there are ranks.

ranks P   positions per rank   rounds   one rank sends in total
1         S                    0        0
2         S / 2                1        1 (S / 2) row
4         S / 4                3        3 (S / 4) row       row = 2 hidden_size dtype_bytes
"""

from __future__ import annotations

from ringspan.mechanism.arguments import check_divides, check_size


def estimate_ring_kv_communication(
    sequence_length: int, hidden_size: int, dtype_bytes: int, cp_size: int
) -> dict[str, int]:
    """The forward pass's communication of one rank, where K and V travel around a ring of `cp_size` ranks.

    sequence_length: positions of the whole sequence, a multiple of cp_size. hidden_size: features of K in one position,
    over all KV heads, and as many of V. dtype_bytes: bytes of one number. Returns

    - local_sequence_length: positions that a rank holds;
    - rounds: exchanges until every rank has met every part, cp_size - 1;
    - payload_per_round_bytes: what a rank sends in one round, K and V of one part;
    - total_payload_per_rank_bytes: what it sends in all rounds.

    ValueError where an argument is no whole number >= 1 or where cp_size does not divide the length. For other masks,
    splits, exchanges and for backward, ask `ringspan.plan`.
    """
    sequence_length = check_size("sequence_length", sequence_length)
    hidden_size = check_size("hidden_size", hidden_size)
    dtype_bytes = check_size("dtype_bytes", dtype_bytes)
    cp_size = check_size("cp_size", cp_size)

    local_sequence_length = check_divides(cp_size, sequence_length)
    rounds = cp_size - 1
    key_and_value = 2
    payload_per_round_bytes = key_and_value * local_sequence_length * hidden_size * dtype_bytes
    return {
        "local_sequence_length": local_sequence_length,
        "rounds": rounds,
        "payload_per_round_bytes": payload_per_round_bytes,
        "total_payload_per_rank_bytes": rounds * payload_per_round_bytes,
    }
