"""How a failed run ends: one file that says why, every surviving rank gone with status 1, and nobody left waiting.

    rank 1 runs out of memory      tells the store why, ends
    rank 0 meets a closed socket   finds the cause in the store, writes the file
    rank 2 meets a closed socket   waits until the file is there, ends

If rank 0 is the one that is lost, the next rank writes. A thread watches for the signal by which torchrun ends ranks
and for a run that makes no progress: both find the main thread inside a call that does not return.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch.distributed as dist

from ringspan.bench.config import Config
from ringspan.bench.decision import decide
from ringspan.bench.judge import RunFailed
from ringspan.bench.ranks import is_out_of_memory
from ringspan.bench.result import run_id_in, write_result

# What is a consequence of a failure elsewhere, if there was one.
_SECONDARY = ("lost_peer", "terminated", "stalled")
# torchrun kills a rank 30 s after its signal; all of this has to fit.
_WAIT_FOR_CAUSE_S = 3.0
_WAIT_FOR_FILE_S = 6.0
_WAIT_FOR_MAIN_S = 8.0


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """The entry `failure` for an exception on `rank`."""
    if isinstance(error, RunFailed):
        return {"kind": error.kind, "message": str(error), "rank": None}
    if isinstance(error, dist.DistError):  # PeerError is one, and so are the rendezvous's
        kind = "lost_peer"
    elif is_out_of_memory(error):
        kind = "out_of_memory"
    elif isinstance(error, ValueError | NotImplementedError):
        kind = "bad_configuration"
    else:
        kind = "terminated" if isinstance(error, KeyboardInterrupt) else "error"
    return {"kind": kind, "message": f"{type(error).__name__}: {error}".strip(), "rank": rank}


class Reporter:
    """Writes the file of a failed run, once. `record` is the result so far.

    `store` is shared by all ranks; None until they have found each other.
    """

    def __init__(self, config: Config, record: dict[str, Any], store: dist.Store | None = None) -> None:
        self.config, self.record, self.store = config, record, store
        self._claim = threading.Lock()
        self._concluded = threading.Event()
        self._last_beat = time.monotonic()

    def beat(self) -> None:
        """The run makes progress."""
        self._last_beat = time.monotonic()

    def watch(self) -> None:
        """From now on SIGTERM and a standstill end the run with a file. Call it from the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The handler does nothing; the number of the signal arrives in the pipe, whatever the main thread is doing.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def succeed(self) -> None:
        """The run is over, and nothing is to be reported any more."""
        self._claim.acquire(blocking=False)
        self._concluded.set()

    def conclude(self, failure: dict[str, Any]) -> None:
        """Finds out what came first and sees to it that the file is written; the rank that writes prints it too."""
        if not self._claim.acquire(blocking=False):
            self._concluded.wait(_WAIT_FOR_CAUSE_S + _WAIT_FOR_FILE_S)
            return
        try:
            self._write_if_due(self._first_cause(failure))
        finally:
            self._concluded.set()

    def _first_cause(self, failure: dict[str, Any]) -> dict[str, Any]:
        rank, world, store = self.config.rank, self.config.world, self.store
        if store is None:
            return failure
        with contextlib.suppress(Exception):  # without a store this rank's own view is the best there is
            store.set(f"survivor/{rank}", "1")
            if failure["kind"] not in _SECONDARY:
                return json.loads(store.compare_set("cause", "", json.dumps(failure)))
            silent = [other for other in range(world) if other != rank]
            end = time.monotonic() + _WAIT_FOR_CAUSE_S
            while time.monotonic() < end and silent:
                if store.check(["cause"]):
                    return json.loads(store.get("cause"))
                silent = [other for other in silent if not store.check([f"survivor/{other}"])]
                time.sleep(0.05)
            if silent and len(silent) < world:
                text = f"no word from rank {', '.join(map(str, silent))}; {failure['message']}"
                return {"kind": "lost_peer", "message": text, "rank": silent[0]}
        return failure

    def _write_if_due(self, failure: dict[str, Any]) -> None:
        rank, output = self.config.rank, self.config.output
        if rank > 0:
            end = time.monotonic() + _WAIT_FOR_FILE_S + min(rank, 8)
            while time.monotonic() < end:
                if run_id_in(output) == self.record["run"]["id"]:
                    return
                time.sleep(0.1)
        record = json.loads(json.dumps(self.record))
        record["failure"] = failure
        paths = record["metrics"]["paths"]
        record["decision"] = decide(paths, self.config.world, self.config.repeats, failure)
        try:
            write_result(output, record, self.config.force)
        except (OSError, ValueError) as error:
            print(f"the failure could not be written to {output}: {error}", file=sys.stderr, flush=True)
        print(f"ringspan.bench failed: {record['decision']['reason']}", file=sys.stderr, flush=True)

    def _watch(self, reader: int) -> None:
        # All collectives of one step may take their full time, and a step computes as well.
        limit = 2 * self.config.timeout_s + 60
        while True:
            ready, _, _ = select.select([reader], [], [], 1.0)
            if ready and signal.SIGTERM in os.read(reader, 64):
                message = "SIGTERM; torchrun sends it to every rank when one has failed"
                self._end({"kind": "terminated", "message": message, "rank": self.config.rank})
            if time.monotonic() - self._last_beat > limit and not self._concluded.is_set():
                message = f"no progress for {limit:.0f} s in {_place_of_main()}"
                self._end({"kind": "stalled", "message": message, "rank": self.config.rank})

    def _end(self, failure: dict[str, Any]) -> None:
        """Leaves the main thread some time to fail by itself, because it knows more; then ends the process."""
        if not self._concluded.wait(_WAIT_FOR_MAIN_S if failure["kind"] == "terminated" else 0):
            self.conclude(failure)
            os._exit(1)


def _place_of_main() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    last = traceback.extract_stack(frame)[-1] if frame else None
    return f"{last.name}, line {last.lineno}" if last else "an unknown place"
