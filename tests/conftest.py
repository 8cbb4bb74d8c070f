"""Paths of the helper modules, and the pool of processes that the whole session shares."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

# Four processes that share two cores: the oracle's matrix products must not bring threads of their own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# PyTorch's store asks for the host name of each client that connects. Where nobody answers that takes 5 s otherwise, in
# which the store serves nobody.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest
import torch
from ringspan.bench.host import describe_host

for folder in ("", "python", "multiproc"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from gloo_threads import use_one_thread  # noqa: E402  found by the paths above
from pool import Pool  # noqa: E402

from quick import QUICK  # noqa: E402

torch.set_num_threads(1)
use_one_thread()

ROOT = Path(__file__).resolve().parent.parent


def keep_compiled_graphs() -> None:
    """Between runs, for as long as the library is the same: graphs call its ops by the schemas that it had."""
    library = importlib.util.find_spec("ringspan._C")
    digest = hashlib.sha256(Path(library.origin).read_bytes()).hexdigest()[:12]
    kept = ROOT / "build" / "inductor" / digest
    for older in kept.parent.glob("*"):
        if older != kept:
            shutil.rmtree(older, ignore_errors=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))


keep_compiled_graphs()


def pytest_report_header() -> str:
    """A failure elsewhere may be one of its machine."""
    about = describe_host()
    return f"{about['cpu']}, {about['cores']} cores, {about['instruction_set']}, torch {about['torch']}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `make test-quick`."""
    parser.addoption("--quick", action="store_true", help="some tests of every front: those that tests/quick.py names")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not to run is not imported."""
    if not config.getoption("--quick") or collection_path.is_dir():
        return None
    return collection_path.relative_to(ROOT / "tests").as_posix() not in QUICK or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of a file that are not among its quick ones."""
    if not config.getoption("--quick"):
        return
    chosen = [item for item in items if _is_quick(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _is_quick(item: pytest.Item) -> bool:
    names = QUICK[item.path.relative_to(ROOT / "tests").as_posix()]
    return (names is None or item.name.partition("[")[0] in names) and item.get_closest_marker("slow") is None


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """See `Pool`; nothing starts before the first job."""
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def profiled_pool() -> Iterator[Pool]:
    """Processes for jobs that profile: they end with the module, and nothing else runs in them.

    Each process of the shared pool that ever crashed had profiled before, minutes earlier, in another test. PyTorch's
    profiler has known races with other threads when it stops (such as pytorch/pytorch#187483); that this was one of
    them is likely and not proven.
    """
    pool = Pool()
    yield pool
    pool.stop()
