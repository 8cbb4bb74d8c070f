"""What a score_mod does, read from the operations that it applies to the score.

A score_mod runs with a `Score` in the place of the score: a tensor without a value, which holds the form

    kept ? factor * base + added : -inf          base = score, or tanh(inner * score)

Every operation with it is one of the rules below, which give the form of its result, or a NotImplementedError. Indices
and captured tensors are real, and of every pair of the grid at once (see `grid`), so what is added has its values and
its gradient. Nothing is concluded from samples, and a branch on the score or on an index is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

_EXACT = (
    "score * number, softcap * tanh(score / softcap), then +- what holds no score, and where(condition, score, -inf)"
)


@dataclass(frozen=True, eq=False)
class Form:
    """See the head of this file. `added` and `kept` are of one pair, shape []; None: nothing, everything."""

    dtype: torch.dtype
    factor: float = 1.0
    inner: float | None = None
    added: Tensor | None = None
    kept: Tensor | None = None

    def masked_by_adding(self) -> Form:
        """Without `kept`: masked pairs have -inf in `added`, and what follows acts on it as on any number."""
        if self.kept is None:
            return self
        added = torch.zeros((), dtype=self.dtype) if self.added is None else self.added
        return replace(self, added=torch.where(self.kept, added, -math.inf), kept=None)


class Score(Tensor):
    """The score of one pair. It lies on the meta device: whatever passed the rules by would find no value to use."""

    form: Form

    @staticmethod
    def of(form: Form) -> Score:
        """A score of this form."""
        score = torch.empty((), dtype=form.dtype, device="meta").as_subclass(Score)
        score.form = form
        return score

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            refuse(func, "it is none of the operations offered")
        try:
            inspect.signature(rule).bind(*args, **(kwargs or {}))
        except TypeError:
            refuse(func, "it is not offered with these arguments")
        return rule(*args, **(kwargs or {}))


def refuse(operation: Any, why: str) -> NoReturn:
    """Raises the NotImplementedError of a score_mod that has no exact form here."""
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", str(operation))
    if name == "__get__":
        name = operation.__self__.__name__
    raise NotImplementedError(f"score_mod applies {name} to the score: {why}. Exact are {_EXACT}")


def _add(first: Any, second: Any) -> Score:
    return _plus(first, second, 1.0) if isinstance(first, Score) else _plus(second, first, 1.0)


def _subtract(first: Any, second: Any) -> Score:
    return _plus(first, second, -1.0) if isinstance(first, Score) else _plus(_negate(second), first, 1.0)


def _plus(score: Score, other: Any, sign: float) -> Score:
    """score + sign * other."""
    if isinstance(other, Score):
        refuse("add", "both sides hold the score")
    form = score.form.masked_by_adding()
    term = _without_score(other, form.dtype) * sign
    added = term if form.added is None else form.added + term
    return Score.of(replace(form, added=added, dtype=torch.promote_types(form.dtype, added.dtype)))


def _multiply(first: Any, second: Any) -> Score:
    score, factor = (first, second) if isinstance(first, Score) else (second, first)
    if isinstance(factor, Score):
        refuse("mul", "both sides hold the score")
    return _scaled(score, _number("mul", factor))


def _divide(first: Any, second: Any) -> Score:
    if isinstance(second, Score):
        refuse("div", "the score is the divisor")
    divisor = _number("div", second)
    if divisor == 0:
        refuse("div", "the divisor is 0")
    return _scaled(first, 1.0, divisor)


def _negate(score: Score) -> Score:
    return _scaled(score, -1.0)


def _scaled(score: Score, factor: float, divisor: float = 1.0) -> Score:
    """score * factor / divisor."""
    form = score.form
    if factor / divisor <= 0:
        form = form.masked_by_adding()  # -inf times such a number is not -inf
    added = None if form.added is None else form.added * factor / divisor
    return Score.of(replace(form, factor=form.factor * factor / divisor, added=added))


def _tanh(score: Score) -> Score:
    form = score.form
    if form.inner is not None:
        refuse("tanh", "it went through a tanh before")
    if form.added is not None or form.kept is not None:
        refuse("tanh", "something was added to it or masked before, and a softcap comes first here")
    return Score.of(replace(form, factor=1.0, inner=form.factor))


def _where(condition: Any, first: Any, second: Any) -> Score:
    """One side is -inf, or both hold the score in the same way."""
    is_condition = isinstance(condition, Tensor) and not isinstance(condition, Score)
    if not is_condition or condition.dtype != torch.bool or condition.dim() != 0:
        refuse("where", "its condition is no bool tensor of the pair's indices")
    if isinstance(first, Score) and isinstance(second, Score):
        return _either(condition, first.form, second.form)
    score, other = (first, second) if isinstance(first, Score) else (second, first)
    if not _is_minus_infinity(other):
        refuse("where", "something other than -inf takes its place")
    kept = condition if score is first else ~condition
    form = score.form
    return Score.of(replace(form, kept=kept if form.kept is None else form.kept & kept))


def _either(condition: Tensor, first: Form, second: Form) -> Score:
    if (first.factor, first.inner) != (second.factor, second.inner):
        refuse("where", "the two sides hold it with different factors or softcaps")
    first, second = first.masked_by_adding(), second.masked_by_adding()
    nothing = torch.zeros((), dtype=first.dtype)
    one, other = (nothing if form.added is None else form.added for form in (first, second))
    added = torch.where(condition, one, other)
    return Score.of(replace(first, added=added, dtype=torch.promote_types(first.dtype, added.dtype)))


def _converted(score: Score, dtype: Any) -> Score:
    """`to` and its kin: exact where the dtype loses no digits."""
    if not isinstance(dtype, torch.dtype):
        refuse("to", "it is offered with a dtype only")
    if torch.promote_types(dtype, score.form.dtype) != dtype:
        refuse("to", f"{dtype} would round it")
    return Score.of(replace(score.form, dtype=dtype))


def _filled(score: Score, value: float, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full((), value, dtype=score.form.dtype if dtype is None else dtype)


def _without_score(value: Any, dtype: torch.dtype) -> Tensor:
    """What is added, as a tensor of shape [] in a dtype that loses no more digits of it than PyTorch's own sum."""
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype)
    if value.dim() != 0 or value.is_complex():
        raise ValueError(f"score_mod adds {value.dtype} {list(value.shape)} to the score of one pair; add one number")
    return value.to(torch.promote_types(dtype, value.dtype))


