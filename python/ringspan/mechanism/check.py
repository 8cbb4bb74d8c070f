"""Runs a learner's functions on the cases of the lessons."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.mechanism.lessons import LESSONS, Case, Lesson

# Float32 sums of a handful of terms, whatever their order.
RELATIVE, ABSOLUTE = 1e-5, 1e-6


class Unreadable(Exception):
    """The learner's file cannot be run at all. The message says why, with the line where there is one."""


@dataclass(frozen=True)
class Fault:
    """The smallest case that fails, both answers in words, and the hint; no case where there is no function."""

    hint: str
    case: Case | None = None
    expected: str = ""
    got: str = ""


@dataclass(frozen=True)
class Verdict:
    """What was found out about one function. `fault` None: every case holds."""

    name: str
    held: int
    cases: int
    fault: Fault | None


def load(path: Path) -> dict[str, Any]:
    """Runs the file and returns its names. Raises Unreadable."""
    if not path.is_file():
        raise Unreadable(f"{path} is {'a folder' if path.is_dir() else 'not there'}; give the file of your exercise")
    try:
        return runpy.run_path(str(path), run_name="exercise")
    except SyntaxError as error:
        raise Unreadable(f"{path}, line {error.lineno}: {error.msg}") from error
    # Whatever a learner's file does on its way, sys.exit included, is no crash of this program.
    except (Exception, SystemExit) as error:
        raise Unreadable(f"{path} cannot be run: {type(error).__name__}: {error}") from error


def check(names: dict[str, Any]) -> list[Verdict]:
    """One verdict for each lesson."""
    return [_check_lesson(lesson, names.get(lesson.name)) for lesson in LESSONS]


def _check_lesson(lesson: Lesson, function: Any) -> Verdict:
    if not callable(function):
        return Verdict(lesson.name, 0, len(lesson.cases), Fault(f"The file defines no function {lesson.name}."))
    calls = [copy.deepcopy(case.arguments) for case in lesson.cases]
    answers = [answer_of(function, arguments) for arguments in calls]
    wrong = [
        place
        for place, case in enumerate(lesson.cases)
        if not agree(calls[place], case.arguments) or not agree(answers[place], answer_of(lesson.right, case.arguments))
    ]
    fault = _describe_fault(lesson, wrong[0], calls[wrong[0]], answers) if wrong else None
    return Verdict(lesson.name, len(lesson.cases) - len(wrong), len(lesson.cases), fault)


def _describe_fault(lesson: Lesson, place: int, arguments: dict[str, Any], answers: list[Any]) -> Fault:
    case = lesson.cases[place]
    if not agree(arguments, case.arguments):
        return Fault(
            "An argument was changed in place; the caller still needs it. Make a new tensor instead.",
            case,
            "arguments that are as they were before the call",
            f"arguments changed to {describe_call(arguments)}",
        )
    expected = describe(answer_of(lesson.right, case.arguments))
    return Fault(_hint(lesson, place, answers), case, expected, describe(answers[place]))


def _hint(lesson: Lesson, place: int, answers: list[Any]) -> str:
    got, case = answers[place], lesson.cases[place]
    if isinstance(got, NotImplementedError):
        return "Not written yet. The text under the function's name says what it should return."
    if isinstance(got, BaseException) and not isinstance(got, ValueError):
        return f"Your code stopped with {type(got).__name__}. {case.hint or lesson.hint}"
    # One small case may be answered alike by several mistakes: the one that agrees most often is the likeliest.
    best_hint, most = case.hint or lesson.hint, 0
    for mistake in lesson.mistakes:
        alike = [
            agree(answer, answer_of(mistake.wrong, other.arguments), nan=True)
            for answer, other in zip(answers, lesson.cases, strict=True)
        ]
        if alike[place] and sum(alike) > most:
            best_hint, most = mistake.hint, sum(alike)
    return best_hint


def answer_of(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What the call returns, or the exception that it raises (SystemExit too: it would end the check)."""
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        return error


def agree(got: Any, expected: Any, nan: bool = False) -> bool:
    """Whether two answers are the same up to rounding; lists and tuples are alike. `nan`: nan equals nan."""
    if isinstance(expected, BaseException):
        return isinstance(got, type(expected))
    if isinstance(expected, Tensor):
        return (
            isinstance(got, Tensor)
            and got.shape == expected.shape
            and torch.allclose(got.double(), expected.double(), RELATIVE, ABSOLUTE, equal_nan=nan)
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(agree(got[key], expected[key], nan) for key in expected)
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(agree(*pair, nan) for pair in zip(got, expected, strict=True))
        )
    return expected is got if expected is None else isinstance(got, Integral) and got == expected


def describe(answer: Any) -> str:
    """An answer in one line."""
    if isinstance(answer, BaseException):
        return f"{type(answer).__name__}: {answer}" if str(answer) else type(answer).__name__
    if isinstance(answer, Tensor):
        return f"{_rounded(answer.tolist())} of shape {list(answer.shape)}"
    if isinstance(answer, list | tuple):
        opening, closing = "[]" if isinstance(answer, list) else "()"
        return opening + ", ".join(map(describe, answer)) + closing
    return repr(answer)


def describe_call(arguments: dict[str, Any]) -> str:
    """Arguments as one would type them, numbers rounded."""
    return ", ".join(f"{name}={_typed(value)}" for name, value in arguments.items())


def _typed(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_typed, value)) + ")"
    return str(_rounded(value.tolist())) if isinstance(value, Tensor) else repr(value)


def _rounded(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [_rounded(number) for number in numbers]
    return float(f"{numbers:.4g}") if isinstance(numbers, float) else numbers
