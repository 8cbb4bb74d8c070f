"""The exceptions of the package.

- `ValueError`: an argument is wrong; the message holds both values and what to do.
- `NotImplementedError`: the call is refused by design or is not offered yet (see `support`).
- `PeerError`: a peer was lost or stalled; the message names rank, peer, step and transfer. The group
  is dead if that happened inside an exchange.
"""

from torch.distributed import DistBackendError as PeerError

__all__ = ["PeerError"]
