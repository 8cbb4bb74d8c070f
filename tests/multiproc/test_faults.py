"""What once failed, each test named for what holds: the second list of faults that were found by trying the product."""

from __future__ import annotations

import itertools
import re

import flex_cases
import hf_models
import judge
import pytest
import torch
from cases import Case
from fault_scripts import COMPILED_BEFORE, LAUNCHED, SAVED_CALLS, run_script
from pool import Fresh, Pool
from soak_jobs import Soaked
from test_schedules import PLAIN
from trials import FRESH, Told, faults_of_group, faults_of_refusal

import ringspan as rs

SCHEDULES = {
    2: ["ring", *PLAIN, rs.hybrid(ulysses=2, ring=1), rs.double_ring(inner=2, outer=1)],
    4: ["ring", *PLAIN, rs.hybrid(ulysses=2, ring=2), rs.double_ring(inner=2, outer=2)],
}
MOVING = ["ulysses", "q_ring", "invariant"]  # those that move rows of queries
EMPTY = {2: [("lengths", (5, 0))], 4: [("lengths", (3, 3, 3, 0)), ("head_tail",)]}  # 5 positions on 4 ranks
SINGLE = {
    2: [("lengths", (1, 2)), ("lengths", (1, 1))],
    4: [("lengths", (1, 0, 2, 2)), ("lengths", (1, 1, 1, 1))],
}
BFLOAT, HALF, FLOAT = "BFloat16|bfloat16|bf16", r"Half|float16|fp16|\bf16", r"Float\b|float32|fp32|\bf32"


@pytest.fixture(scope="module")
def new_pool():
    """Processes that have called nothing yet."""
    pool = Pool()
    yield pool
    pool.stop()


def assert_refused(told_by_rank: list[dict[str, Told]], words: dict[str, list[str]], kinds=("ValueError",)) -> None:
    """Every trial was refused on every rank, in time and with the words, and left the group as it was."""
    assert {*told_by_rank[0]} == {*words}, "the trials ended early: no group was left that works"
    faults = [
        f"{name}: {fault}"
        for name, found in words.items()
        for fault in faults_of_refusal([told[name] for told in told_by_rank], found, kinds)
    ]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])


def with_shared_rows(splits: list, world: int, **changes: object) -> list[Case]:
    """A boolean mask and a bias of keys alone, by head and by batch entry; all gradients are judged."""
    cases = []
    for index, split in enumerate(splits):
        seq_len = sum(split[1]) if split[0] == "lengths" else world + 1
        for axes, schedule in itertools.product(("K", "NK", "BNK"), SCHEDULES[world]):
            case = Case(("full",), split, seq_len=seq_len, batch=2, kv_heads=4, schedule=schedule, lse_grad=True,
                        seed=2 * index, **changes)  # fmt: skip
            cases += [case.but(attn_mask=axes), case.but(bias=axes), case.but(bias=axes, seed=2 * index + 1)]
    return cases


@pytest.mark.parametrize("world", [2, 4])
def test_shared_rows_count_on_a_rank_without_queries(pool, world):
    """S1"""
    judge.check(pool, world, with_shared_rows(EMPTY[world], world), "jobs:errors_or_words")


@pytest.mark.parametrize("world", [2, 4])
def test_a_mask_of_keys_with_one_query_row_is_exact(pool, world):
    """R1"""
    judge.check(pool, world, with_shared_rows(SINGLE[world], world), "jobs:errors_or_words")


@pytest.mark.parametrize("world", [2, 4])
def test_a_token_is_decoded_with_a_mask_of_keys(pool, world):
    """R1: one query on one rank, and one on each."""
    cases = []
    for queries in (((8,), *[()] * (world - 1)), tuple((8 - rank,) for rank in range(world))):
        for schedule, terms in itertools.product(
            SCHEDULES[world], ({"attn_mask": "K"}, {"attn_mask": "BNK", "bias": "NK"}, {"bias": "K"})
        ):
            cases.append(
                Case(("causal",), ("positions", queries), ("contiguous",), seq_len=9, schedule=schedule, batch=2,
                     kv_heads=4, lse_grad=True, **terms)
            )  # fmt: skip
    judge.check(pool, world, cases, "jobs:errors_or_words")


