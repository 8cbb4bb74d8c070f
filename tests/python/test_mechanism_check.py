"""The exercise of ringspan.mechanism: what its check says about right, unwritten and wrong solutions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ringspan.mechanism import __main__ as command
from ringspan.mechanism.check import Unreadable, agree, answer_of, check, load
from ringspan.mechanism.lessons import LESSONS

SPLIT, LOCAL, MERGE, LEDGER = (lesson.name for lesson in LESSONS)

# A solution in other words than the package's own.
RIGHT = """
import torch

def _exp(numbers, base):
    return torch.exp(numbers - torch.nan_to_num(base, neginf=0.0))

def split_sequence_contiguous(tensor, cp_size):
    if cp_size < 1 or tensor.shape[-2] % cp_size:
        raise ValueError("no equal parts")
    return tensor.chunk(cp_size, dim=-2)

def local_softmax_statistics(scores, value_shard):
    top, _ = torch.max(scores, -1, keepdim=True)
    weights = _exp(scores, top)
    return [top, weights.sum(-1, keepdim=True), torch.einsum("...qk,...kd->...qd", weights, value_shard)]

def merge_softmax_statistics(running, local):
    if running is None:
        return local
    tops = torch.cat([running[0], local[0]], -1)
    top = tops.amax(-1, keepdim=True)
    old, new = _exp(tops, top).unsqueeze(-2).unbind(-1)
    return top, running[1] * old + local[1] * new, running[2] * old + local[2] * new

def estimate_ring_kv_communication(sequence_length, hidden_size, dtype_bytes, cp_size):
    if 0 in (sequence_length, hidden_size, dtype_bytes, cp_size) or sequence_length % cp_size:
        raise ValueError("no equal parts")
    part = sequence_length // cp_size
    payload = part * hidden_size * dtype_bytes + part * hidden_size * dtype_bytes
    return dict(local_sequence_length=part, rounds=cp_size - 1, payload_per_round_bytes=payload,
                total_payload_per_rank_bytes=payload * cp_size - payload)
"""

# name: (function, its wrong text, words of the case that catches it, words of the hint)
WRONG = {
    "drops the tail": (
        SPLIT,
        """
def split_sequence_contiguous(tensor, cp_size):
    if cp_size < 1:
        raise ValueError
    n = tensor.shape[-2] // cp_size
    return [tensor[..., i * n : i * n + n, :] for i in range(cp_size)]
""",
        "three positions",
        "on no rank",
    ),
    "uneven parts": (
        SPLIT,
        """
def split_sequence_contiguous(tensor, cp_size):
    if cp_size < 1:
        raise ValueError
    return torch.tensor_split(tensor, cp_size, dim=-2)
""",
        "three positions",
        "not equal",
    ),
    "deals cards": (
        SPLIT,
        "def split_sequence_contiguous(tensor, cp_size): return [tensor[..., r::cp_size, :] for r in range(cp_size)]",
        "six positions",
        "take turns",
    ),
    "length for count": (
        SPLIT,
        "def split_sequence_contiguous(tensor, cp_size): return tensor.split(cp_size, dim=-2)",
        "two positions",
        "number of parts",
    ),
    "splits the batch": (
        SPLIT,
        "def split_sequence_contiguous(tensor, cp_size): return torch.tensor_split(tensor, cp_size)",
        "batch and features",
        "from the end",
    ),
    "softmax in the part": (
        LOCAL,
        """
def local_softmax_statistics(scores, value_shard):
    top = scores.amax(-1, keepdim=True)
    return top, torch.exp(scores - top).sum(-1, keepdim=True), torch.softmax(scores, -1) @ value_shard
""",
        "two keys",
        "divided already",
    ),
    "no max": (
        LOCAL,
        """
def local_softmax_statistics(scores, value_shard):
    weights = scores.exp()
    return scores.amax(-1, keepdim=True), weights.sum(-1, keepdim=True), weights @ value_shard
""",
        "one key",
        "relative to the largest",
    ),
    "max of all queries": (
        LOCAL,
        """
def local_softmax_statistics(scores, value_shard):
    top = scores.max().expand(*scores.shape[:-1], 1)
    weights = torch.exp(scores - top)
    return top, weights.sum(-1, keepdim=True), weights @ value_shard
""",
        "two queries",
        "every query",
    ),
    "axis lost": (
        LOCAL,
        """
def local_softmax_statistics(scores, value_shard):
    top = scores.amax(-1)
    weights = torch.exp(scores - top[..., None])
    return top, weights.sum(-1), weights @ value_shard
