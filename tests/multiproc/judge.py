"""What tests assert about cases: tolerances in one place, and messages that name the case."""

from __future__ import annotations

import numpy as np
from cases import NAMES, Case, errors_of
from pool import Fresh, Pool
from soak_jobs import Soaked

# Relative to the largest reference value. Half types: one rounding of the result (2^-9, 2^-12), with room for the
# rounding of operands that the kernels multiply in the half type; their precision proper is judged by RMS.
FORWARD = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-7, "float16": 2.0**-10}
BACKWARD = {"float32": 5e-5, "float64": 1e-12, "bfloat16": 2.0**-6, "float16": 2.0**-9}
RMS_GROWTH = 1.10


def limit_of(name: str, dtype: str) -> float:
    """The largest error allowed for a result of a case."""
    return (FORWARD if name in ("out", "lse") else BACKWARD)[dtype]


def check(pool: Pool | None, world: int, cases: list[Case], job: str = "jobs:errors") -> None:
    """Asserts every case on `world` ranks; with no pool in this process without a group."""
    answers = [[errors_of(case, None, 0, 1) for case in cases]] if pool is None else pool.run(job, world, cases=cases)
    faults = [
        f"{name} of rank {rank} off by {answer[name]:.3g} (limit {limit_of(name, case.dtype):.3g}) in {case}"
        for rank, ranked in enumerate(answers)
        for case, answer in zip(cases, ranked, strict=True)
        for name in answer
        if not answer[name] <= limit_of(name, case.dtype)
    ]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:12])


def check_fronts(pool: Pool, world: int, draws: list[Soaked]) -> None:
    """Asserts every draw of `soak_jobs` on `world` ranks."""
    faults = [text for _, text in faults_of_fronts(pool, world, draws)]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:12])


def faults_of_fronts(pool: Pool, world: int, draws: list[Soaked]) -> list[tuple[int, str]]:
    """(place among the draws, what is wrong there)."""
    answers = pool.run("soak_jobs:errors", world, watchdog_s=170, fresh=Fresh(10, count=4), draws=draws)
    found = []
    for place, (one, *ranked) in enumerate(zip(draws, *answers, strict=False)):
        wrong = [
            f"{name} of rank {rank} off by {error:.3g} (limit {limit_of(name, one.case.dtype):.3g})"
            for rank, results in enumerate(ranked)
            for name, error in results.items()
            if not error <= limit_of(name, one.case.dtype)
        ]
        if wrong:
            found.append((place, f"{'; '.join(wrong[:4])}\n    in {one}"))
    if len(answers[0]) < len(draws):
        found.append((len(answers[0]), "no draw was made from here on: no group was left that works"))
    return found


def rms_of(pool: Pool, world: int, cases: list[Case]) -> list[dict[str, float]]:
    """RMS error of each result over all ranks, for each case."""
    answers = pool.run("jobs:squared_errors", world, cases=cases)
    found = []
    for index in range(len(cases)):
        sums = {name: np.sum([ranked[index][name] for ranked in answers], axis=0) for name in NAMES}
        found.append({name: float(np.sqrt(total / max(count, 1))) for name, (total, count) in sums.items()})
    return found


def check_rms_growth(pool: Pool, worlds: list[int], cases: list[Case], names: tuple[str, ...] = NAMES) -> None:
    """Asserts that no result is more than 10 % further from the oracle on many ranks than on one."""
    single = rms_of(pool, 1, cases)
    for world in worlds:
        for case, alone, many in zip(cases, single, rms_of(pool, world, cases), strict=True):
            for name in names:
                assert many[name] <= RMS_GROWTH * alone[name], f"{name}: {many[name]} against {alone[name]} in {case}"