@pytest.mark.parametrize("schedule", [str(one) for one in SCHEDULES[2]])
def test_a_bias_of_another_type_is_refused_on_every_rank(pool, schedule):
    """S2"""
    schedule = next(one for one in SCHEDULES[2] if str(one) == schedule)
    words = {
        "bf16, fp16": [BFLOAT, HALF],
        "fp32, bf16": [FLOAT, BFLOAT],
        "fp16, bf16 as a mask": [HALF, BFLOAT],
        "bool, fp32": ["given|none|Bool|bool"],
    }
    assert_refused(pool.run("fault_jobs:dtypes_of_pair_tensors", 2, fresh=FRESH, schedule=schedule), words)


@pytest.mark.parametrize("on_all", [False, True])
@pytest.mark.parametrize("contract", [False, True])
def test_a_meta_tensor_among_cpu_tensors_is_refused_on_every_rank(pool, contract, on_all):
    """S4"""
    answers = pool.run("fault_jobs:meta_tensors", 2, fresh=FRESH, on_all=on_all, contract=contract)
    names = ["key", "pse", "atten_mask", "sink", "q_map", "kv_map"]
    if not contract:
        names = ["key", "value", "query", "sink", "attn_mask", "float attn_mask", "bias", "slopes", "seed"]
    assert_refused(answers, {name: ["meta"] for name in names}, ("RuntimeError",) if contract else ("ValueError",))


def test_a_meta_tensor_among_cpu_tensors_is_refused_by_the_ops_of_one_process():
    """S4: the ring's update, raw tables, statistics."""
    ops = torch.ops.ringspan
    x, out = torch.ones(4, 1, 8), torch.ones(1, 1, 4, 8)
    update = [x.transpose(0, 1).contiguous(), torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8)] * 2
    for place in range(1, 6):
        given = [y.to("meta") if index == place else y for index, y in enumerate(update)]
        with pytest.raises((ValueError, RuntimeError), match="meta"):
            ops.ring_attention_update(*given, input_layout="SBH")
    lengths = torch.tensor([4], device="meta")
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        given = {"actual_seq_qlen": torch.tensor([4]), "actual_seq_kvlen": torch.tensor([4])} | {name: lengths}
        with pytest.raises((ValueError, RuntimeError), match="meta"):
            ops.fusion_attention_v3(x, x, x, 1, "TND", softmax_layout="TND", **given)
    result = ops.fusion_attention_v3(out, out, out, 1, "BNSD")
    saved = {"softmax_max": result[1], "softmax_sum": result[2], "attention_in": result[0]}
    for name, tensor in saved.items():
        with pytest.raises((ValueError, RuntimeError), match="meta"):
            ops.fusion_attention_grad_v3(out, out, out, out, 1, "BNSD", **{**saved, name: tensor.to("meta")})


def test_a_refusal_of_the_dtensor_front_reaches_every_rank(pool):
    """S5"""
    for world in (2, 3):
        answers = pool.run("fault_jobs:dtensor_mistakes", world, fresh=FRESH)
        odd = world - 1
        faults = []
        for name in ("num_heads", "mask", "layout", "rows of a map", "ranks of a map", "meshes", "group"):
            told = [answer.get(name) for answer in answers]
            assert None not in told, f"the trials ended before {name}: no group was left that works"
            faults += [f"{name}: {fault}" for fault in faults_of_group(told)]
            faults += [f"{name}: rank {rank} raised {one.kind}" for rank, one in enumerate(told) if one.kind is None]
            faults += [
                f"{name}: rank {rank} raised {one.kind}: {one.message[:200]}"
                for rank, one in enumerate(told)
                if rank != odd and (one.kind != "ValueError" or f"rank {odd}" not in one.message)
            ]
            faults += [f"{name}: then off by {one.value}" for one in told if one.value]
        assert not faults, "\n".join(faults)


X = torch.ones(1, 1, 4, 8)
TOO_LARGE = {
    "softcap": ({"softcap": 1e39}, r"1e\+?39"),
    "scale": ({"scale": 1e39}, r"1e\+?39"),
    "negative scale": ({"scale": -1e39}, r"-1e\+?39"),
    "head_offset": ({"dropout_p": 0.5, "seed": 1, "head_offset": 2**63 - 1, "total_heads": 2**63 - 1}, str(2**63 - 1)),
    "batch_offset": ({"dropout_p": 0.5, "seed": 1, "batch_offset": 2**63 - 1}, str(2**63 - 1)),
}


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_beyond_the_accumulator_are_refused(name, dtype):
    """S10"""
    given, word = TOO_LARGE[name]
    with pytest.raises(ValueError, match=word):
        rs.attention(*[X.to(dtype)] * 3, **given)


