"""The scripts under benchmarks/ yield rows, and the files under benchmarks/results/ are records of such rows.

test_benchmark_rows.py and test_hopper_rows.py test the rows that the scripts yield.
"""

import argparse
import json
import re
import sys
import types

import pytest
import torch
from benchmark_scripts import FOLDER, imported
from places import ROOT

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="a source distribution has no benchmarks/")
RESULTS = sorted((FOLDER / "results").glob("*.json"))
NOT_BENCHMARKS = {
    *(
        "fit",
        "fit_cpu",
        "gguf_models",
        "hopper_operators",
        "marlin",
        "ranks",
        "record",
        "run",
        "report",
        "report_cells",
        "report_peers",
        "report_slots",
        "report_tables",
        "svg",
        "cpu_machine",
    )
}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", NAMES)
def test_imports(name):
    module = imported(name)
    if name not in NOT_BENCHMARKS:
        module.add_arguments(argparse.ArgumentParser())
        assert callable(module.rows) and f"python benchmarks/{name}.py" in module.__doc__


# --- records ---


@pytest.mark.parametrize("file", RESULTS, ids=lambda f: f.stem)
def test_results_are_records(file):
    record = imported("record")
    text = file.read_text()
    found = json.loads(text)
    assert tuple(found) == record.FIELDS
    assert found["gpu"] or found["cpu"], "a record says what it was measured on"
    assert found["rows"] and all(isinstance(row["table"], str) for row in found["rows"])
    assert not re.search(r'[" =]/\w+/', text), "a path of some machine"
    for script in re.findall(r"python (?!-m)(\S+)", found["command"] or ""):
        assert (ROOT / script).exists(), script
    for row in found["rows"]:
        assert all(isinstance(v, str | int | float | bool | None) for v in row.values())


@pytest.fixture
def broken_off(monkeypatch):
    """A benchmark that yields two rows, then fails."""
    module = types.ModuleType("broken_off")
    module.add_arguments = lambda parser: parser.add_argument("--folder")

    def rows(args):
        yield {"table": "a", "us": 1.25, "kernel": "one"}
        yield {"table": "b", "us": None, "error": 1.23456789e-7}
        raise RuntimeError("time is over")

    module.rows = rows
    monkeypatch.setitem(sys.modules, "broken_off", module)
    return module


def test_run_keeps_what_was_measured(broken_off, tmp_path, capsys):
    run, record = imported("run"), imported("record")
    out = tmp_path / "new" / "broken_off_cpu.json"
    with pytest.raises(RuntimeError, match="time is over"):
        run.run("broken_off", ["--folder", "/some/where/else"], out)
    found = record.read(out)
    assert tuple(found) == record.FIELDS
    assert found["rows"] == [
        {"table": "a", "us": 1.25, "kernel": "one"},
        {"table": "b", "us": None, "error": 1.23457e-7},
    ]
    assert found["command"] == ("python benchmarks/run.py broken_off --folder else --out broken_off_cpu.json")
    assert found["versions"]["torch"] == torch.__version__ and re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "table us kernel a 1.25 one table us error b - 1.2e-07"


def test_run_writes_nothing_without_rows(broken_off, tmp_path):
    broken_off.rows = lambda args: iter(())
    with pytest.raises(SystemExit, match="no row"):
        imported("run").run("broken_off", [], tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_cards():
    card = imported("run").card
    assert [card(n) for n in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090", None)] == [
        "h200", "h100", "5090", "cpu",
    ]  # fmt: skip


def test_run_names_the_benchmarks(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "h200_hoper"])
    with pytest.raises(SystemExit, match=r"no benchmark h200_hoper; there are .*h200_hopper"):
        imported("run").main()
