"""What `import ringspan` brings, and what waits until it is asked for."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from ringspan.importing import when_imported

import ringspan as rs


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_package_and_plain_tensors_import_no_dtensors_and_no_compiler():
    done = run("""
        import sys, torch, torch.distributed as dist
        import ringspan as rs

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.randn(1, 2, 8, 16, requires_grad=True)
        rs.attention(x, x, x, mask=rs.causal(), group=dist.group.WORLD).sum().backward()
        rs.plan((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16), world_size=2).simulate(rs.Machine.nominal())
        slow = {"torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "matplotlib", "transformers"}
        print(sorted(slow & set(sys.modules)))
        """)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


FROM_DTENSOR = "from torch.distributed.tensor import DTensor, Shard, distribute_tensor"
# The first that a program does with DTensors, and which import came first.
FIRST_USES = {
    "attention": ("import ringspan as rs", FROM_DTENSOR, "out = rs.attention(x, x, x)"),
    "attention, DTensor first": (FROM_DTENSOR, "import ringspan as rs", "out = rs.attention(x, x, x)"),
    "contract": (
        "import ringspan as rs",
        FROM_DTENSOR,
        'out = torch.ops.ringspan.fusion_attention_v3(x, x, x, 2, "BNSD")[0]',
    ),
    "sdpa": (
        "import ringspan as rs; rs.enable_cp_dtensor_dispatcher()",
        FROM_DTENSOR,
        "out = torch.nn.functional.scaled_dot_product_attention(x, x, x)",
    ),
}


@pytest.mark.parametrize(("first", "second", "use"), FIRST_USES.values(), ids=FIRST_USES)
def test_dtensors_are_known_whoever_comes_first(first, second, use):
    done = run(f"""
        import torch, torch.distributed as dist
        {first}
        {second}
        from torch.distributed.device_mesh import init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = distribute_tensor(torch.randn(1, 2, 8, 16), init_device_mesh("cpu", (1,)), [Shard(2)])
        {use}
        print(type(out).__name__)
        """)
    assert (done.returncode, done.stdout.strip()) == (0, "DTensor"), done.stderr


def test_names_that_wait_are_names_of_the_package():
    assert {"sdpa", "enable_cp_dtensor_dispatcher", "disable_cp_dtensor_dispatcher"} <= {*dir(rs)} & {*rs.__all__}
    assert all(getattr(rs, name) is not None for name in rs.__all__)
    with pytest.raises(AttributeError, match="'ringspan' has no attribute 'attend_not'"):
        _ = rs.attend_not


@pytest.fixture
def late_module(tmp_path, monkeypatch):
    """A module that nobody has imported."""
    (tmp_path / "ringspan_late.py").write_text("import sys\nVALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "ringspan_late"
    sys.modules.pop("ringspan_late", None)


def test_actions_follow_the_import_once_and_in_order(late_module):
    seen = []
    when_imported(late_module, lambda: seen.append(sys.modules[late_module].VALUE))
    when_imported(late_module, lambda: seen.append("second"))
    assert seen == []
    __import__(late_module)
    assert seen == [3, "second"]
    when_imported(late_module, lambda: seen.append("at once"))
    assert seen == [3, "second", "at once"]
    del sys.modules[late_module]
    __import__(late_module)
    assert len(seen) == 3


def test_a_module_that_fails_is_imported_again_later(late_module, tmp_path):
    (tmp_path / "ringspan_late.py").write_text("raise RuntimeError('not yet')\n")
    seen = []
    when_imported(late_module, lambda: seen.append("done"))
    with pytest.raises(RuntimeError, match="not yet"):
        __import__(late_module)
    assert seen == []
    (tmp_path / "ringspan_late.py").write_text("VALUE = 1234567\n")
    __import__(late_module)
    assert seen == ["done"]


def test_a_module_that_is_nowhere_stays_an_import_error():
    when_imported("ringspan_nowhere", lambda: pytest.fail("was imported"))
    with pytest.raises(ModuleNotFoundError, match="ringspan_nowhere"):
        __import__("ringspan_nowhere")