def test_numbers_that_the_accumulator_holds_are_taken():
    """S10: in fp64 these are ordinary."""
    x = X.double()
    for given in ({"softcap": 1e39}, {"scale": 1e39}):
        assert torch.isfinite(rs.attention(x, x, x, **given)).all()


def test_a_large_scale_gives_no_nan():
    """S10: scores that overflow fp32 are refused, or the softmax is that of the largest."""
    for scale in (1e37, 1e38, 3e38):
        try:
            out = rs.attention(X, X, X, scale=scale)
        except ValueError as error:
            assert "scale" in str(error)  # noqa: PT017  either is right
            continue
        assert torch.isfinite(out).all(), scale


def test_a_loss_on_softmax_statistics_is_never_silent(pool):
    """S11"""
    for found in pool.run("fault_jobs:statistics_of_the_contract", 2):
        for name, asks in found.items():
            assert asks == name.endswith(" out"), name


@pytest.mark.parametrize("schedule", [str(one) for one in SCHEDULES[2] if isinstance(one, str)])
def test_sinks_and_slopes_of_other_content_are_refused(pool, schedule):
    """S12"""
    names = ["sink", "slopes", "slopes by batch", "sink of the contract"]
    for world in (2, 4) if ":" in schedule else (2, 3):
        if ":" in schedule:
            schedule = schedule.replace("x1", f"x{world // 2}")
        answers = pool.run("fault_jobs:contents", world, fresh=FRESH, schedule=schedule)
        assert_refused(answers, {name: [r"\b0\.25\b", r"\b5\.5\b"] for name in names}, ("ValueError", "RuntimeError"))


def test_a_call_without_a_group_in_a_job_of_several_processes_is_refused(pool):
    """S13"""
    for found in pool.run("alone_jobs:without_a_group", 2):
        for name, text in found.items():
            assert text.startswith("ValueError"), f"{name}: {text}"
            assert "LOCAL" in text, f"{name}: {text}"


@hf_models.needs_transformers
def test_a_model_without_a_group_in_a_job_is_refused(pool):
    """S13"""
    for text in pool.run("alone_jobs:model_without_a_group", 2, watchdog_s=150):
        assert text.startswith("ValueError"), text
        assert "LOCAL" in text, text


@pytest.mark.parametrize("world", [1, 2])
def test_alone_on_purpose(pool, world):
    """S13"""
    for found in pool.run("alone_jobs:on_purpose_alone", world):
        assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_that_loads_data_attends_alone_on_purpose_only(new_pool, start):
    """S13"""
    for found in new_pool.run("alone_jobs:in_a_worker", 2, watchdog_s=100, start=start):
        assert max(error for error, _ in found["LOCAL"]) <= 1e-12, found
        assert all("LOCAL" in text for _, text in found["None"]), found


def test_unbalanced_contiguous_shards_warn_once_and_name_the_map(new_pool):
    """S15"""
    for found in new_pool.run("alone_jobs:forgotten_map", 2):
        assert found.pop("forgotten") == 1
        assert not any(found.values()), found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_shard_of_a_rank_without_rows_needs_its_gradient(pool, world):
    """H1"""
    for rank, found in enumerate(pool.run("fault_jobs:empty_shards", world, fresh=FRESH)):
        for name in ("head_tail", "lengths"):
            assert found[f"{name} requires grad"], f"rank {rank}, {name}"
            for way in ("attention", "unshard"):
                told = found[f"{name} {way}"]
                assert told.kind is None, f"rank {rank}, {name} {way}: {told.message}"
                assert told.value <= 1e-12, f"rank {rank}, {name} {way}"


