"""The ways into the library, each as a small call whose answer is known, for tests that go through all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import oracle
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from trials import Arena

import ringspan as rs

OPS = torch.ops.ringspan
ROWS = 3  # of each rank
Mistakes = dict[str, Callable[["Setting"], dict[str, Any]]]


@dataclass
class Setting:
    """What a front is called with on this rank."""

    group: Any
    group_name: str
    leaves: list[torch.Tensor]
    right: torch.Tensor  # this rank's part of the answer
    smap: rs.ShardMap
    more: dict[str, Any] = field(default_factory=dict)


def rows_of(arena: Arena, dtype: torch.dtype, scale: float | None = None, causal: bool = True) -> tuple[list, Any]:
    """This rank's contiguous rows of q, k, v, and of the right answer; with a sink of 0.5 for each head."""
    length = ROWS * arena.world
    q, k, v, _ = (torch.from_numpy(x).to(dtype).double().numpy() for x in oracle.draw(9, length, 4, 2, 8))
    keep = oracle.keep_of(("causal",) if causal else ("full",), length, length)
    right = oracle.attend(q, k, v, keep, scale=scale, sink=np.full(4, 0.5))
    where = np.arange(ROWS * arena.rank, ROWS * arena.rank + ROWS)
    leaves = [torch.from_numpy(oracle.take_rows(x, where)).to(dtype).requires_grad_() for x in (q, k, v)]
    return leaves, torch.from_numpy(oracle.take_rows(right.out, where))


class Front:
    """One way in. `call` gives this rank's rows; a fault of the caller is a keyword of it."""

    name = ""
    dtype = torch.float64
    limit = 1e-12
    kinds = ("ValueError",)  # what peers raise
    takes_mask = False
    asks_steps = True  # whether the op asks _step_refusal before its agreement
    has_backward = True
    checks: tuple[str, ...] = ()  # places of which the first that exists is a check
    encoding: tuple[str, ...] = ()
    mistakes: ClassVar[Mistakes] = {}

    def prepare(self, arena: Arena) -> Setting:
        leaves, right = rows_of(arena, self.dtype)
        smap = rs.ShardMap.contiguous(ROWS * arena.world, arena.world)
        return Setting(arena.group, arena.name, leaves, right, smap)

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        raise NotImplementedError

    def error(self, arena: Arena, setting: Setting) -> float:
        """Of an ordinary call of this front in whatever is the arena's group now."""
        try:
            out = self.call(setting)
        except Exception:
            return float("inf")
        local = out.to_local() if isinstance(out, DTensor) else out
        found = oracle.error(local.detach().double().numpy(), setting.right.numpy())
        return found if found > self.limit else 0.0


def sink_of(dtype: torch.dtype, value: float = 0.5) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


NOT_A_NUMBER = float("nan")
# What Python or a check of a type would raise, by the front's own keywords.
ATTENTION_MISTAKES: Mistakes = {
    "unknown keyword": lambda _: {"no_such_argument": 1},
    "type of scale": lambda _: {"scale": "0.5"},
    "type of num_heads": lambda _: {"num_heads": "2"},
    "huge scale": lambda _: {"scale": 10**400},
    "huge offset": lambda _: {"dropout_p": 0.1, "seed": 1, "offset": 2**63},
    "total_heads": lambda _: {"dropout_p": 0.1, "seed": 1, "total_heads": 8.5},
    "assume_agreed": lambda _: {"assume_agreed": "yes"},
    "no tensor": lambda _: {"sink": "sink"},
    "number in the op": lambda _: {"sink": sink_of(torch.float64, NOT_A_NUMBER)},
    "dtype": lambda _: {"sink": torch.zeros(4, dtype=torch.int64)},
}


class Plain(Front):
    name = "attention"
    takes_mask = True
    checks = ("ringspan.attention:check_pairs",)
    encoding = ("ringspan.plain:encode_local_call",)
    mistakes = ATTENTION_MISTAKES

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {"mask": rs.causal(), "sink": sink_of(self.dtype), "group": setting.group, **changes}
        return rs.attention(*setting.leaves, shard_map=setting.smap, **given)


