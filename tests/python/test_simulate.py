"""Machines, simulations, choices, traces and pictures: the Python front and the command line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.image
import pytest
import torch
from ringspan.machines import KernelSpeed, LinkClass

import ringspan as rs

COMMAND = Path(sys.executable).parent / "ringspan"
SIZES = (1, 4, 2048, 64), (1, 2, 2048, 64), (1, 2, 2048, 64)
CALL = ["--world", "4", "--seq-len", "2048", "--heads", "4", "--kv-heads", "2", "--mask", "causal"]
PNG = b"\x89PNG\r\n\x1a\n"


def causal_plan(world: int = 4, **changes) -> rs.Plan:
    arguments = {"mask": rs.causal(), "shard_map": rs.ShardMap.head_tail(2048, world), "exchange": "p2p"}
    return rs.plan(*SIZES, **{**arguments, **changes})


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)


# Machines.


def test_a_machine_goes_through_json_and_files(tmp_path):
    machine = dataclasses.replace(rs.Machine.nominal(), name="mine", overlap=0.25, network=LinkClass(1e-6, 1e9))
    assert rs.Machine.from_json(machine.to_json()) == machine
    machine.save(tmp_path / "mine.json")
    assert rs.Machine.load(tmp_path / "mine.json") == machine
    assert machine.kernels[0] == KernelSpeed("fp32", 128, 1e12, 1e12, 0.0, 0.0)


def test_examples_come_with_the_package_and_name_their_source():
    assert "dgx-h100" in rs.Machine.examples()
    for name in rs.Machine.examples():
        machine = rs.Machine.example(name)
        assert machine.source
        assert {speed.dtype for speed in machine.kernels} >= {"bf16"}
    with pytest.raises(ValueError, match=r"'dgx-x'.*dgx-h100"):
        rs.Machine.example("dgx-x")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"overlap": 1.5}, r"overlap is 1\.5"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"node": LinkClass(0.0, 0.0)}, r"node\.bytes_per_second is 0"),
        ({"kernels": ()}, "kernels is empty"),
        ({"memory_bytes": "much"}, 'memory_bytes", which is of another type'),
    ],
)
def test_bad_machines_are_refused(change, pattern):
    with pytest.raises(ValueError, match=pattern):
        dataclasses.replace(rs.Machine.nominal(), **change)


def test_bad_descriptions_are_refused_by_file(tmp_path):
    path = tmp_path / "machine.json"
    for text, pattern in (("{", "not JSON"), ("{}", 'no field "name"')):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"machine.json.*{pattern}"):
            rs.Machine.load(path)
    with pytest.raises(ValueError, match=r"absent\.json.*cannot be read"):
        rs.Machine.load(tmp_path / "absent.json")


# Simulations.


def test_one_rank_takes_its_flops():
    plan = rs.plan(*SIZES, mask=rs.causal())
    simulation = plan.simulate(rs.Machine.nominal())
    # 2 * (64 + 64) flops a pair and head at 1 Tflop/s; backward 6 * 64 + 4 * 64.
    pairs = 4 * 2048 * 2049 // 2
    assert simulation.forward.seconds == pytest.approx(pairs * 256 / 1e12)
    assert simulation.backward.seconds == pytest.approx(pairs * 640 / 1e12)
    assert simulation.seconds == simulation.forward.seconds + simulation.backward.seconds
    # q, out, dout and what the ledger counts beside them; K and V.
    own = 4 * (3 * 4 * 2048 * 64 + 4 * 2048 + 2 * 2 * 2048 * 64)
    assert simulation.memory_bytes == own + plan.ledger().rank(0).backward.peak_bytes


def test_messages_that_nothing_hides_show():
    """Two ranks, full: a hop of 2 * 2 * 1024 * 64 * 4 bytes at 1 MB/s beside tiles that take almost nothing."""
    slow = dataclasses.replace(rs.Machine.nominal(), network=LinkClass(0.5, 1e6))
    plan = rs.plan(*SIZES, world_size=2, exchange="p2p")
    hop = 0.5 + 2 * 2 * 1024 * 64 * 4 / 1e6
    tile = 4 * 1024 * 1024 * 256 / 1e12
    assert plan.simulate(slow).forward.seconds == pytest.approx(hop + tile)
    assert plan.simulate(slow).forward.exposed_seconds == pytest.approx(hop - tile)


def test_steps_are_kept_of_the_ranks_that_were_asked_for():
    simulation = causal_plan().simulate(rs.Machine.nominal(), steps_of=[2])
    assert [bool(rank.steps) for rank in simulation.backward.ranks] == [False, False, True, False]
    steps = simulation.forward.ranks[2].steps
    assert [step.step for step in steps] == [0, 1, 2, 3]
    computing = sum(step.compute_end - step.compute_begin for step in steps)
    assert computing == pytest.approx(simulation.forward.ranks[2].compute_seconds)
    assert steps[-1].end <= simulation.forward.seconds


def test_large_worlds_are_estimated_and_say_so():
    plan = rs.plan(*SIZES, world_size=128, mask=rs.causal())
    simulation = plan.simulate(rs.Machine.nominal())
    assert simulation.ranks_built < 128 == len(simulation.forward.ranks)
    assert f"estimated from {simulation.ranks_built} of 128 ranks" in str(simulation)
    assert "estimated" not in str(causal_plan().simulate(rs.Machine.nominal()))


def test_the_table_shows_the_figures():
    simulation = causal_plan().simulate(rs.Machine.nominal())
    text = str(simulation)
    for seconds in (simulation.seconds, simulation.forward.seconds, simulation.backward.exposed_seconds):
        assert f"{seconds * 1e3:.3f}" in text
    assert "DOES NOT FIT" not in text


def test_what_does_not_fit_says_so():
    small = dataclasses.replace(rs.Machine.nominal(), memory_bytes=1000.0)
    simulation = causal_plan().simulate(small)
    assert not simulation.fits
    assert "DOES NOT FIT" in str(simulation)


def test_refusals_of_simulations(tmp_path):
    plan = causal_plan()
    with pytest.raises(ValueError, match="machine is of str"):
        plan.simulate("dgx-h100")
    for call in (plan.save_trace, plan.plot):
        with pytest.raises(ValueError, match="machine is of int"):
            call(tmp_path / "file.png", 3)
    with pytest.raises(ValueError, match=r"4"):
        plan.simulate(rs.Machine.nominal(), steps_of=[4])
    with pytest.raises(ValueError, match=r"DGX H100.*fp32"):
        plan.simulate(rs.Machine.example("dgx-h100"))


# The planner.


def test_the_choice_is_the_fastest_simulation():
    machine = rs.Machine.nominal()
    choice = rs.choose_plan(
        *SIZES,
        world_size=4,
        machine=machine,
        mask=rs.causal(),
        schedules=["ring", "ulysses"],
        shards=["head_tail", "contiguous"],
    )
    seconds = {}
    for one in choice.candidates:
        smap = getattr(rs.ShardMap, one.shard)(2048, 4)
        plan = rs.plan(*SIZES, mask=rs.causal(), shard_map=smap, schedule=one.schedule)
        seconds[one.schedule, one.shard] = plan.simulate(machine).seconds
        assert one.seconds == pytest.approx(seconds[one.schedule, one.shard])
    assert len(seconds) == 4
    assert choice.best == choice.candidates[0]
    assert choice.best.seconds == pytest.approx(min(seconds.values()))
    assert choice.reason.startswith(f"{choice.best.schedule} over {choice.best.shard}")
    assert choice.reason in str(choice)


def test_backward_can_be_left_out():
    choice = rs.choose_plan(*SIZES, world_size=2, machine=rs.Machine.nominal(), backward=False, schedules=["ring"])
    assert {one.backward_seconds for one in choice.candidates} == {0.0}


def test_what_cannot_run_is_refused_in_the_answer():
    small = dataclasses.replace(rs.Machine.nominal(), memory_bytes=1000.0)
    choice = rs.choose_plan(*SIZES, world_size=4, machine=small, tensor_parallel=(1, 4))
    assert choice.best is None
    assert all(one.refused for one in choice.candidates)
    assert any("4 does not divide 2 KV heads" in one.refused for one in choice.candidates)
    assert "refused: " in str(choice)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"machine": None}, "machine is of NoneType"),
        ({"world_size": 0}, "world_size is 0"),
        ({"shards": ["zigzag"]}, "'zigzag'.*head_tail"),
        ({"schedules": ["rings"]}, "'rings'"),
        ({"tensor_parallel": (0,)}, "tensor_parallel has 0"),
        ({"dtype": torch.int8}, "int8"),
        ({"exchange": "smoke"}, "'smoke'"),
    ],
)
def test_refusals_of_the_planner(changes, pattern):
    arguments = {"world_size": 4, "machine": rs.Machine.nominal(), **changes}
    with pytest.raises(ValueError, match=pattern):
        rs.choose_plan(*SIZES, **arguments)


# Traces and pictures.


def test_the_trace_has_every_computation(tmp_path):
    plan = causal_plan()
    plan.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    computing = [event for event in events if event.get("cat") == "compute" and event["pid"] == 0]
    simulation = plan.simulate(rs.Machine.nominal())
    for rank in range(4):
        seconds = sum(event["dur"] for event in computing if event["tid"] == rank) / 1e6
        assert seconds == pytest.approx(simulation.forward.ranks[rank].compute_seconds)


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {}),
        (4, {"shard_map": rs.ShardMap.striped(2048, 4)}),
        (64, {"mask": rs.documents(lengths=[700, 1100]), "schedule": "pruned"}),
    ],
)
def test_plans_are_drawn(tmp_path, world, changes):
    causal_plan(world, **changes).plot(tmp_path / "plan.png", rs.Machine.nominal())
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


def colours_of_the_grid(path: Path) -> list[int]:
    """How many pixels of the left half have the colours of rank 0, rank 1, and of several ranks."""
    image = (mpl.image.imread(path)[:, :, :3] * 255).round().astype(int)
    image = image[: image.shape[0] * 9 // 10, : image.shape[1] * 46 // 100]  # without the legend
    colours = ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xA0, 0xA0, 0xA0))
    return [int((abs(image - colour) <= 1).all(-1).sum()) for colour in colours]


def test_areas_are_the_work_of_the_ranks(tmp_path):
    """Causal on two ranks: half each by head-tail and striped, a quarter and three quarters by contiguous shards."""
    for name, share in (("head_tail", 0.5), ("striped", 0.5), ("contiguous", 0.25)):
        smap = getattr(rs.ShardMap, name)(2048, 2)
        causal_plan(2, shard_map=smap).plot(tmp_path / "plan.png")
        first, second, several = colours_of_the_grid(tmp_path / "plan.png")
        assert several < 200  # some of the text's edges
        # The strips, half of each rank, are a few hundredths of the area.
        assert first / (first + second) == pytest.approx(share, abs=0.03)


def test_cells_of_many_ranks_are_grey_where_their_colours_would_be_noise(tmp_path):
    for name, is_grey in (("contiguous", False), ("striped", True)):
        causal_plan(64, shard_map=getattr(rs.ShardMap, name)(2048, 64)).plot(tmp_path / "plan.png")
        assert (colours_of_the_grid(tmp_path / "plan.png")[2] > 10000) == is_grey


def test_the_picture_says_what_it_shows(tmp_path):
    causal_plan().plot(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    for words in ("ring over 4 ranks on nominal machine: 1 Tflop/s a rank", "key position", "rank 3", "ms"):
        assert words in text
    with pytest.raises(ValueError, match="'xyz'"):
        causal_plan().plot(tmp_path / "plan.xyz")


# The command line.


@pytest.fixture
def machine_file(tmp_path):
    path = tmp_path / "machine.json"
    rs.Machine.nominal().save(path)
    return path


def test_simulate_prints_the_figures_of_python(machine_file):
    simulation = causal_plan(exchange="auto").simulate(rs.Machine.nominal())
    call = [*CALL, "--shard", "head_tail", "--machine", machine_file]
    done = run("simulate", *call)
    assert done.returncode == 0, done.stderr
    assert f"{simulation.seconds * 1e3:.3f}" in done.stdout
    content = json.loads(run("simulate", *call, "--json").stdout)
    assert content["seconds"] == simulation.seconds
    assert content["memory_bytes"] == simulation.memory_bytes


def test_simulate_writes_traces_and_pictures(tmp_path, machine_file):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    done = run("simulate", *CALL, "--machine", machine_file, "--trace", trace, "--plot", picture)
    assert (done.returncode, done.stderr) == (0, "")
    assert {event["tid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2, 3}
    assert picture.read_bytes().startswith(PNG)


def test_plan_draws_without_a_machine(tmp_path):
    picture = tmp_path / "picture.png"
    done = run("plan", *CALL, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_drawn_is_status_2(tmp_path, machine_file):
    for name, pattern in (("picture.xyz", "xyz"), ("absent/picture.png", "absent")):
        done = run("simulate", *CALL, "--machine", machine_file, "--plot", tmp_path / name)
        assert done.returncode == 2
        assert pattern in done.stderr
    done = run("simulate", *CALL, "--machine", machine_file, "--shard", "auto", "--plot", tmp_path / "picture.png")
    assert done.returncode == 2
    assert "is of one plan" in done.stderr


def test_status_1_where_it_does_not_fit(tmp_path):
    dataclasses.replace(rs.Machine.nominal(), memory_bytes=1000.0).save(tmp_path / "small.json")
    done = run("simulate", *CALL, "--machine", tmp_path / "small.json")
    assert done.returncode == 1
    assert "DOES NOT FIT" in done.stdout
    chosen = run("simulate", *CALL, "--machine", tmp_path / "small.json", "--schedule", "auto")
    assert chosen.returncode == 1
    assert "nothing fits" in chosen.stdout


def test_status_2_for_a_bad_machine(tmp_path):
    content = json.loads(rs.Machine.nominal().to_json())
    (tmp_path / "bad.json").write_text(json.dumps({**content, "overlap": 2}))
    for name, pattern in (("bad.json", "overlap is 2"), ("absent.json", "cannot read")):
        done = run("simulate", *CALL, "--machine", tmp_path / name)
        assert done.returncode == 2
        assert pattern in done.stderr


def test_the_planner_answers_in_text_and_json(machine_file):
    choice = rs.choose_plan(*SIZES, world_size=4, machine=rs.Machine.nominal(), mask=rs.causal())
    question = ["simulate", *CALL, "--machine", machine_file, "--schedule", "auto", "--shard", "auto"]
    assert run(*question).stdout.rstrip().endswith(choice.reason)
    content = json.loads(run(*question, "--json").stdout)
    assert [one["schedule"] for one in content["candidates"]] == [one.schedule for one in choice.candidates]
