"""The report: reading order, escaping, foreign files, figures, and the command's exit statuses."""

from __future__ import annotations

import copy
import html.parser
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from ringspan.bench import main as bench
from ringspan.bench.decision import decide
from ringspan.bench.measure import exposed_of, spread_of
from ringspan.bench.result import faults_of
from ringspan.report import main

EVIL = "<script>alert('x')</script> | $a_b$ & `c` \"d\""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def path_entry(exchange: str | None, base: str | None, median: float, world: int, sent: int) -> dict:
    samples = [0.9 * median, median, 1.1 * median]
    exposed = exposed_of(samples, [0.8 * x for x in samples]) if base else None
    return {
        "exchange": exchange,
        "base": base,
        "max_abs_error": 1e-7 if base else None,
        "errors": {},
        "messages": {"ledger": [1] * world, "counted": [1] * world},
        "bytes": {"ledger": [sent] * world, "counted": [sent] * world},
        "time_ms": spread_of(samples),
        "tokens_per_s": 1e3 / median,
        "exposed": exposed,
        "without_overlap": {"time_ms": spread_of(samples), "exposed": exposed} if exchange else None,
        "overlap_share": 0.25 if exchange else None,
    }


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict:
    """A dry run, of which the tests make others."""
    path = tmp_path_factory.mktemp("planned") / "x.json"
    assert bench(["--dry-run", "--output", str(path), "--seq-len", "64", "--run-label", "planned"]) == 0
    return json.loads(path.read_text())


