"""README and docs show the records in benchmarks/results/, and the commands that repeat the measurements."""

import re
import shlex
import xml.etree.ElementTree as ET

import pytest
from benchmark_scripts import imported
from places import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks").exists(), reason="a source distribution has no benchmarks/"
)


@pytest.fixture(autouse=True)
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return imported("report")


def test_pages_and_pictures_are_what_the_data_give(report):
    """If this fails: python benchmarks/report.py"""
    for file, text in report.made().items():
        assert file.read_text() == text, file.name


def test_each_table_is_on_a_page(report):
    used = re.findall(r"<!-- table: ([a-z0-9_]+) -->", "".join(page.read_text() for page in report.PAGES))
    assert set(used) == set(report.report_cells.TABLES)


@pytest.mark.parametrize("spoil", ["number", "missing"])
def test_a_page_that_differs_is_named(report, monkeypatch, tmp_path, spoil):
    page = tmp_path / "performance.md"
    text = (ROOT / "docs" / "performance.md").read_text()
    page.write_text(text.replace("| 1 | 3.17 |", "| 1 | 3.71 |") if spoil == "number" else text)
    pictures = tmp_path / "pictures"
    for name, value in (
        ("PAGES", [page]),
        ("PICTURES", pictures),
        ("DRAWN", {"decode": report.decode_picture}),
    ):
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(report.record, "ROOT", tmp_path)
    wrong = "performance.md, pictures/decode.svg" if spoil == "number" else "pictures/decode.svg"
    monkeypatch.setattr("sys.argv", ["report.py", "--check"])
    with pytest.raises(SystemExit, match=f"not what the data give: {wrong}; run"):
        report.main()
    monkeypatch.setattr("sys.argv", ["report.py"])
    report.main()
    monkeypatch.setattr("sys.argv", ["report.py", "--check"])
    report.main()
    assert page.read_text() == text


def test_pictures_are_svg_with_each_number(report):
    for name, draw in report.DRAWN.items():
        root = ET.fromstring(str(draw()))
        assert root.tag.endswith("svg") and root.find("{*}title").text, name
        assert not re.search(r"\bnan\b", str(draw()))
    shown = [t.text for t in ET.fromstring(str(report.decode_picture())).findall(".//{*}text")]
    for batch, times in report.report_tables.decode_steps().items():
        assert f"batch {batch}" in shown
        assert all(f"{1e3 * batch / ms:.0f}" in shown for ms in times if ms is not None)


NO_COMMAND = {"peers_h200"}
"""Other people's kernels, which nothing here runs."""
RECORDS = sorted({f.stem for f in (ROOT / "benchmarks" / "results").glob("*.json")} - NO_COMMAND)


@pytest.mark.parametrize("name", RECORDS)
def test_commands_that_measure_again_are_valid(report, name):
    """They name a benchmark, its parser takes the arguments, and they write this very file."""
    python, script, benchmark, *arguments = shlex.split(report.report_cells.again(name))
    assert (python, script) == ("python", "benchmarks/run.py")
    out = arguments[arguments.index("--out") + 1] if "--out" in arguments else None
    if out:
        arguments = arguments[: arguments.index("--out")]
        assert out == f"benchmarks/results/{name}.json"
    else:
        card = name.rpartition("_")[2]
        assert card in ("h100", "h200", "cpu") and f"{benchmark.removeprefix('h200_')}_{card}" == name
    if benchmark not in ("cpu_vs_ggml", "h200_humming"):  # their peers are not installed here
        module = imported(benchmark)
        imported("record").parser_of(module.__doc__, module.add_arguments).parse_args(arguments)
