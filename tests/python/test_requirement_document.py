"""The acceptance tests of the requirement document, cut out of it at run time; the document is no part of this project.

It is looked for in the folder that RINGSPAN_REQUIREMENTS names, else in ../shared/requirements beside the checkout.
"""

from __future__ import annotations

import ast
import math
import os
import re
from pathlib import Path

import pytest
import torch

from ringspan import mechanism

NAME = "004_af4c234f09b68180.txt"
FOLDER = Path(
    os.environ.get("RINGSPAN_REQUIREMENTS") or Path(__file__).resolve().parents[3] / "shared" / "requirements"
)
DOCUMENT = FOLDER / NAME
TESTS = (
    "test_sequence_partition_contract",
    "test_context_parallel_attention_equivalence",
    "test_online_softmax_stability",
    "test_ring_communication_ledger",
)


def function_source(text: str, name: str) -> str:
    """The definition of `name`: its first line and all that is indented under it."""
    found = re.search(rf"^def {name}\(.*\n(?:(?:[ \t].*)?\n)*", text, re.M)
    assert found, f"{NAME} has no function {name}"
    return found[0]


@pytest.mark.parametrize("name", TESTS)
def test_the_document_is_met(name):
    if not DOCUMENT.exists():
        pytest.skip(f"no {NAME} in the folder of RINGSPAN_REQUIREMENTS, nor in ../shared/requirements")
    source = function_source(DOCUMENT.read_text(encoding="utf-8"), name)
    # A cut that lost its assertions would pass.
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(source)))
    namespace = {function: getattr(mechanism, function) for function in mechanism.__all__}
    namespace |= {"torch": torch, "math": math}
    exec(compile(source, NAME, "exec"), namespace)
    namespace[name]()
