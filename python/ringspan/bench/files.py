"""How every measurement is written to disk."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any, allow_nan: bool = False) -> None:
    """Writes `content` to `path`, whole or not at all; folders are made. ValueError for a NaN that is not allowed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=allow_nan)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
