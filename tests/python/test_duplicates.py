"""tools/check_duplicates.py: what counts as code, what it finds, and that the repository has none."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIX = "\n".join(f"step_{number}();" for number in range(6))


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("check_duplicates")


def test_a_planted_pair_is_found_at_its_full_length(checker):
    one = f"begin();\n{SIX}\n  last(1);\nend();\n"
    other = f"first();\n\n    {SIX}\n// told in other words\nlast(1);\nanother();\n"
    assert list(checker.pairs_in({"b.cc": other, "a.cc": one})) == [("a.cc", 2, "b.cc", 3, 7)]
    found = checker.faults_of({"a.cc": one, "b.cc": other}, {})
    assert found == ["a.cc:2: 7 lines of code are those of b.cc:3"]
    assert checker.faults_of({"a.cc": one, "b.cc": other}, {("a.cc", "b.cc"): "a reason"}) == []


def test_a_pair_within_one_file_is_found_once(checker):
    assert list(checker.pairs_in({"a.cc": f"{SIX}\nbetween();\n{SIX}\n"})) == [("a.cc", 1, "a.cc", 8, 6)]
    assert list(checker.pairs_in({"a.cc": "same();\n" * 9})) == []


def test_five_lines_are_no_pair(checker):
    five = SIX.rsplit("\n", 1)[0]
    assert list(checker.pairs_in({"a.cc": five, "b.cc": five})) == []


NO_CODE = {
    "a.cc": '#include "a.h"\n#define LONG \\\n  value\n// words\n/* more\n words */\nusing std::size;\n}\n});\n',
    "a.py": 'import a\nfrom b import (\n    c,\n    d,\n)\n# words\n"""Text.\n\nMore.\n"""\n',
}


@pytest.mark.parametrize("name", NO_CODE)
def test_what_is_no_code_does_not_count(checker, name):
    assert checker.code_of(name, NO_CODE[name]) == []
    assert list(checker.pairs_in({name: NO_CODE[name] * 3, f"b{name}": NO_CODE[name]})) == []


def test_brackets_of_python_do_not_count(checker):
    assert [line.text for line in checker.code_of("a.py", "x = [\n    1,\n]\n")] == ["x = [", "1,"]


def test_a_comment_sign_in_a_text_is_text(checker):
    assert [line.text for line in checker.code_of("a.cc", 'open("http://x");  // why\n')] == ['open("http://x");']


def test_an_allowance_that_nothing_needs_is_a_fault(checker):
    found = checker.faults_of({"a.cc": SIX}, {("a.cc", "b.cc"): "a reason"})
    assert found == ["a.cc: shares nothing with b.cc; take it off the list"]


def test_the_repository_has_none(checker):
    texts = checker.product_texts()
    assert {"python/ringspan/plan.py", "ringspan/ringspan.h", "bench/run.py"} <= texts.keys()
    assert checker.faults_of(texts, checker.ALLOWED) == []
