"""The device's random numbers: a seed, and an offset that each dropout call moves on.

PyTorch's own state of random numbers carries this one along while the stand-in is installed, so that activation
checkpoints, which save and restore that state, drop the same pairs again.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from ringspan.compat.torch_npu.undo import set_attribute

OFFSET_OF_A_CALL = 12  # 10 asked for, in steps of 4
_STATE_BYTES = 16
_SEED_BITS = 64


class Generator:
    """Seed and offset. The seed that nobody set is PyTorch's."""

    def __init__(self) -> None:
        self.seed = torch.initial_seed()
        self.offset = 0

    def manual_seed(self, seed: int) -> Generator:
        """Starts again at offset 0."""
        self.seed, self.offset = int(seed), 0
        return self

    def initial_seed(self) -> int:
        """The seed."""
        return self.seed

    def draw(self) -> tuple[Tensor, Tensor]:
        """Seed and offset of one dropout call, int64 [1] each; the offset moves on."""
        found = torch.tensor([_signed(self.seed)]), torch.tensor([self.offset])
        self.offset += OFFSET_OF_A_CALL
        return found

    def get_state(self) -> Tensor:
        """Seed and offset as uint8 [16]."""
        return torch.tensor([_signed(self.seed), self.offset]).view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        """The inverse. ValueError for a state that is none."""
        if state.dtype != torch.uint8 or state.shape != (_STATE_BYTES,):
            raise ValueError(f"state is {state.dtype} {list(state.shape)}; give torch.uint8 [{_STATE_BYTES}]")
        seed, self.offset = state.clone().view(torch.int64).tolist()
        self.seed = seed % 2**_SEED_BITS


def join_torch(stack: ExitStack, generator: Generator) -> None:
    """Makes `torch.manual_seed`, `get_rng_state` and `set_rng_state` see `generator` until `stack` is closed."""
    seed, get_state, set_state = torch.manual_seed, torch.get_rng_state, torch.set_rng_state

    def manual_seed(value: int) -> torch.Generator:
        generator.manual_seed(int(value) % 2**_SEED_BITS)
        return seed(value)

    def get_rng_state() -> Tensor:
        return torch.cat([get_state(), generator.get_state()])

    def set_rng_state(new_state: Tensor) -> None:
        own = get_state().numel()
        # A state from before the installation has no part for the device.
        if new_state.numel() == own + _STATE_BYTES:
            generator.set_state(new_state[own:])
            new_state = new_state[:own].clone()
        set_state(new_state)

    for function in (manual_seed, get_rng_state, set_rng_state):
        for owner in (torch, torch.random):
            set_attribute(stack, owner, function.__name__, function)


def _signed(seed: int) -> int:
    return (seed + 2 ** (_SEED_BITS - 1)) % 2**_SEED_BITS - 2 ** (_SEED_BITS - 1)