""",
        "one key",
        "axis is gone",
    ),
    "nan without keys": (
        LOCAL,
        """
def local_softmax_statistics(scores, value_shard):
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return top, weights.sum(-1, keepdim=True), weights @ value_shard
""",
        "sees no key",
        "-inf minus -inf",
    ),
    "changes its argument": (
        LOCAL,
        """
def local_softmax_statistics(scores, value_shard):
    top = scores.amax(-1, keepdim=True)
    scores -= torch.nan_to_num(top, neginf=0.0)
    weights = torch.exp(scores)
    return top, weights.sum(-1, keepdim=True), weights @ value_shard
""",
        "one key",
        "changed in place",
    ),
    "averages the parts": (
        MERGE,
        """
def merge_softmax_statistics(running, local):
    if running is None:
        return local
    return torch.maximum(running[0], local[0]), running[1] * 0 + 1, (running[2] / running[1] + local[2] / local[1]) / 2
""",
        "equal largest",
        "average",
    ),
    "adds without scaling": (
        MERGE,
        """
def merge_softmax_statistics(running, local):
    if running is None:
        return local
    return torch.maximum(running[0], local[0]), running[1] + local[1], running[2] + local[2]
""",
        "new part has the larger",
        "not to the same one",
    ),
    "factors turned around": (
        MERGE,
        """
def merge_softmax_statistics(running, local):
    if running is None:
        return local
    top = torch.maximum(running[0], local[0])
    a, b = torch.exp(top - running[0]), torch.exp(top - local[0])
    return top, running[1] * a + local[1] * b, running[2] * a + local[2] * b
""",
        "new part has the larger",
        "turned around",
    ),
    "scales the old side only": (
        MERGE,
        """
def merge_softmax_statistics(running, local):
    if running is None:
        return local
    top = torch.maximum(running[0], local[0])
    a = torch.exp(running[0] - top)
    return top, running[1] * a + local[1], running[2] * a + local[2]
""",
        "old part has the larger",
        "one side",
    ),
    "nan of two empty sides": (
        MERGE,
        """
def merge_softmax_statistics(running, local):
    if running is None:
        return local
    top = torch.maximum(running[0], local[0])
    a, b = torch.exp(running[0] - top), torch.exp(local[0] - top)
    return top, running[1] * a + local[1] * b, running[2] * a + local[2] * b
""",
        "neither side",
        "-inf minus -inf",
    ),
    "no first part": (
        MERGE,
        "def merge_softmax_statistics(running, local): return running[0], running[1], running[2]",
        "the first part",
        "there is None",
    ),
    "P rounds": (LEDGER, "P", "one rank", "turns too often"),
    "P rounds in the total": (LEDGER, "P - 1 and P", "one rank", "turns too often"),
    "keys only": (LEDGER, "keys", "one rank", "besides the keys"),
    "whole sequence": (LEDGER, "sequence", "two ranks", "not the whole sequence"),
    "all ranks": (LEDGER, "all", "two ranks", "of one rank"),
    "no bytes": (LEDGER, "numbers", "one rank", "How large"),
    "refuses nothing": (LEDGER, "unchecked", "three positions", "refused"),
    "fractions": (
        LEDGER,
        """
def estimate_ring_kv_communication(sequence_length, hidden_size, dtype_bytes, cp_size):
    n = sequence_length / cp_size
    return dict(local_sequence_length=n, rounds=cp_size - 1, payload_per_round_bytes=2 * n * hidden_size * dtype_bytes,
                total_payload_per_rank_bytes=(cp_size - 1) * 2 * n * hidden_size * dtype_bytes)
""",
        "one rank",
        "three ranks in a circle",
    ),
}
LEDGER_FORMULAS = {
    "P": ("cp_size", "2 * n * h", "rounds * payload"),
    "P - 1 and P": ("cp_size - 1", "2 * n * h", "cp_size * payload"),
    "keys": ("cp_size - 1", "n * h", "rounds * payload"),
    "sequence": ("cp_size - 1", "2 * sequence_length * h", "rounds * payload"),
    "all": ("cp_size - 1", "2 * n * h", "rounds * payload * cp_size"),
    "numbers": ("cp_size - 1", "2 * n * hidden_size", "rounds * payload"),
    "unchecked": ("cp_size - 1", "2 * n * h", "rounds * payload"),
}


def ledger_source(kind: str) -> str:
    rounds, payload, total = LEDGER_FORMULAS[kind]
    guard = "" if kind == "unchecked" else "if sequence_length % cp_size or h * sequence_length == 0: raise ValueError"
    return f"""
