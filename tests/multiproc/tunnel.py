"""Two networks with one host each, joined by a link whose delay, loss and cuts a test decides.

    namespace 0                       a process of its own                     namespace 1
    10.77.0.1  ==TUN device==>  read, lose, hold for the delay, write  ==TUN device==>  10.77.0.2

Both namespaces live as long as the process that holds their devices, and have no names that could be left behind. Ranks
enter a namespace by its file (failing_jobs.Join). Needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from failing_ranks import WATCHDOG_S
from pool import forking_context

INTERFACE = "link"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# From the kernel's headers: sched.h, if_tun.h, sockios.h, if.h.
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_MTU = 1500
_BURST = 64  # packets that are read from one side before the other has its turn


class Unavailable(Exception):
    """This machine, or this user, cannot have such a network."""


@dataclass(frozen=True)
class Link:
    """delay_s: of each packet. loss: share of packets. is_cut: none passes, and nobody is told."""

    delay_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


class Counts(NamedTuple):
    """Of packets since the tunnel was made, and when they were read."""

    at: float
    passed: int
    lost: int


class Tunnel:
    """A context manager. Unavailable where it cannot be made."""

    def __init__(self) -> None:
        self._pipe, theirs = forking_context().Pipe()
        self._process = forking_context().Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(WATCHDOG_S), "the process of the tunnel has not started"
        answer = self._pipe.recv()
        if isinstance(answer, OSError):
            self.close()
            raise Unavailable(f"two joined networks need root and /dev/net/tun: {answer}")
        self.namespaces = [f"/proc/{self._process.pid}/fd/{descriptor}" for descriptor in answer]

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, link: Link) -> Counts:
        """The link is like this from now on; the counts until then."""
        self._pipe.send(link)
        assert self._pipe.poll(WATCHDOG_S), "the tunnel does not answer"
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    """A tunnel's life: it tells the descriptors of both namespaces, then passes packets on until the pipe ends."""
    try:
        ends = [_make_end(address) for address in ADDRESSES]
    except OSError as error:
        pipe.send(error)
        return
    pipe.send([namespace for namespace, _ in ends])
    devices = [device for _, device in ends]
    link, chance = Link(), random.Random(1)
    held: list[tuple[float, int, int, bytes]] = []  # due, number, device, packet
    passed = lost = 0
    while True:
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, _, device, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):  # its namespace has closed the door: as good as lost
                os.write(device, packet)
        ready, _, _ = select.select([pipe, *devices], [], [], held[0][0] - now if held else None)
        if pipe in ready:
            try:
                link = pipe.recv()
            except EOFError:
                return
            pipe.send(Counts(time.monotonic(), passed, lost))
        for side, device in enumerate(devices):
            for packet in _read_some(device) if device in ready else ():
                if link.is_cut or chance.random() < link.loss:
                    lost += 1
                    continue
                passed += 1
                heapq.heappush(held, (time.monotonic() + link.delay_s, passed, devices[1 - side], packet))


def _read_some(device: int) -> list[bytes]:
    packets = []
    with contextlib.suppress(BlockingIOError):
        while len(packets) < _BURST:
            packets.append(os.read(device, 2 * _MTU))
    return packets


def _make_end(address: str) -> tuple[int, int]:
    """A new namespace of the calling thread with one device of this address: descriptors of both."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = INTERFACE.encode()
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def tell(request: int, interface: bytes, value: Any) -> None:
            fcntl.ioctl(control, request, struct.pack("16s24s", interface, value))

        for request, dotted in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
            tell(request, name, struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(dotted)))
        tell(_SIOCSIFMTU, name, struct.pack("i", _MTU))
        for interface in (name, b"lo"):
            tell(_SIOCSIFFLAGS, interface, struct.pack("H", _IFF_UP | _IFF_RUNNING))
    return os.open("/proc/self/ns/net", os.O_RDONLY), device
