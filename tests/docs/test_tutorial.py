"""The tutorial: every block prints what the page shows, both languages agree, the pictures are those of draw.py."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_snippets import FENCE, ROOT

TUTORIAL = ROOT / "docs" / "tutorial"
LANGUAGES = ("en", "zh")
PAGES = sorted(path.name for path in (TUTORIAL / "en").glob("*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT_PAGE = "08-two-processes.md"
WATCHDOG_S = 240


def text_of(language: str, page: str) -> str:
    return (TUTORIAL / language / page).read_text(encoding="utf-8")


def blocks(language: str, page: str) -> list[tuple[str, str]]:
    """(language of the block, content) of all fenced blocks of a page."""
    return FENCED.findall(text_of(language, page))


def shown_output(language: str, page: str) -> list[tuple[str, str]]:
    """Each Python block with the text block that stands right after it ("" where there is none)."""
    pairs = itertools.pairwise([*blocks(language, page), ("", "")])
    return [
        (source, after if kind_after == "text" else "")
        for (kind, source), (kind_after, after) in pairs
        if kind == "python"
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_blocks_run_in_order_and_print_what_is_shown(language, page):
    namespace: dict = {"__name__": "snippet"}
    for source, expected in shown_output(language, page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{language}/{page}", "exec"), namespace)
        assert printed.getvalue() == expected


def test_both_languages_have_the_same_pages():
    for language in LANGUAGES:
        assert sorted(path.name for path in (TUTORIAL / language).glob("*.md")) == PAGES
        overview = text_of(language, "README.md")
        assert [page for page in PAGES if f"({page})" in overview] == [page for page in PAGES if page != "README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_blocks_and_pictures(page):
    assert blocks("en", page) == blocks("zh", page)
    pictures = [re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text_of(language, page)) for language in LANGUAGES]
    assert pictures[0] == pictures[1]
    headings = [
        len(re.findall(r"^#+ ", FENCED.sub("", text_of(language, page)), re.MULTILINE)) for language in LANGUAGES
    ]
    assert headings[0] == headings[1]


def test_the_two_languages_are_two_languages():
    """Han characters: none in English, more than anything else's words in Chinese."""
    for page in PAGES:
        assert not re.findall(r"[\u4e00-\u9fff]", text_of("en", page))
        prose = FENCED.sub("", text_of("zh", page))
        assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > len(re.findall(r"[A-Za-z]+", prose))


def test_no_block_is_outside_the_pattern_of_the_other_snippets():
    """test_snippets.py sees the same Python blocks."""
    for language in LANGUAGES:
        for page in PAGES:
            text = text_of(language, page)
            assert [match[1] for match in FENCE.finditer(text)] == [
                content for kind, content in blocks(language, page) if kind == "python"
            ]


@pytest.mark.slow
def test_the_pictures_are_those_that_draw_makes(tmp_path):
    import matplotlib.image

    draw = [sys.executable, str(TUTORIAL / "draw.py"), "--out", str(tmp_path)]
    done = subprocess.run(draw, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert done.returncode == 0, done.stderr
    made = {path.name for path in tmp_path.iterdir()}
    kept = {path.name for path in (TUTORIAL / "pictures").iterdir()}
    used = {
        Path(picture).name
        for page in PAGES
        for picture in re.findall(r"!\[[^\]]+\]\(\.\./pictures/([^)]+)\)", text_of("en", page))
    }
    assert made == kept == used
    for name in made:
        fresh, stored = (matplotlib.image.imread(folder / name) for folder in (tmp_path, TUTORIAL / "pictures"))
        assert fresh.shape == stored.shape, f"{name} is out of date; run docs/tutorial/draw.py"
        # Another version of matplotlib may set letters a little differently.
        assert np.abs(fresh - stored).mean() < 0.01, f"{name} is out of date; run docs/tutorial/draw.py"


def end(process: subprocess.Popen) -> None:
    """Ends torchrun if it still runs; asked to, it ends its workers too, which are in sessions of their own."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_script_runs_on_two_processes_and_prints_what_is_shown(tmp_path):
    ((source, _),) = shown_output("en", SCRIPT_PAGE)
    ((_, expected),) = [block for block in blocks("en", SCRIPT_PAGE) if block[0] == "text"]
    (command,) = [content for kind, content in blocks("en", SCRIPT_PAGE) if not kind]
    name = source.splitlines()[0].removeprefix("# ")
    (tmp_path / name).write_text(source)
    program, *arguments = command.split()
    assert (program, arguments[-1]) == ("torchrun", name)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=WATCHDOG_S)
    finally:
        end(process)
    assert process.returncode == 0, errors
    assert printed == expected