def estimate_ring_kv_communication(sequence_length, hidden_size, dtype_bytes, cp_size):
    h = hidden_size * dtype_bytes
    {guard}
    n, rounds = sequence_length // cp_size, {rounds}
    payload = {payload}
    return dict(local_sequence_length=n, rounds=rounds, payload_per_round_bytes=payload,
                total_payload_per_rank_bytes={total})
"""


def written(folder: Path, source: str) -> Path:
    path = folder / "solution.py"
    path.write_text(source)
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_caught_with_a_fitting_hint(name, tmp_path):
    function, source, case, hint = WRONG[name]
    source = ledger_source(source) if source in LEDGER_FORMULAS else source
    verdicts = {verdict.name: verdict for verdict in check(load(written(tmp_path, RIGHT + source)))}
    assert [verdict.name for verdict in verdicts.values() if verdict.fault is not None] == [function]
    fault = verdicts[function].fault
    assert hint in fault.hint
    assert case in fault.case.shows
    assert fault.expected != fault.got
    assert verdicts[function].held < verdicts[function].cases


def test_every_hint_of_a_mistake_belongs_to_a_wronganswer_of():
    """A mistake that gave a right answer on every case would blame the innocent."""
    for lesson in LESSONS:
        for mistake in lesson.mistakes:
            assert any(
                not agree(answer_of(mistake.wrong, case.arguments), answer_of(lesson.right, case.arguments))
                for case in lesson.cases
            ), mistake.hint


def test_a_solution_in_other_words_passes(tmp_path, capsys):
    assert command.main(["--check", str(written(tmp_path, RIGHT))]) == 0
    assert "All four hold" in capsys.readouterr().out


def test_the_reference_passes(tmp_path):
    assert all(verdict.fault is None for verdict in check(load(written(tmp_path, "from ringspan.mechanism import *"))))


def test_the_untouched_exercise_fails_and_says_what_to_do(tmp_path):
    path = tmp_path / "exercise.py"
    run = [sys.executable, "-m", "ringspan.mechanism"]
    done = subprocess.run([*run, "--exercise", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"--check {path}" in done.stdout
    done = subprocess.run([*run, "--check", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("does not hold") == 4
    assert done.stdout.count("Not written yet") == 4
    assert not list(tmp_path.glob("__pycache__"))


def test_an_existing_file_is_left_alone(tmp_path, capsys):
    path = written(tmp_path, "mine")
    assert command.main(["--exercise", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n", "line 1"),
        ("\nimport no_such_module\n", "no_such_module"),
        ("raise SystemExit(0)", "SystemExit"),
        ("1 / 0", "ZeroDivisionError"),
        (None, "not there"),
    ],
)
def test_a_file_that_cannot_be_run(source, words, tmp_path, capsys):
    path = tmp_path / "gone.py" if source is None else written(tmp_path, source)
    assert command.main(["--check", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_is_no_file(tmp_path, capsys):
    assert command.main(["--check", str(tmp_path)]) == 2
    assert "a folder" in capsys.readouterr().err
    assert command.main(["--exercise", str(tmp_path / "none" / "new.py")]) == 2
    with pytest.raises(Unreadable):
        load(tmp_path)


@pytest.mark.parametrize("arguments", [[], ["--check"], ["--check", "a", "--exercise", "b"], ["file.py"]])
def test_bad_arguments_end_with_2(arguments):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2


def test_a_missing_function_and_a_crash_are_reported(tmp_path, capsys):
    source = RIGHT + f"\ndel {LEDGER}\ndef {MERGE}(running, local): raise SystemExit('[bold]')\n"
    assert command.main(["--check", str(written(tmp_path, source))]) == 1
    printed = capsys.readouterr().out
    assert f"defines no function {LEDGER}" in printed.replace("\n", " ")
    assert "SystemExit: [bold]" in printed


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.ones(2), torch.ones(2, 1)),
        (torch.tensor([float("nan")]), torch.ones(1)),
        (1.0, torch.ones(1)),
        ((1, 2), [1, 2, 3]),
        ({"a": 1}, {"a": 1, "b": 2}),
        (2.0, 2),
        (0, None),
        (ValueError(), 1),
        (1, ValueError()),
    ],
)
def test_answers_that_differ(got, expected):
    assert not agree(got, expected)