def _number(operation: str, value: Any) -> float:
    """A factor as a float: it must be one number for all pairs, of which no gradient is asked."""
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            refuse(operation, "the other side asks for a gradient, which no scale has; multiply query by it instead")
        try:
            value = value.item()
        except RuntimeError:  # what vmap says of a value that differs between pairs
            refuse(operation, "the other side differs between pairs; where only heads differ, multiply query by it")
    if not math.isfinite(value):
        refuse(operation, f"the other side is {value}")
    return float(value)


def _is_minus_infinity(value: Any) -> bool:
    try:
        return (value.item() if isinstance(value, Tensor) else value) == -math.inf
    except RuntimeError:  # differs between pairs
        return False


def _getter(name: str) -> Callable[..., Any]:
    """What reading an attribute of a tensor calls."""
    return getattr(Tensor, name).__get__


# By the functions themselves: a function of one of these names elsewhere may do something else.
_RULES: dict[Any, Callable] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__), _subtract),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), lambda first, second: _subtract(second, first)),
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), _multiply
    ),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide), _divide),
    **dict.fromkeys((Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__), _divide),
    **dict.fromkeys((torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__), _negate),
    **dict.fromkeys((torch.tanh, Tensor.tanh), _tanh),
    torch.where: _where,
    Tensor.where: lambda score, condition, other: _where(condition, score, other),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill), lambda score, mask, value: _where(mask, value, score)),
    Tensor.to: _converted,
    Tensor.type_as: lambda score, other: _converted(score, other.dtype),
    Tensor.float: lambda score: _converted(score, torch.float32),
    Tensor.double: lambda score: _converted(score, torch.float64),
    torch.zeros_like: lambda score, **kwargs: _filled(score, 0.0, **kwargs),
    torch.ones_like: lambda score, **kwargs: _filled(score, 1.0, **kwargs),
    torch.full_like: _filled,
    _getter("dtype"): lambda score: score.form.dtype,
    _getter("device"): lambda score: torch.device("cpu"),
    _getter("shape"): lambda score: torch.Size(),
    _getter("ndim"): lambda score: 0,
    Tensor.dim: lambda score: 0,
}