class OnDTensors(Front):
    name = "attention on DTensors"
    takes_mask = True
    checks = ("ringspan.dtensor.attention:common_mesh",)
    encoding = ("ringspan.dtensor.attention:arrange",)
    mistakes: ClassVar[Mistakes] = ATTENTION_MISTAKES | {
        "layout": lambda _: {"layout": "XYZ"},
        "rows of a map": lambda _: {"shard_map": rs.ShardMap.contiguous(99, 2)},
        "group": lambda setting: {"group": setting.group},
    }

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        mesh = DeviceMesh.from_group(arena.group, "cpu", mesh_dim_names=("cp",))
        setting.leaves = [
            DTensor.from_local(x.detach(), mesh, [Shard(2)], run_check=False).requires_grad_() for x in setting.leaves
        ]
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {"mask": rs.causal(), "sink": self.sink(setting, 0.5), **changes}
        if isinstance(given["sink"], torch.Tensor) and not isinstance(given["sink"], DTensor):
            given["sink"] = self.on_mesh(setting, given["sink"])
        return rs.attention(*setting.leaves, **given)

    def sink(self, setting: Setting, value: float) -> DTensor:
        return self.on_mesh(setting, sink_of(self.dtype, value))

    @staticmethod
    def on_mesh(setting: Setting, x: torch.Tensor) -> DTensor:
        from torch.distributed.tensor import Replicate

        return DTensor.from_local(x, setting.leaves[0].device_mesh, [Replicate()], run_check=False)


CONTRACT_MISTAKES: Mistakes = {
    "heads": lambda _: {"head_num": 3},
    "layout": lambda _: {"input_layout": "XYZ"},
    "scale": lambda _: {"scale": NOT_A_NUMBER},
    "number in the op": lambda _: {"sink": sink_of(torch.float32, NOT_A_NUMBER)},
    "sparse_mode": lambda _: {"sparse_mode": 99},
}


class ContractOnDTensors(OnDTensors):
    name = "contract on DTensors"
    dtype, limit = torch.float32, 1e-5
    kinds = ("RuntimeError", "ValueError")
    takes_mask = False
    checks = ("ringspan.dtensor.npu_ops:as_dtensor",)
    encoding = ("ringspan.dtensor.npu_ops:arrange",)
    mistakes = CONTRACT_MISTAKES

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        setting.right = rows_of(arena, self.dtype, 0.5, causal=False)[1]
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {"head_num": 4, "input_layout": "BNSD", "scale": 0.5, "sink": self.sink(setting, 0.5), **changes}
        if not isinstance(given["sink"], DTensor):
            given["sink"] = self.on_mesh(setting, given["sink"])
        return OPS.fusion_attention_v3(*setting.leaves, **given)[0]


class ContractInGroup(Front):
    name = "contract .cp"
    dtype, limit = torch.float32, 1e-5
    kinds = ("RuntimeError", "ValueError")
    mistakes: ClassVar[Mistakes] = CONTRACT_MISTAKES | {
        "map": lambda setting: {"q_map": torch.zeros(3, 5, dtype=torch.int64)},
        "schedule": lambda _: {"schedule": "no such schedule"},
    }

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        setting.right = rows_of(arena, self.dtype, 0.5, causal=False)[1]
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {"head_num": 4, "input_layout": "BNSD", "scale": 0.5, "sink": sink_of(self.dtype), **changes}
        return OPS.fusion_attention_v3.cp(*setting.leaves, **given, group_name=setting.group_name)[0]


class Flex(Front):
    name = "flex_attention"
    takes_mask = True
    checks = ("ringspan.flex.attention:_check_kernel_options",)
    encoding = ("ringspan.flex.attention:to_arguments",)
    mistakes: ClassVar[Mistakes] = {
        "unknown keyword": lambda _: {"no_such_argument": 1},
        "type of scale": lambda _: {"scale": "0.5"},
        "heads": lambda _: {"enable_gqa": False},
        "no map": lambda _: {"shard_map": "contiguous"},
    }

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        length = ROWS * arena.world
        q, k, v, _ = oracle.draw(9, length, 4, 2, 8)
        right = oracle.attend(q, k, v, oracle.keep_of(("causal",), length, length))
        where = np.arange(ROWS * arena.rank, ROWS * arena.rank + ROWS)
        setting.right = torch.from_numpy(oracle.take_rows(right.out, where))
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        from ringspan import flex

        given = {"block_mask": changes.pop("mask", rs.causal()), "enable_gqa": True, **changes}
        return flex.flex_attention(*setting.leaves, **{"shard_map": setting.smap, "group": setting.group, **given})


class Model(Front):
    """A model of transformers; what is raised is raised in a layer or where its call is checked."""

    name = "model"
    limit = 1e-4
    checks = ("ringspan.hf.context:check_call",)
    encoding = ("ringspan.hf.attention:_check_sizes", "ringspan.hf.attention:_structured")
    mistakes: ClassVar[Mistakes] = {
        "no positions": lambda _: {"position_ids": None},
        "labels": lambda setting: {"labels": setting.more["input_ids"]},
        "map": lambda _: {"shard_map": "contiguous"},
    }

    def prepare(self, arena: Arena) -> Setting:
        import hf_models

        eager, ours = self.models(hf_models)
        length = ROWS * arena.world
        smap = rs.ShardMap.contiguous(length, arena.world)
        ids = hf_models.tokens(1, length)
        with torch.no_grad():
            right = eager(input_ids=ids, use_cache=False).logits
        given = {
            "input_ids": smap.shard(ids, arena.rank, 1),
            "position_ids": smap.positions(arena.rank)[None],
        }
        return Setting(arena.group, arena.name, [], smap.shard(right, arena.rank, 1), smap, {**given, "model": ours})

    @staticmethod
    @functools.cache
    def models(hf_models: Any) -> tuple:
        return hf_models.pair_of("llama")

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {**setting.more, **changes}
        model, smap = given.pop("model"), given.pop("shard_map", setting.smap)
        with rs.hf.context_parallel(model, group=setting.group, shard_map=smap):
            return model(**given).logits


