"""Loads the C++ library, which defines the ops `torch.ops.ringspan.*`."""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed

if torch.distributed.is_available():
    # The shapes of the functional collectives, which the C++ ring calls, are defined in here.
    import torch.distributed._functional_collectives

# Beside this file, or where an editable install keeps it.
_SPEC = importlib.util.find_spec("ringspan._C")
if _SPEC is None or _SPEC.origin is None:
    raise ImportError("ringspan's compiled part (_C) is missing; install the package with pip, or run `make build`")
torch.ops.load_library(_SPEC.origin)
