"""The demo: text, model and comparison by themselves, then a tiny run as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"


@pytest.fixture(autouse=True)
def demo_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO))


@pytest.mark.slow
def test_a_tiny_run_agrees_and_sends_what_the_plan_says(tmp_path: Path) -> None:
    world = 2
    options = ["--quick", "--steps", "2", "--seq-len", "301", "--world", str(world), "--mask", "documents"]
    command = [sys.executable, str(DEMO / "train.py"), *options, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["max_relative_loss_difference"] <= 1e-4
    assert [step["step"] for step in report["steps"]] == [0, 1]
    assert min(report["tokens_per_second"].values()) > 0
    assert len(report["peak_memory_per_rank_bytes"]) == world
    assert all(peak > 1 << 20 for peak in report["peak_memory_per_rank_bytes"])
    for sent, planned in zip(report["bytes_sent_per_rank"], report["planned_bytes_per_rank"], strict=True):
        assert planned > 0
        assert sent is None or sent >= planned
    for field in ("machine", "versions", "command", "date", "instruction_set"):
        assert report[field]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--world", "-1"], ["--mask", "none"]])
def test_bad_arguments_end_with_2(arguments: list[str]) -> None:
    from train import parse_arguments

    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_its_traceback() -> None:
    from config import RunConfig
    from launch import RunFailed, launch

    with pytest.raises(RunFailed, match=r"(?s)rank 0 of 1 failed.*seq_len is 20000000"):
        launch(RunConfig(seq_len=20_000_000, steps=1), on_step=lambda result: None)


def make_report(one: list[float], many: list[float], sent: int | None = 1_000_000, planned: int = 1_000_000) -> dict:
    from report import relative_differences

    differences = relative_differences(one, many)
    steps = [{"step": step, "relative_difference": difference} for step, difference in enumerate(differences)]
    return {
        "max_relative_loss_difference": max(differences),
        "steps": steps,
        "bytes_sent_per_rank": [sent],
        "planned_bytes_per_rank": [planned],
    }


@pytest.mark.parametrize(
    ("one", "many", "words"),
    [
        ([5.0, 4.0], [5.0, 4.0003], []),
        ([5.0, 4.0], [5.0, 4.0005], ["step 1"]),
        ([5.0, 4.0], [5.0, float("nan")], ["step 1"]),
        ([5.0, 4.0], [5.0], ["step 1"]),
    ],
)
def test_losses_that_differ_are_a_fault(one: list[float], many: list[float], words: list[str]) -> None:
    from report import find_faults

    faults = find_faults(make_report(one, many))
    assert len(faults) == len(words)
    assert all(word in fault for word, fault in zip(words, faults, strict=True))


@pytest.mark.parametrize(("sent", "is_fault"), [(10_000_000, True), (900_000, True), (1_000_500, False), (None, False)])
def test_bytes_beside_the_plan_are_a_fault(sent: int | None, is_fault: bool) -> None:
    from report import find_faults

    assert bool(find_faults(make_report([5.0], [5.0], sent))) == is_fault


def test_targets_never_cross_from_one_file_to_the_next(tmp_path: Path) -> None:
    from data import draw_sequence, load_corpus

    (tmp_path / "a.py").write_bytes(b"abc" * 10)
    (tmp_path / "b.py").write_bytes(b"")
    (tmp_path / "c.py").write_bytes(b"xyz" * 10)
    corpus = load_corpus(tmp_path)
    assert (corpus.text.numel(), corpus.num_files) == (60, 2)
    crossings = 0
    for step in range(20):
        sequence = draw_sequence(corpus, 35, seed=7, step=step)
        assert sequence.inputs.shape == sequence.targets.shape == sequence.valid.shape == (1, 35)
        assert sum(sequence.file_lengths) == 35
        torch.testing.assert_close(sequence.inputs[:, 1:], sequence.targets[:, :-1])
        last_of_file = (sequence.inputs == ord("c")) & (sequence.targets == ord("x"))
        assert torch.equal(~sequence.valid, last_of_file)
        crossings += int(last_of_file.sum())
    assert crossings > 0


def test_the_model_sees_its_neighbours_only_through_attention_and_positions() -> None:
    from config import ModelConfig
    from model import Decoder

    torch.manual_seed(0)
    model = Decoder(ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, hidden_dim=32))
    inputs, positions = torch.randint(256, (1, 12)), torch.arange(12)
    rows = torch.tensor([0, 1, 2, 9, 10, 11])

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # A function of each row alone, so that any rows may be computed by themselves.
        return query * key.repeat_interleave(2, 2) + value.repeat_interleave(2, 2)

    whole = model(inputs, positions, attention)
    part = model(inputs[:, rows], positions[rows], attention)
    torch.testing.assert_close(part, whole[:, rows])
    # Rows that took their local row for their position would be something else.
    assert not torch.allclose(model(inputs[:, rows], torch.arange(6), attention), part)


def test_rope_depends_on_distance_only() -> None:
    from model import rope_tables, rotate

    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=generator)

    def score(i: int, j: int) -> float:
        turned = [
            rotate(x, *rope_tables(torch.tensor([position]), 16, 10000.0)) for x, position in ((query, i), (key, j))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(5000, 4990) == pytest.approx(score(30, 20), abs=1e-4)
    assert abs(score(30, 20) - score(30, 25)) > 1e-3


def test_tokens_per_second_leaves_the_first_step_out() -> None:
    from config import RunConfig
    from report import tokens_per_second

    result = SimpleNamespace(seconds=[100.0, 2.0, 2.0])
    assert tokens_per_second(RunConfig(seq_len=50), result) == pytest.approx(25.0)
