"""How every measurement is written to disk."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any, allow_nan: bool = False) -> None:
    """Writes `content` to `path`, whole or not at all; folders are made. ValueError for a NaN that is not allowed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=allow_nan)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is closed to all others; a result is to be read like any file of this user.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
