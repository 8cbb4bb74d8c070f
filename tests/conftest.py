"""Paths of the helper modules, and the pool of processes that the whole session shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Four processes that share two cores: the oracle's matrix products must not bring threads of their own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

for folder in ("python", "multiproc"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from pool import Pool  # noqa: E402  found by the paths above

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """See `Pool`; nothing starts before the first job."""
    pool = Pool()
    yield pool
    pool.stop()
