"""`kernel_options` of FlexAttention: what only tunes another kernel is accepted, all else is refused by name."""

from __future__ import annotations

from typing import Any

# They choose or tune a GPU kernel, or promise something that this library does not have to be promised.
_SPEED_ONLY = (
    *("num_warps", "num_stages", "kpack", "matrix_instr_nonkdim", "waves_per_eu"),
    *("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
    *("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ"),
    *("FORCE_USE_FLEX_ATTENTION", "USE_TMA"),
)


def check_kernel_options(options: dict[str, Any] | None) -> None:
    """Raises ValueError for an option that PyTorch does not document, NotImplementedError for another backend."""
    for name, value in (options or {}).items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if plain == "BACKEND":
            if value != "AUTO":
                raise NotImplementedError(
                    f"kernel_options {name}={value!r} is not offered; leave it out, or give 'AUTO'"
                )
        elif plain not in _SPEED_ONLY:
            raise ValueError(
                f"kernel_options has {name!r}; known are BACKEND, {', '.join(_SPEED_ONLY)}, also with fwd_ or "
                "bwd_ before them"
            )
