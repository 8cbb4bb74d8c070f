"""What this machine can do at most, measured beside the rows that are compared with it."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

_LIBRARY = Path(__file__).resolve().parent.parent / "build" / "main" / "bench" / "libringspan_peak.so"
_READ_BYTES = 256 << 20  # well above any cache of a core
# The instruction set of the kernels -> the loop that shows what it can do. bf16 has its own only where it has a dot.
_LOOPS = {"generic": "generic", "avx2": "avx2", "avx512": "avx512", "avx512_bf16": "avx512"}


class PeakMissing(RuntimeError):
    """The library of bench/peak.cc is not built."""


@cache
def load_library() -> ctypes.CDLL:
    """The built bench/peak.cc. Raises PeakMissing with the commands that build it."""
    if not _LIBRARY.exists():
        raise PeakMissing(
            f"{_LIBRARY} is missing; run `make bench`, or: cmake -S . -B build/main -DRINGSPAN_BENCH=ON && "
            "cmake --build build/main --target ringspan_peak"
        )
    library = ctypes.CDLL(str(_LIBRARY))
    library.ringspan_peak_flops.argtypes = [ctypes.c_char_p, ctypes.c_double]
    library.ringspan_peak_flops.restype = ctypes.c_double
    library.ringspan_peak_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.ringspan_peak_read.restype = ctypes.c_double
    library.ringspan_plan_seconds.argtypes = [ctypes.c_int64] * 6
    library.ringspan_plan_seconds.restype = ctypes.c_double
    return library


def flops_per_second(isa: str, dtype: torch.dtype, threads: int, seconds: float) -> float:
    """Peak of `threads` cores together for kernels of instruction set `isa` that compute in `dtype`."""
    loop = "bf16_dot" if isa == "avx512_bf16" and dtype == torch.bfloat16 else _LOOPS[isa]
    library = load_library()

    def measure(_: int) -> float:
        return library.ringspan_peak_flops(loop.encode(), seconds)

    return _sum_over_threads(measure, threads)


def read_bytes_per_second(threads: int) -> float:
    """Bytes read from memory per second by `threads` cores together, each its own part of a large buffer."""
    library = load_library()
    buffer = _read_buffer()
    part = buffer.nbytes // threads // 4096 * 4096

    def measure(index: int) -> float:
        return library.ringspan_peak_read(buffer.data_ptr() + index * part, part)

    return _sum_over_threads(measure, threads)


@cache
def _read_buffer() -> torch.Tensor:
    return torch.ones(_READ_BYTES, dtype=torch.uint8)


def _sum_over_threads(measure: object, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(measure, range(threads)))