def test_every_exception_before_the_agreement_reaches_every_rank(pool):
    """H2"""
    for world in (2, 3):
        answers = pool.run("fault_jobs:one_wrong_argument", world, fresh=FRESH)
        faults = []
        for name in answers[0]:
            told = [answer[name] for answer in answers]
            own = told[-1]
            faults += [f"{name}: {fault}" for fault in faults_of_group(told)]
            if own.kind not in ("ValueError", "TypeError", "NotImplementedError"):
                faults.append(f"{name}: the odd rank raised {own.kind}: {own.message[:100]}")
            for one in told[:-1]:
                if one.kind not in ("ValueError", "NotImplementedError") or f"rank {world - 1}" not in one.message:
                    faults.append(f"{name}: a peer raised {one.kind}: {one.message[:200]}")
        assert len(answers[0]) >= 18, [*answers[0]]
        assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:30])


def test_a_very_long_refusal_is_cut_and_told(pool):
    """H11"""
    for world in (2, 3):
        told = pool.run("fault_jobs:long_text", world, fresh=FRESH)
        assert not faults_of_refusal(told, ["exchange"])
        assert all(one.length < 10_000 for one in told[:-1])


@pytest.mark.parametrize("peers_come", ["each time", "later"])
@pytest.mark.parametrize("world", [2, 3])
def test_refusals_leave_no_keys_behind(pool, world, peers_come):
    """H11: three of a rank at most."""
    answers = pool.run("key_jobs:keys_after_refusals", world, fresh=Fresh(20), times=100, peers_come=peers_come)
    for rank, found in enumerate(answers):
        assert found["refused"] == 100, f"rank {rank}: {found}"
        if peers_come == "each time":
            assert found["kept"] <= 3, f"rank {rank}: {found}"
        assert found["error"] <= 1e-12, f"rank {rank}: {found}"
        assert found["kept after"] <= 3, f"rank {rank}: {found}"


# What a message may name, by trial; and what it has to show.
MESSAGES = {
    "bias": (["bias", "rows of bias"], ["none", "given|Float|x"]),
    "attn_mask": (["attn_mask", "rows of attn_mask"], ["none", "given|Bool|x"]),
    "both": (["attn_mask", "bias", "rows of bias", "rows of attn_mask"], ["none"]),
    "softcap": (["softcap"], [r"\b3\b", r"\b4\b"]),
    "scale": (["scale"], [r"0\.1\b", r"0\.10000000000000002"]),
    "ids": (["mask"], [r"\b2\b", r"\b3\b"]),
    "lengths": (["mask"], [r"\b3\b.*\b1\b", r"\b2\b.*\b2\b"]),
    "bands": (["mask"], [r"\b1\b", r"\b2\b"]),
    "segments": (["shard_map", "kv_shard_map"], []),
    "heads of a bias": (["bias", "sizes of bias"], [r"\b4\b", r"\b1\b"]),
    "rows of a bias": (["bias", "rows of bias", "sizes of bias"], []),
    "seed": (["seed"], ["drawn", r"\b1\b"]),
}


def named(message: str) -> list[str]:
    """The arguments that a disagreement names."""
    text = re.sub(r"^.*?disagree about call \d+: ", "", message, flags=re.DOTALL)
    return re.findall(r"(?:^|; )([^;]*?) is ", text.split(". Every rank must")[0])


@pytest.mark.parametrize("world", [2, 3])
def test_every_difference_has_both_values(pool, world):
    """M2"""
    answers = pool.run("fault_jobs:messages", world, fresh=FRESH)
    assert_refused(answers, {name: words for name, (_, words) in MESSAGES.items()})
    for name in MESSAGES:
        message = answers[0][name].message
        assert "other content" not in message, f"{name}: {message}"
        for first, second in re.findall(r" is ([^;]*?) on ranks? [\d, ]+, ([^;]*?) on rank", message):
            assert first != second, f"{name}: {message}"


@pytest.mark.parametrize("world", [2, 3])
def test_a_difference_names_the_field_that_differs(pool, world):
    """M1"""
    answers = pool.run("fault_jobs:messages", world, fresh=FRESH)
    for name, (allowed, _) in MESSAGES.items():
        message = answers[0][name].message
        assert named(message), f"{name}: {message}"
        wrong = [one for one in named(message) if one not in allowed]
        assert not wrong, f"{name} names {wrong}: {message}"


