"""One process of a run: trains the model on this rank's rows and reports every step."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from config import RunConfig
from data import Corpus, Sequence, draw_sequence, load_corpus
from launch import Report
from model import Decoder
from torch import Tensor, nn
from wire import CountedGroup

import ringspan as rs

Tell = Callable[[Report], None]


def run_rank(rank: int, config: RunConfig, port: int, tell: Tell) -> None:
    """Trains as `rank` of `config.world`; the parent process holds the store at `port`."""
    torch.set_num_threads(config.threads)
    if config.world == 1:
        Trainer(rank, config).run(tell)
        return
    timeout = timedelta(seconds=config.group_timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.world, timeout=timeout)
    # Attention talks over a group of its own, so that its bytes can be told from those of losses and gradients.
    Trainer(rank, config, dist.group.WORLD, CountedGroup(timeout)).run(tell)
    dist.destroy_process_group()


class Trainer:
    """One rank's model, text and share of the sequence. Both groups are None for one process."""

    def __init__(
        self,
        rank: int,
        config: RunConfig,
        world_group: dist.ProcessGroup | None = None,
        counted: CountedGroup | None = None,
    ) -> None:
        self.rank, self.config, self.world_group, self.counted = rank, config, world_group, counted
        self.smap = rs.ShardMap.head_tail(config.seq_len, config.world)
        self.positions = self.smap.positions(rank)
        torch.manual_seed(config.seed)
        self.model = Decoder(config.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
        self.corpus = load_corpus()

    def run(self, tell: Tell) -> None:
        """All steps, each reported; then the totals of this rank."""
        planned_bytes = 0
        sent_before = self._sent_bytes()
        reset_peak_memory()
        for step in range(self.config.steps):
            begin = time.perf_counter()
            sequence = draw_sequence(self.corpus, self.config.seq_len, self.config.seed, step)
            mask = make_mask(self.config, sequence)
            loss = self._train_step(sequence, mask)
            tell(("step", self.rank, {"step": step, "loss": loss, "seconds": time.perf_counter() - begin}))
            planned_bytes += planned_step_bytes(self.config, mask, self.smap, self.rank)
        sent = self._sent_bytes()
        totals = {
            "sent_bytes": None if sent is None else sent - sent_before,
            "planned_bytes": planned_bytes,
            "peak_memory_bytes": peak_memory_bytes(),
            **describe_run(self.model, self.corpus),
        }
        tell(("done", self.rank, totals))

    def _train_step(self, sequence: Sequence, mask: rs.Mask) -> float:
        """One step on this rank's rows. Returns the mean loss over the valid tokens of the whole sequence."""
        inputs, targets, valid = (
            self.smap.shard(whole, self.rank, dim=1) for whole in (sequence.inputs, sequence.targets, sequence.valid)
        )
        group = self.counted.group if self.counted else rs.LOCAL

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return rs.attention(query, key, value, mask=mask, shard_map=self.smap, group=group, layout="BSND")

        logits = self.model(inputs, self.positions, attention)
        loss_per_token = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss, mean = rs.masked_mean_loss(loss_per_token, valid.flatten(), group=self.world_group or rs.LOCAL)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.world_group is not None:
            sum_gradients(self.model, self.world_group)
        self.optimizer.step()
        return mean.item()

    def _sent_bytes(self) -> int | None:
        return self.counted.sent_bytes() if self.counted else 0


def sum_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every rank holds all parameters and saw its own rows: the gradient of the whole loss is the sum."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def make_mask(config: RunConfig, sequence: Sequence) -> rs.Mask:
    """Causal over the whole sequence, or inside of each file."""
    if config.mask == "documents":
        return rs.documents(lengths=sequence.file_lengths, inside=rs.causal())
    return rs.causal()


def planned_step_bytes(config: RunConfig, mask: rs.Mask, smap: rs.ShardMap, rank: int) -> int:
    """What the plan says that `rank` sends in one step: every layer, forward and backward."""
    sizes = config.model
    query = (1, config.seq_len, sizes.heads, sizes.head_dim)
    key = (1, config.seq_len, sizes.kv_heads, sizes.head_dim)
    sent = rs.plan(query, key, key, mask=mask, shard_map=smap, layout="BSND").sent_bytes(rank)
    return sizes.layers * (sent.forward + sent.backward)


def reset_peak_memory() -> None:
    """Begins a new peak, where the system allows it; else the peak is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_bytes() -> int:
    """The largest resident memory since `reset_peak_memory`."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_run(model: nn.Module, corpus: Corpus) -> dict[str, Any]:
    """What the report says about model, text and software."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus_bytes": corpus.text.numel(),
        "corpus_files": corpus.num_files,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ringspan": importlib.metadata.version("ringspan"),
        },
        "instruction_set": torch.ops.ringspan._isa(),
    }