def measured(planned: dict, label: str, world: int = 2, seq_len: int = 64) -> dict:
    result = copy.deepcopy(planned)
    result["run"] |= {"label": label, "id": label}
    result["workload"] |= {"seq_len": seq_len, "local_rows": [seq_len // world] * world}
    result["hardware"]["ranks"] = world
    result["evidence_level"] = "measured_cpu"
    result["metrics"] |= {"exposed_exchange_ms_proxy": 1.0, "exposed_exchange_ms_raw": 1.0, "max_abs_error": 1e-7}
    result["metrics"]["paths"] = {
        "replicated": path_entry(None, None, seq_len / 32, world, 0),
        "gathered": path_entry(None, "replicated", seq_len / 20, world, 123456 * (world - 1)),
        "ring_p2p": path_entry("p2p", "ring_local", seq_len / 25, world, 120000 * (world - 1)),
    }
    result["decision"] = decide(result["metrics"]["paths"], world, 10, None)
    return result


def failed(planned: dict, label: str, message: str) -> dict:
    result = copy.deepcopy(planned)
    result["run"]["label"] = label
    result["failure"] = {"kind": "lost_peer", "message": message, "rank": 1}
    result["decision"] = decide({}, 2, 10, result["failure"])
    return result


def fill(folder: Path, **results: dict) -> Path:
    for name, result in results.items():
        assert faults_of(result) == []
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


class Page(html.parser.HTMLParser):
    """Tags that are open, faults in their nesting, texts, and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":  # the only tag of the page that is never closed
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        self.text += data


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.faults == []
    assert page.open == []
    return page


def test_failures_come_first_and_everything_is_there(planned, tmp_path, capsys):
    results = {
        "a": measured(planned, "two ranks"),
        "b": measured(planned, "three ranks", world=3),
        "c": measured(planned, "long", seq_len=128),
        "z": failed(planned, "broken", "rank 1 is gone"),
        "p": planned,
    }
    folder = fill(tmp_path, **results)
    (folder / "foreign.json").write_text('{"answer": 42}')
    (folder / "broken.json").write_text("{")
    (folder / "deep.json").write_text("[" * 100000)
    page_file, text_file = tmp_path / "out.html", tmp_path / "out.md"
    assert main([str(folder), "--html", str(page_file), "--markdown", str(text_file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    for name in ("foreign", "broken", "deep"):
        assert f"left out {name}.json" in printed.err
    page = read(page_file)
    for text in (page.text, text_file.read_text()):
        places = [text.index(word) for word in ("rank 1 is gone", "two ranks", "123,456 / 123,456", "foreign.json")]
        assert places == sorted(places)
        assert "25%" in text
    table = text_file.read_text().split("## Results")[1].split("## Runs")[0]
    labels = [line.split("|")[1].strip() for line in table.strip().splitlines()[2:]]
    assert labels == ["broken", "planned", *["two ranks"] * 3, *["three ranks"] * 3, *["long"] * 3]
    # Against ranks, against length, exposed shares; no figure loads anything.
    assert page.tags.count("svg") == 3
    assert all(reference.startswith("#f") for reference in page.references)
    assert len(set(page.ids)) == len(page.ids)
    assert "script" not in page.tags
    assert "prefers-color-scheme: dark" in page_file.read_text()
    assert "@media print" in page_file.read_text()


def test_the_figures_are_xml_and_take_the_colour_of_the_text(planned, tmp_path):
    folder = fill(tmp_path, a=measured(planned, EVIL), b=measured(planned, EVIL, world=4))
    assert main([str(folder), "--html", str(tmp_path / "out.html")]) == 0
    pictures = re.findall(r"<svg .*?</svg>", (tmp_path / "out.html").read_text(), flags=re.S)
    assert len(pictures) == 2
    for picture in pictures:
        root = ET.fromstring(picture)
        assert "currentColor" in picture
        assert not re.search(r"(?:fill|stroke): (?:#000000|black)\b", picture)
        assert root.get("viewBox")
    assert "alert('x')" in "".join(ET.fromstring(pictures[1]).itertext())


def test_schedules_stand_side_by_side(planned, tmp_path):
    """In the table, in a figure of their own for each run that has several, and in the lines against ranks."""
    schedules = ["ring", "pruned", "hybrid:2x4", "hybrid:4x2"]
    results = {}
    for world in (8, 16):
        result = measured(planned, f"run of {world}", world)
        for place, schedule in enumerate(schedules):
            entry = path_entry("all_to_all", "ring_local", 3.0 + place, world, 1000 * (place + 1))
            result["metrics"]["paths"][f"{schedule}_all_to_all"] = entry | {"schedule": schedule}
        results[f"w{world}"] = result
    assert main([str(fill(tmp_path, **results)), "--html", str(tmp_path / "out.html")]) == 0
    page = read(tmp_path / "out.html")
    assert page.text.count("Schedules side by side") == 2
    assert "hybrid:4x2_all_to_all" in page.text
    pictures = re.findall(r"<svg .*?</svg>", (tmp_path / "out.html").read_text(), flags=re.S)
    texts = [[text.strip() for text in ET.fromstring(picture).itertext() if text.strip()] for picture in pictures]
    against, *beside, exposed = texts
    assert len(beside) == 2
    for drawn in beside:
        assert [text for text in drawn if text in schedules] == schedules
    for name in ("pruned_all_to_all", "hybrid:2x4_all_to_all", "hybrid:4x2_all_to_all"):
        assert name in against
        assert any(name in text for text in exposed)
    # Two of a kind share the colour, not the kind of line.
    assert "stroke-dasharray" in pictures[0]


def test_all_text_is_escaped(planned, tmp_path, capsys):
    evil = measured(planned, EVIL)
    evil["run"]["command"] = evil["workload"]["id"] = evil["hardware"]["cpu"] = EVIL
    folder = fill(tmp_path, a=evil, b=failed(planned, "x", EVIL + "\n# heading\n- item"))
    (folder / "<b>.json").write_text("{}")
    assert main([str(folder), "--html", str(tmp_path / "out.html")]) == 0
    page = read(tmp_path / "out.html")
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert page.text.count(EVIL) >= 5
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "<script" not in text
    assert "<b>" not in text
    assert not re.search(r"^(# heading|- item)", text, flags=re.M)
    table = text.split("## Results")[1].split("## Runs")[0].strip().splitlines()
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
    assert widths == {11}


def test_plain_data_and_exit_statuses(planned, tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "holds no result" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("null")
    assert main([str(tmp_path), "--html", str(tmp_path / "x.html")]) == 1
    capsys.readouterr()
    fill(tmp_path, good=measured(planned, "good"))
    assert main([str(tmp_path), "--json", "--strict"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in content["rows"]] == ["replicated", "gathered", "ring_p2p"]
    assert content["rows"][1]["bytes_counted"] == [123456, 123456]
    assert [entry["file"] for entry in content["rejected"]] == ["x.json"]
    fill(tmp_path, bad=failed(planned, "bad", "m"))
    assert main([str(tmp_path), "--json"]) == 0
    assert main([str(tmp_path), "--json", "--strict"]) == 1
    capsys.readouterr()
    for arguments in (
        [str(tmp_path / "none")],
        [str(tmp_path), "--html", str(tmp_path / "no" / "x.html")],
        [str(tmp_path), "--markdown", str(tmp_path)],
        [str(tmp_path), "--colour"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert arguments[-1].rsplit("/", 1)[-1] in capsys.readouterr().err
