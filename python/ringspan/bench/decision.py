"""What a result means, by rules that are written down: docs/benchmark.md has them in a table.

A share is compared as a range, p10 to p90 of the rounds. For ten rounds that is about the 98 % confidence interval of
the median (the second to the ninth of ten sorted values, by the binomial distribution); for more it is wider.
"""

from __future__ import annotations

from typing import Any

# An exchange that costs at most this share of a call is not what to work on next.
HIDDEN_SHARE = 0.10
# With fewer rounds p10 and p90 say nothing.
LEAST_REPEATS = 5

# Which rule leads to which value; the schema lists the same pairs.
VALUE_OF = {
    "nothing_was_timed": "not_measured",
    "one_rank": "no_exchange",
    "share_at_most_limit": "exchange_hidden",
    "share_above_limit": "exchange_exposed",
    "limit_within_spread": "inconclusive",
    "too_few_repeats": "inconclusive",
    "error_above_tolerance": "wrong_result",
    "run_failed": "failed",
}


def decide(
    paths: dict[str, dict[str, Any]], world: int, repeats: int, failure: dict[str, Any] | None
) -> dict[str, str]:
    """The entry `decision` of a result, from the entries of its paths and of its failure."""
    if failure is not None:
        rule = "error_above_tolerance" if failure["kind"] == "wrong_result" else "run_failed"
        return _entry(rule, f"{failure['kind']}: {failure['message']}")
    timed = {name: path for name, path in paths.items() if path["time_ms"] is not None}
    if not timed:
        return _entry("nothing_was_timed", "no path was timed")
    if world == 1:
        return _entry("one_rank", "one rank holds everything; nothing is exchanged")
    if repeats < LEAST_REPEATS:
        return _entry("too_few_repeats", f"{repeats} rounds were timed; at least {LEAST_REPEATS} are needed")
    exchanging = {name: path for name, path in timed.items() if path["exposed"] is not None}
    rings = {name: path for name, path in exchanging.items() if path["exchange"] is not None} or exchanging
    name = min(rings, key=lambda key: rings[key]["time_ms"]["median"])
    exposed = rings[name]["exposed"]
    low, high = exposed["p10_share"], exposed["p90_share"]
    reason = (
        f"{name}, the fastest exchange, exposes {exposed['share']:.1%} of its time "
        f"[{low:.1%}, {high:.1%}]; the limit is {HIDDEN_SHARE:.0%}"
    )
    if high <= HIDDEN_SHARE:
        return _entry("share_at_most_limit", reason)
    return _entry("share_above_limit" if low > HIDDEN_SHARE else "limit_within_spread", reason)


def _entry(rule: str, reason: str) -> dict[str, str]:
    return {"value": VALUE_OF[rule], "rule": rule, "reason": reason}
