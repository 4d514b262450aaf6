"""Installation: no gigabytes for headers, words where torch is missing, flags of the machine it is for."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def setup(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` after setup.py has been read with setuptools' own setup() left out."""
    program = f"""
import runpy, setuptools
setuptools.setup = lambda **options: globals().update(options=options)
found = runpy.run_path("setup.py")
{code}
"""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )


def test_a_build_asks_pip_for_no_torch():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert not [r for r in requires if "torch" in r or "nvidia" in r]


def test_without_torch_one_line_says_what_to_do():
    block = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    (line,) = run.stderr.strip().splitlines()
    assert "Install torch 2.11" in line and "--no-build-isolation" in line


def test_another_machine_gets_no_flags_and_no_kernels_of_x86():
    code = "print(*(s for e in options['ext_modules'] for s in e.sources)); print(found['MACHINE'])"
    run = setup(code, _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert run.returncode == 0, run.stderr
    sources, machine = run.stdout.splitlines()
    assert machine == "aarch64"
    assert "kernels_scalar.cpp" in sources and "avx" not in sources
    here = setup(code, _PYTHON_HOST_PLATFORM="linux-x86_64").stdout
    assert {Path(s).name for s in here.split()} > {"kernels_avx2.cpp", "kernels_avx512_bf16.cpp"}