def test_one_instruction_set_serves_the_invariant_schedule(pool):
    """Two are refused with both names; other schedules compute with them."""
    for world in (2, 3):
        answers = pool.run("fault_jobs:instruction_sets", world, fresh=FRESH, schedule="invariant")
        names = answers[0]["names"]
        if names[0] == names[1]:
            pytest.skip(f"this machine has {names[0]} alone")
        assert_refused(
            [{"invariant": answer["told"]} for answer in answers], {"invariant": [rf"\b{one}\b" for one in names]}
        )
        for answer in pool.run("fault_jobs:instruction_sets", world, fresh=FRESH, schedule="ring"):
            assert answer["told"].kind is None, answer["told"].message


def test_a_wrong_instruction_set_of_one_rank_is_told(new_pool):
    new_pool.stop()
    told = new_pool.run("alone_jobs:wrong_instruction_set", 2, fresh=FRESH)
    new_pool.stop()
    for rank, one in enumerate(told):
        assert one.kind == "ValueError", f"rank {rank}: {one.kind} {one.message}"
        assert "no-such-set" in one.message
        assert one.seconds < 1
        assert one.sent == 0
    assert told[0].calls == told[1].calls


@pytest.mark.parametrize("world", [2, 4])
def test_rows_of_their_own_are_none_on_a_rank_without_queries(pool, world):
    """Found by the soak: strides of 0, which NumPy gives to arrays without elements, read as a row for all queries."""
    draws = [
        Soaked("attention", Case(("full",), split, seq_len=5, schedule=schedule, **terms))
        for split in [("lengths", (5, *[0] * (world - 1))), ("lengths", (*[0] * (world - 1), 5))]
        for schedule in SCHEDULES[world]
        for terms in ({"attn_mask": "SK"}, {"bias": "NSK"}, {"attn_mask": "NS", "bias": "BNSK"})
    ]
    judge.check_fronts(pool, world, draws)


@pytest.mark.parametrize("world", [2, 4])
def test_the_gradient_of_pse_is_exact_under_every_schedule(pool, world):
    """Found by the soak: where rows of queries move, the gradient of the contract's pse did not come home."""
    case = Case(("full",), ("striped",), seq_len=4 * world, scale=0.25, seed=1, kv_heads=4)
    schedules = SCHEDULES[world]
    draws = [Soaked("contract", case.but(bias=axes, schedule=one)) for axes in ("BNSK", "NK") for one in schedules]
    judge.check_fronts(pool, world, draws)


def test_a_mask_or_bias_of_one_axis_is_that_of_keys(pool):
    """Found by the soak: [K] expands to [B, N, Sq, K] as [1, K] does."""
    case = Case(seq_len=8, squeezed=True)
    cases = [case.but(attn_mask="K"), case.but(bias="K"), case.but(bias="K", seed=1)]
    draws = [Soaked("attention", one.but(schedule=schedule)) for one in cases for schedule in PLAIN]
    judge.check_fronts(pool, 2, draws)


@pytest.mark.parametrize("world", [2, 4])
def test_flex_with_an_empty_rank_is_exact(pool, world):
    """R2"""
    pairs = [
        ("by head", "by key"),
        ("by batch and head", "identity"),
        ("by head", "relative"),
        ("causal", "by key"),
        ("documents by batch", "bias, then mask"),
    ]
    seq = flex_cases.SEQ
    splits = {
        2: [("lengths", (seq, 0)), ("lengths", (1, seq - 1)), ("positions", (tuple(range(seq)), (-1, -1)))],
        4: [("lengths", (6, 0, 1, seq - 7)), ("positions", (tuple(range(6)), (-1,), (6,), tuple(range(7, seq))))],
    }
    for split in splits[world]:
        for schedule in SCHEDULES[world]:
            given = {"split": split, "pairs": pairs, "exchange": "p2p", "schedule": schedule}
            for rank, worst in enumerate(pool.run("flex_jobs:errors", world, **given)):
                assert max(worst.values()) <= 1e-12, f"rank {rank} of {split}, {schedule}: {worst}"


def test_a_bad_call_tensor_is_refused():
    """C3"""
    assert run_script(SAVED_CALLS) == "ended well\n"


def test_compiled_before_the_job_is_known():
    """S13"""
    run_script(COMPILED_BEFORE)


def test_a_launched_job_without_a_process_group_is_refused():
    """S13: before init_process_group, dist.group.WORLD is None."""
    assert run_script(LAUNCHED, RANK="0", WORLD_SIZE="2") == ""
    assert run_script(LAUNCHED, RANK="0", WORLD_SIZE="1") == "taken\n" * 3
