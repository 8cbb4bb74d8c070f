"""Scripts of test_faults that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_script(script: str, **environment: str) -> str:
    """What a script prints in a process of its own; it must end well."""
    found = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, f"status {found.returncode}\n{found.stdout[-2000:]}\n{found.stderr[-3000:]}"
    return found.stdout


SAVED_CALLS = """
import torch
import ringspan as rs
from torch.utils._python_dispatch import TorchDispatchMode

kept = []

class Keep(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention_backward" in str(func):
            kept.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

x = torch.randn(1, 2, 4, 8, requires_grad=True)
with Keep():
    rs.attention(x, x, x, dropout_p=0.5, seed=7).sum().backward()
func, args, kwargs = kept[0]
names = [argument.name for argument in func._schema.arguments]
given = dict(zip(names, args)) | kwargs
right = func(**given)
long = torch.zeros(4, dtype=torch.int64)
long[::2] = given["call"]
try:
    assert torch.equal(func(**{**given, "call": long[::2]})[0], right[0]), "a strided tensor holds the same numbers"
except ValueError as error:
    assert "call" in str(error)
bad = {
    "empty": torch.zeros(0, dtype=torch.int64),
    "one element": torch.zeros(1, dtype=torch.int64),
    "three elements": torch.zeros(3, dtype=torch.int64),
    "fp32": torch.zeros(2),
    "on meta": torch.zeros(2, dtype=torch.int64, device="meta"),
    "no dimensions": torch.zeros((), dtype=torch.int64),
}
for name, call in bad.items():
    try:
        func(**{**given, "call": call})
        print(name, "is taken")
    except (ValueError, RuntimeError) as error:
        assert "call" in str(error) or "meta" in str(error), (name, error)
print("ended well")
"""


COMPILED_BEFORE = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import ringspan as rs

def refusal(call):
    try:
        call()
    except ValueError as error:
        return "LOCAL" in str(error)
    return False

x = torch.randn(1, 2, 4, 8)
forgotten = torch.compile(lambda x: rs.attention(x, x, x), fullgraph=True, backend="aot_eager")
alone = torch.compile(lambda x: rs.attention(x, x, x, group=rs.LOCAL), fullgraph=True, backend="aot_eager")
right = rs.attention(x, x, x)
assert torch.equal(forgotten(x), right) and torch.equal(alone(x), right)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
assert refusal(lambda: rs.attention(x, x, x)), "eager"
assert refusal(lambda: forgotten(x)), "compiled before init_process_group"
assert torch.equal(alone(x), right)
dist.destroy_process_group()
assert torch.equal(rs.attention(x, x, x), right), "after the job"
"""


LAUNCHED = """
import torch
import torch.distributed as dist
import ringspan as rs

x = torch.randn(1, 2, 4, 8)
rs.attention(x, x, x, group=rs.LOCAL)
for group in ({}, {"group": None}, {"group": dist.group.WORLD}):
    try:
        rs.attention(x, x, x, **group)
        print("taken")
    except ValueError as error:
        assert "LOCAL" in str(error)
"""