class Unshard(Front):
    name = "unshard"
    asks_steps = has_backward = False
    checks = ("ringspan.shard_map:ShardMap._check_rows", "ringspan.gather:_source_rows")
    encoding = ("ringspan.gather:_signature",)
    mistakes: ClassVar[Mistakes] = {
        "unknown keyword": lambda _: {"no_such_argument": 1},
        "type of dim": lambda _: {"dim": "2"},
        "no dim": lambda _: {"dim": 9},
        "no tensor": lambda _: {"x": "x"},
        "grad": lambda _: {"grad": "mean"},
        "map": lambda _: {"smap": rs.ShardMap.contiguous(99, 2)},
    }

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        whole = torch.arange(2 * ROWS * arena.world, dtype=torch.float64).view(2, -1)
        setting.leaves = [setting.smap.shard(whole, arena.rank, 1)]
        setting.right = whole
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {"dim": 1, "group": setting.group, **changes}
        smap, x = given.pop("smap", setting.smap), given.pop("x", setting.leaves[0])
        return smap.unshard(x, **given)


class Loss(Front):
    name = "masked_mean_loss"
    asks_steps = has_backward = False
    checks = ("ringspan.loss:_check",)
    mistakes: ClassVar[Mistakes] = {
        "unknown keyword": lambda _: {"no_such_argument": 1},
        "no tensor": lambda _: {"losses": [1.0, 2.0, 3.0]},
        "dtype of valid": lambda _: {"valid": torch.ones(ROWS)},
        "type of averaged_by": lambda _: {"averaged_by": "2"},
        "value in the op": lambda _: {"step_valid": 1},
    }

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        setting.leaves = [torch.arange(ROWS, dtype=torch.float64) + ROWS * arena.rank]
        setting.right = torch.tensor((ROWS * arena.world - 1) / 2, dtype=torch.float64)
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {"valid": torch.ones(ROWS, dtype=torch.bool), "group": setting.group, **changes}
        return rs.masked_mean_loss(given.pop("losses", setting.leaves[0]), given.pop("valid"), **given)[1]


class Compiled(Plain):
    """What is raised when the graph runs. What is raised while it is traced is told to nobody."""

    name = "compiled attention"
    takes_mask = False
    checks = encoding = ()
    mistakes: ClassVar[Mistakes] = {
        "number in the op": lambda _: {"sink": sink_of(torch.float64, NOT_A_NUMBER)},
        "lengths": lambda _: {"lengths": torch.tensor([-1, 2])},
    }

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        torch._dynamo.reset()

        def step(q: Any, k: Any, v: Any, sink: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = rs.causal() & rs.documents(lengths=lengths)
            return rs.attention(q, k, v, mask=mask, sink=sink, shard_map=setting.smap, group=setting.group)

        setting.more["step"] = torch.compile(step, fullgraph=True, backend="aot_eager")
        setting.more["lengths"] = torch.tensor([setting.smap.seq_len, 0])
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        given = {"sink": sink_of(self.dtype), "lengths": setting.more["lengths"], **changes}
        return setting.more["step"](*setting.leaves, given["sink"], given["lengths"])


class CompiledContract(ContractInGroup):
    name = "compiled contract"
    mistakes: ClassVar[Mistakes] = {"number in the op": lambda _: {"sink": sink_of(torch.float32, NOT_A_NUMBER)}}

    def prepare(self, arena: Arena) -> Setting:
        setting = super().prepare(arena)
        torch._dynamo.reset()

        def step(q: Any, k: Any, v: Any, sink: torch.Tensor) -> torch.Tensor:
            name = setting.group_name
            return OPS.fusion_attention_v3.cp(q, k, v, 4, "BNSD", scale=0.5, sink=sink, group_name=name)[0]

        setting.more["step"] = torch.compile(step, fullgraph=True, backend="aot_eager")
        return setting

    def call(self, setting: Setting, **changes: Any) -> torch.Tensor:
        return setting.more["step"](*setting.leaves, changes.get("sink", sink_of(self.dtype)))


FRONTS: dict[str, type[Front]] = {
    one.name: one
    for one in (
        Plain, OnDTensors, ContractOnDTensors, ContractInGroup, Flex, Model, Unshard, Loss, Compiled, CompiledContract,
    )
}  # fmt: skip
