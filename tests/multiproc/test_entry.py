"""One way in: whatever is raised on one rank between the entry of a call and its agreement, every rank is told.

The odd rank raises its own exception, the others within a second one that names the rank and what it said; all have
counted the call, and the next one is exact.
"""

from __future__ import annotations

import entry_jobs
import fronts
import hf_models
import pytest
from entry_jobs import LONG, WORDS
from trials import FRESH, LONGEST, SECONDS, faults_of_group

NAMES = [pytest.param(name, marks=hf_models.needs_transformers) if name == "model" else name for name in fronts.FRONTS]


def faults_of(front: type[fronts.Front], error: str, odd: int, told: list) -> list[str]:
    """What is wrong with what the ranks saw."""
    found = faults_of_group(told, SECONDS)
    own = told[odd]
    expected = {"own": None, "long": "ValueError"}.get(error, error)
    if own.kind is None or own.kind in ("DistBackendError", "AssertionError", "KeyError", "AttributeError"):
        found.append(f"the odd rank raised {own.kind}: {own.message[:200]}")
    elif expected is not None and own.kind != expected and not (own.kind in front.kinds and WORDS in own.message):
        found.append(f"the odd rank raised {own.kind}, not its own {expected}: {own.message[:200]}")
    # The contract's errors are RuntimeErrors, whatever is wrong (docs/errors.md).
    is_plain = "RuntimeError" not in front.kinds
    kinds = ("NotImplementedError",) if is_plain and own.kind == "NotImplementedError" else front.kinds
    for rank, one in enumerate(told):
        if rank == odd:
            continue
        text = own.message[:40] if error == "own" else WORDS
        if one.kind not in kinds:
            found.append(f"rank {rank} raised {one.kind}: {one.message[:200]}")
        elif f"rank {odd}" not in one.message or text not in one.message:
            found.append(f"rank {rank} is told neither rank {odd} nor {text!r}: {one.message[:200]}")
        elif one.length > LONGEST:
            found.append(f"rank {rank} is told {one.length} characters")
    found += [f"the front's next call is off by {one.value:.3g}" for one in told if one.value]
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_is_told_what_one_raises(pool, name, world):
    answers = pool.run("entry_jobs:told_everywhere", world, watchdog_s=200, fresh=FRESH, name=name)
    faults = []
    for trial in zip(*answers, strict=True):
        stage, error, odd, _ = trial[0]
        told = [one[3] for one in trial]
        found = faults_of(fronts.FRONTS[name], error, odd, told)
        faults += [f"{stage}, {error} on rank {odd}: {'; '.join(found)[:500]}"] if found else []
    assert len(answers[0]) >= len(fronts.FRONTS[name].mistakes)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:40])


def test_a_text_that_is_long_is_long():
    """Else the stage "long" would show nothing."""
    assert len(str(entry_jobs.ERRORS["long"]())) > LONG > LONGEST
