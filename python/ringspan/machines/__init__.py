"""Machine: what the simulator knows of the place where a plan runs; docs/simulator.md explains each field.

The JSON files in this folder are examples of machines with their sources.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ringspan._ops  # noqa: F401  the checks are the library's

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class LinkClass:
    """A message of n bytes takes latency_seconds + n / bytes_per_second, in each direction at the same time."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class KernelSpeed:
    """How fast one rank computes in a dtype, measured at a head dim; a call takes the nearest one.

    *_row_seconds: what a tile costs besides, for each row of queries, keys and values of one head that it touches.
    """

    dtype: str
    head_dim: int
    forward_flops_per_second: float
    backward_flops_per_second: float
    forward_row_seconds: float = 0.0
    backward_row_seconds: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A machine, checked when it is made: ValueError names the field and its value.

    m = rs.Machine.example("dgx-h100")
    slower = dataclasses.replace(m, network=dataclasses.replace(m.network, bytes_per_second=12.5e9))
    """

    name: str
    source: str
    ranks_per_node: int
    processors_per_node: int
    memory_bytes: float
    node: LinkClass
    network: LinkClass
    overlap: float
    all_to_all_waits_for_all: bool
    copy_bytes_per_second: float
    forward_call_seconds: float
    backward_call_seconds: float
    step_seconds: float
    kernels: tuple[KernelSpeed, ...]

    def __post_init__(self) -> None:
        self.to_json()

    @staticmethod
    def from_json(text: str) -> Machine:
        """The machine that a description in JSON gives. Every field must be there and no other."""
        content = json.loads(torch.ops.ringspan._machine_json(text))
        content["node"], content["network"] = LinkClass(**content["node"]), LinkClass(**content["network"])
        return Machine(**{**content, "kernels": tuple(KernelSpeed(**speed) for speed in content["kernels"])})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Machine:
        """The machine in a JSON file. ValueError names the file where it cannot be read or describes none."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"machine file {str(path)!r} cannot be read: {error}") from error
        try:
            return Machine.from_json(text)
        except ValueError as error:
            raise ValueError(f"machine file {str(path)!r}: {error}") from error

    @staticmethod
    def example(name: str) -> Machine:
        """An example that comes with the package, such as "dgx-h100"; its `source` says where the figures are from."""
        if name not in Machine.examples():
            raise ValueError(f"example machine {name!r} is unknown; there are {', '.join(Machine.examples())}")
        return Machine.load(_FOLDER / f"{name}.json")

    @staticmethod
    def examples() -> tuple[str, ...]:
        """The names that `example` takes."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))

    @staticmethod
    def nominal() -> Machine:
        """Round numbers for a first look: 1 Tflop/s a rank, 10 GB/s links, nothing else costs anything."""
        link = LinkClass(0.0, 10e9)
        return Machine(
            name="nominal machine: 1 Tflop/s a rank, 10 GB/s links, nothing else costs",
            source="round numbers, no machine",
            ranks_per_node=1,
            processors_per_node=1,
            memory_bytes=0.0,
            node=link,
            network=link,
            overlap=1.0,
            all_to_all_waits_for_all=False,
            copy_bytes_per_second=1e30,
            forward_call_seconds=0.0,
            backward_call_seconds=0.0,
            step_seconds=0.0,
            kernels=tuple(KernelSpeed(dtype, 128, 1e12, 1e12) for dtype in ("fp32", "bf16", "fp16", "fp64")),
        )

    def to_json(self) -> str:
        """What `from_json` reads, for `ringspan simulate --machine` too."""
        return torch.ops.ringspan._machine_json(json.dumps(asdict(self)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json()` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


def check_machine(machine: Any) -> None:
    """Raises ValueError for what is no Machine."""
    if not isinstance(machine, Machine):
        raise ValueError(
            f"machine is of {type(machine).__name__}; give a ringspan.Machine, such as Machine.load(path) or "
            "Machine.nominal()"
        )
