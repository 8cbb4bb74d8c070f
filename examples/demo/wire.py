"""What a process group really sent: the operating system's own count of each of its TCP connections.

The count includes the transport's message headers, so it is slightly above the payload, and it owes nothing to the
library that it is to judge.
"""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

# struct tcp_info of linux/tcp.h (4.19 and later): tcpi_bytes_sent and tcpi_bytes_retrans, 64 bits each, at byte 200.
_TCP_INFO_SIZE = 216
_BYTES_SENT_OFFSET = 200


class CountedGroup:
    """A group over all ranks whose connections serve nothing but what is to be counted. Made by all ranks together."""

    def __init__(self, timeout: timedelta) -> None:
        before = set(_bytes_sent())
        self.group = dist.new_group(timeout=timeout)
        dist.barrier()
        self._descriptors = set(_bytes_sent()) - before

    def sent_bytes(self) -> int | None:
        """Bytes that this rank has sent to its peers so far, none twice; None where the system does not tell."""
        sent = _bytes_sent()
        found = [sent[descriptor] for descriptor in self._descriptors if descriptor in sent]
        return sum(found) if found else None


def _bytes_sent() -> dict[int, int]:
    """Descriptor of each connected TCP socket of this process -> bytes sent, without those that were sent again."""
    counts: dict[int, int] = {}
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return counts
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        except OSError:  # closed meanwhile, or listening only
            continue
        if len(info) == _TCP_INFO_SIZE:
            sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT_OFFSET)
            counts[int(name)] = sent - again
    return counts
