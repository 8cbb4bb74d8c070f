"""A race of ProcessGroupGloo that kills processes (docs/gloo-race.md), made likely: who dies of it, and who does not.

Each rank is a process of its own, in which gloo_race/delay.c delays the workers of gloo at the one place where the race
is. Delays are a schedule that a busy machine may take by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
WATCHDOG_S = 40
TRIES = 3  # of what must die
# The releases in which the race was found; later ones may have mended it.
WITH_THE_RACE = [(2, minor) for minor in range(8, 15)]
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
# Rounds and the longest delay, in microseconds. A delay must outlast what comes before the next exchange: with
# attention that is an agreement of the ranks.
COLLECTIVES = ("300", "200")
ATTENTION = ("100", "8000")


@dataclass(frozen=True)
class Ended:
    """How a rank ended. status: of the process, or minus the signal; None where the test ended it."""

    status: int | None
    text: str

    @property
    def died(self) -> bool:
        return self.status is not None and self.status < 0

    @property
    def told(self) -> dict:
        """What a rank that came to its end says."""
        assert self.status == 0, f"status {self.status}\n{self.text[-4000:]}"
        return json.loads(self.text.splitlines()[-1])


@pytest.fixture(scope="module")
def delays(tmp_path_factory) -> Path:
    """The library to preload."""
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("delays are preloaded: Linux and a C compiler are needed")
    library = tmp_path_factory.mktemp("gloo_race") / "delay.so"
    # Without -fno-builtin the compiler may make its memmove a call of memcpy again.
    flags = ["-O1", "-Wall", "-fno-builtin", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, HERE / "gloo_race" / "delay.c", "-ldl"], check=True, timeout=60)
    return library


def run(delays: Path, job: str, world: int, size: tuple[str, str]) -> list[Ended]:
    """The ranks of one job, until all have ended, one has died, or the time is up."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {"LD_PRELOAD": str(delays), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [delays.with_name(f"{job}-{rank}") for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, HERE / "gloo_race_jobs.py", job, str(rank), str(world), str(store.port), *size]
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in ranks]
        if None not in statuses or any(status is not None and status < 0 for status in statuses):
            break
        time.sleep(0.05)
    statuses = [process.poll() for process in ranks]
    for process in ranks:
        process.kill()
        process.wait()
    return [Ended(status, log.read_text(errors="replace")) for status, log in zip(statuses, logs, strict=True)]


def naps_of(ended: Ended) -> int:
    """How often a worker was delayed; skips where the place of the race is not in this build of PyTorch."""
    told = ended.told
    if "missing" in told:
        pytest.skip(f"ProcessGroupGloo::runLoop: {told['missing']}")
    if told["naps"] == 0:
        pytest.skip("ProcessGroupGloo::runLoop copies no name by memcpy in this build of PyTorch")
    return told["naps"]


def assert_dies(delays: Path, job: str, world: int, size: tuple[str, str]) -> None:
    """One of the ranks is ended by a signal within some tries."""
    for _ in range(TRIES):
        ended = run(delays, job, world, size)
        if any(one.died for one in ended):
            return
        for one in ended:
            if one.status == 0:
                naps_of(one)
    if VERSION not in WITH_THE_RACE:
        pytest.skip(f"PyTorch {torch.__version__} is none of the releases that are known to have the race")
    raise AssertionError(f"{TRIES} times nobody died:\n" + "\n".join(f"{one.status}\n{one.text}" for one in ended))


def test_functional_collectives_of_pytorch_die(delays):
    """No peer and nothing of ringspan."""
    assert_dies(delays, "functional", 1, COLLECTIVES)


def test_the_same_exchanges_under_short_names_live(delays):
    """Delays alone harm nobody."""
    [ended] = run(delays, "short", 1, COLLECTIVES)
    assert naps_of(ended) > 1000


def test_functional_collectives_live_with_one_worker_thread(delays):
    """As docs/gloo-race.md makes such a group."""
    [ended] = run(delays, "one_thread", 1, COLLECTIVES)
    assert naps_of(ended) > 1000


def test_attention_lives(delays):
    """Schedule gather, forward and backward, and unshard."""
    for ended in run(delays, "attention", 2, ATTENTION):
        assert naps_of(ended) >= 100
        assert ended.told["error"] < 1e-5


def test_attention_by_functional_ops_would_die(delays):
    """The same rounds come to the race: under CommDebugMode, where collectives are the functional ones."""
    assert_dies(delays, "counted", 2, ATTENTION)
