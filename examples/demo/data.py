"""Real text that is on every machine: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """All files one after the other: `text` uint8 [bytes], `file_of` int32 [bytes] tells which file a byte is of."""

    text: Tensor
    file_of: Tensor
    num_files: int


@dataclass(frozen=True)
class Sequence:
    """One training sequence, whole: int64 [1, seq_len] inputs and targets, bool [1, seq_len] valid.

    The target of a position is the byte after it; it is not valid where that byte belongs to the next file.
    `file_lengths`: bytes of each file in the inputs, in order.
    """

    inputs: Tensor
    targets: Tensor
    valid: Tensor
    file_lengths: list[int]


def load_corpus(folder: Path | None = None) -> Corpus:
    """Reads the modules at the top of `folder` (default: the standard library), sorted by name."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    contents = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    contents = [content for content in contents if content]
    if not contents:
        raise ValueError(f"no .py files with text in {folder}")
    sizes = torch.tensor([len(content) for content in contents])
    text = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    file_of = torch.repeat_interleave(torch.arange(len(contents), dtype=torch.int32), sizes)
    return Corpus(text, file_of, len(contents))


def draw_sequence(corpus: Corpus, seq_len: int, seed: int, step: int) -> Sequence:
    """The sequence of one step: the same on every rank and in every run with this seed."""
    num_starts = corpus.text.numel() - seq_len
    if num_starts < 1:
        raise ValueError(f"seq_len is {seq_len}, but the text has only {corpus.text.numel()} bytes")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    start = int(torch.randint(num_starts, (1,), generator=generator))
    window = corpus.text[start : start + seq_len + 1].long()
    file_of = corpus.file_of[start : start + seq_len + 1]
    lengths = torch.unique_consecutive(file_of[:-1], return_counts=True)[1]
    valid = file_of[:-1] == file_of[1:]
    return Sequence(window[None, :-1], window[None, 1:], valid[None], lengths.tolist())
