"""tools/check_faults.py: what it finds, and what it finds missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_faults", ROOT / "tools" / "check_faults.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "test_a.py").write_text(
        "def test_one():\n    def test_inner(): pass\n\nasync def test_two(): pass\n\n"
        "# def test_comment(): pass\n\nclass TestIt:\n    def test_three(self): pass\n"
    )
    (tmp_path / "a_test.cc").write_text(
        "TEST(Suite, One) {}\nTEST_P(Suite,\n       Two) {}\n// TEST(Suite, Comment) {}\n"
    )
    return tmp_path


def missing(checker: ModuleType, files: Path, named: str) -> list[str]:
    page = f"# Page\n\n| fault | now | test |\n|---|---|---|\n| bad | good | {named} |\n"
    return [fault for _, fault in checker.faults_of(page, files)]


@pytest.mark.parametrize(
    "named",
    [
        "`test_a.py::test_one`",
        "`test_a.py::test_two`, `a_test.cc::Suite.One`",
        "`test_a.py::TestIt::test_three`",
        "`a_test.cc::Suite.Two`",
    ],
)
def test_tests_that_exist_are_found(checker: ModuleType, files: Path, named: str) -> None:
    assert missing(checker, files, named) == []


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("`test_a.py::test_on`", "no such test"),
        ("`test_a.py::test_inner`", "no such test"),
        ("`test_a.py::test_comment`", "no such test"),
        ("`test_a.py::test_three`", "no such test"),
        ("`a_test.cc::Suite.Comment`", "no such test"),
        ("`a_test.cc::Other.One`", "no such test"),
        ("`test_b.py::test_one`", "no such file"),
        ("a test", "a row without a test"),
    ],
)
def test_what_is_missing_is_named_with_its_line(checker: ModuleType, files: Path, named: str, words: str) -> None:
    page = f"| fault | now | test |\n|---|---|---|\n| bad | good | `test_a.py::test_one` |\n| bad | good | {named} |\n"
    [(line, fault)] = checker.faults_of(page, files)
    assert line == 4
    assert words in fault
    assert named.strip("`") in fault or words == "a row without a test"


def test_the_page_exists_and_has_rows(checker: ModuleType) -> None:
    assert len(checker.NAMED.findall(checker.PAGE.read_text())) >= 17
