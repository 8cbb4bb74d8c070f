"""Ranks that differ in one argument: all are told both values before anything is sent, or nothing was different."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from disagreement_jobs import Answer, Disagreement, Side
from disagreements import DRAWS, EQUAL, drawn
from other_disagreements import of_contract, of_helpers
from test_faults import named
from trials import FRESH, faults_of_group, faults_of_refusal

SEED = 20261201
TIMES = 4
KINDS = ("ValueError", "RuntimeError", "NotImplementedError")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "agreement.md"


def shows(message: str, word: object) -> bool:
    """Whether a message holds a number, exactly, or matches an expression."""
    if isinstance(word, str):
        return re.search(word, message) is not None
    numbers = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", message)
    return float(word) in [float(number) for number in numbers]


def faults_of(one: Disagreement, ranks: list[Answer]) -> list[str]:
    """What is wrong with what the ranks saw of a disagreement."""
    if any(answer.alone for answer in ranks):
        return [f"is no disagreement of right calls: {ranks[0].alone}"]
    forward, backward = [a.forward for a in ranks], [a.backward for a in ranks]
    found = faults_of_group(forward)
    refused = [told for told in (forward, backward) if any(x is not None and x.kind for x in told)]
    if refused:
        told = refused[0]
        if one.expected in ("equal", "accepted"):
            return [*found, f"is refused: {told[0].message[:300]}"]
        found += faults_of_refusal(told, (), KINDS)
        for rank, x in enumerate(told):
            missing = [word for word in one.words if not shows(x.message, word)]
            wrong = [name for name in named(x.message) if one.names and name not in one.names]
            if missing or "other content" in x.message:
                found.append(f"rank {rank} is not shown {missing}, but: {x.message[:400]}")
            if wrong:
                found.append(f"rank {rank} is told that {wrong} differ: {x.message[:400]}")
            if not re.search(r" on ranks? [\d, ]+, .* on rank", x.message):
                found.append(f"rank {rank} is not told who has which value: {x.message[:400]}")
        return found
    if one.expected == "refused":
        exact = [answer.is_exact for answer in ranks]
        return [*found, f"is accepted; results as where all make the call of the rank: {exact}"]
    found += faults_of_group([x for x in backward if x is not None])
    if one.expected == "accepted":
        return found
    found += [f"rank {rank} has another result" for rank, answer in enumerate(ranks) if not answer.is_exact]
    return found


def check(pool, world: int, disagreements: list[Disagreement]) -> None:
    answers = pool.run("disagreement_jobs:run", world, watchdog_s=300, fresh=FRESH, disagreements=disagreements)
    trials = list(zip(*answers, strict=True))
    faults = []
    for number, (one, ranks) in enumerate(zip(disagreements, trials, strict=False)):
        found = faults_of(one, ranks)
        if found:
            faults.append(f"{number} {one.what}: {'; '.join(found)[:700]}\n    {differences(one)}")
    text = f"{len(faults)} of {len(trials)} disagreements have faults\n" + "\n".join(faults[:40])
    assert not faults, text
    assert len(trials) == len(disagreements), "no group was left that works"


def differences(one: Disagreement) -> str:
    """Both calls, in short."""
    return f"{one.common} against {shorter(one.odd, one.common)}"


def shorter(side: Side, other: Side) -> str:
    fields = {name: value for name, value in vars(side.case).items() if value != getattr(other.case, name)}
    return f"{fields} { ({name: str(value) for name, value in side.more.items()}) }"


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_attends_otherwise(pool, world):
    """Over 200 draws."""
    disagreements = list(drawn(SEED, world, TIMES))
    assert len(disagreements) > 200
    assert len(disagreements) == TIMES * (len(DRAWS) + len(EQUAL))
    check(pool, world, disagreements)


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_calls_the_contract_otherwise(pool, world):
    check(pool, world, list(of_contract(SEED, world)))


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_gathers_or_counts_otherwise(pool, world):
    check(pool, world, list(of_helpers(world)))


def test_the_document_says_what_is_not_compared():
    """Contents of masks and biases: large, or each rank's own."""
    paragraphs = [part for part in DOCUMENT.read_text().split("\n\n") if re.search(r"\bnot\s+compared\b", part)]
    assert any("attn_mask" in part and "bias" in part for part in paragraphs), paragraphs
