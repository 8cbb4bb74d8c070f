"""tools/signatures.py: how many parameters a function has, read out of C++ and Python without a compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from signatures import cxx_signatures, python_signatures

CXX = {
    "void f();": [("f", 0)],
    "int f(void);": [("f", 0)],
    "int f(int a, std::map<int, float> b = {}, int c = g(1, 2));": [("f", 3)],
    "template <class A, class B>\nvoid f(A a, B (&b)[4]) {\n  g(1, 2, 3);\n  auto h = [](int x, int y) {};\n}": [
        ("f", 2)
    ],
    "struct S {\n  explicit S(int a, int b) : a_(a), b_{b} {}\n  int a_, b_;\n};": [("S", 2)],
    "struct T {\n  void (*run)(int a, int b);\n  std::function<void(int, int)> hook;\n};": [("run", 2)],
    "class C {\n public:\n  C(int a);\n  bool operator()(int a, int b) const;\n};": [("C", 1), ("operator", 2)],
    "__attribute__((noinline)) void f(int a) {}": [("f", 1)],
    "const int a = f(1, 2), b{3};": [],
    "TEST_P(Suite, Name) { f(1, 2); }": [],
    "enum class E { kA = f(1, 2), kB };": [],
    "namespace n {\nvoid f(int a);\n}": [("f", 1)],
}


@pytest.mark.parametrize("text", CXX)
def test_cxx(text):
    assert [(found.name, found.count) for found in cxx_signatures(text)] == CXX[text]


def test_lines_are_those_where_a_declaration_begins():
    text = "int x;\n\nvoid f(int a,\n       int b);\nvoid g();\n"
    assert [(found.name, found.line) for found in cxx_signatures(text)] == [("f", 3), ("g", 5)]


def test_python():
    text = "def f(a, /, b, *c, d, **e): ...\nclass C:\n    def g(self, a): ...\n    @classmethod\n    def h(cls): ...\n"
    assert [(found.name, found.count) for found in python_signatures(text)] == [("f", 3), ("g", 1), ("h", 0)]
