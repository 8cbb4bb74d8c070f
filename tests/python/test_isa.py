"""The instruction set is chosen at run time and can be forced: in the process, and by RINGSPAN_ISA."""

import os
import subprocess
import sys

import numpy as np
import oracle
import pytest
import torch

import ringspan as rs

OPS = torch.ops.ringspan


@pytest.fixture(params=OPS._available_isas())
def isa(request):
    OPS._force_isa(request.param)
    yield request.param
    OPS._force_isa("")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_instruction_set_is_right(isa, dtype):
    assert OPS._isa() == isa
    arrays = oracle.draw(1, 67, 4, 2, (40, 24))
    q, k, v, dout = (torch.from_numpy(x).to(dtype) for x in arrays)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = rs.attention(*leaves, mask=rs.causal())
    grads = torch.autograd.grad(out, leaves, dout)
    rounded = [x.detach().double().numpy() for x in (q, k, v)]
    right = oracle.attend(*rounded, oracle.keep_of(("causal",), 67, 67), dout.double().numpy())
    forward, backward = {
        torch.float32: (1e-5, 5e-5),
        torch.float64: (1e-12, 1e-12),
        torch.bfloat16: (2.0**-7, 2.0**-6),
        torch.float16: (2.0**-10, 2.0**-9),
    }[dtype]
    assert oracle.error(out.detach().double().numpy(), right.out) <= forward
    for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        assert oracle.error(grad.double().numpy(), getattr(right, name)) <= backward


def test_generic_is_always_there():
    assert "generic" in OPS._available_isas()
    assert len(set(OPS._available_isas())) == len(OPS._available_isas())


def test_the_sets_do_not_share_code():
    """Two sets round differently somewhere, or one of them did not run."""
    names = OPS._available_isas()
    if len(names) < 2:
        pytest.skip("this machine has one instruction set only")
    q, k, v, _ = (torch.from_numpy(x).float() for x in oracle.draw(2, 200, 2, 2, 64))
    outs = []
    for name in ("generic", next(name for name in names if name != "generic")):
        OPS._force_isa(name)
        outs.append(rs.attention(q, k, v))
    OPS._force_isa("")
    assert not torch.equal(*outs)
    assert np.abs((outs[0] - outs[1]).numpy()).max() < 1e-5


def test_unknown_sets_are_refused():
    with pytest.raises(ValueError, match="vax"):
        OPS._force_isa("vax")


def test_environment_variable():
    script = "import torch, ringspan; print(torch.ops.ringspan._isa())"
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "RINGSPAN_ISA": "generic"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.stdout.strip() == "generic", found.stderr
