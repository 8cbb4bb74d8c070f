"""`ringspan.fit` on real processes: it measures, writes what the simulator reads, and ends when a rank fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ringspan.bench.launch import RankFailed, run_on_processes


def test_fit_writes_a_description(tmp_path: Path) -> None:
    out = tmp_path / "here" / "machine.json"
    command = [sys.executable, "-m", "ringspan.fit", "--out", str(out), "--seq-len", "64", "--repeats", "1"]
    command += ["--dtypes", "fp32", "--head-dims", "16", "--name", "a test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["name"] == "a test"
    assert found["all_to_all_waits_for_all"] is True
    assert found["processors_per_node"] == os.cpu_count()
    (kernel,) = found["kernels"]
    assert (kernel["dtype"], kernel["head_dim"]) == ("fp32", 16)
    for value in (kernel["forward_flops_per_second"], found["node"]["bytes_per_second"], found["memory_bytes"]):
        assert value > 0


def fail_on_rank_1(group: dist.ProcessGroup, argument: Any) -> Iterator[Any]:
    """Rank 0 waits for a rank that is gone."""
    yield argument
    if dist.get_rank(group) == 1:
        raise ValueError("rank 1 has had enough")
    time.sleep(60)


def test_a_rank_that_fails_ends_all() -> None:
    begin, words = time.monotonic(), []
    with pytest.raises(RankFailed, match="had enough"):
        words.extend(run_on_processes(2, fail_on_rank_1, "first word"))
    # Rank 0's word and rank 1's failure may come in either order.
    assert words in ([], ["first word"])
    assert time.monotonic() - begin < 45
