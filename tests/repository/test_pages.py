"""Pages name files that exist, their Python runs as it stands, and their commands take the arguments."""

import contextlib
import io
import re
import shlex
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
if len(PAGES) < 2:
    pytest.skip("a source distribution has no docs/", allow_module_level=True)

NOT_OURS = {"hf_quant_config.json", "moe.py", "model.py", "serve.py", "my.py", "run.py", "factories.py"}
NOT_OURS |= {"llama.cpp", "gguf_convert_endian.py", "cuda.h", "dense_blockscaled_gemm_persistent.py"}
"""Files of checkpoints, of other programs, and of the user's in examples."""
FILE = re.compile(r"(?<![\w/.{<-])((?:[\w.-]+/)*[\w-]+\.(?:py|cuh|cu|cpp|h|md|svg))\b")


def files() -> set[str]:
    """Lists the paths of all files, and every ending of each path (`a/b.py` and `b.py`)."""
    hidden = (".venv", ".git", "build")
    rooms = [room for room in ROOT.iterdir() if room.is_dir() and room.name not in hidden]
    found = [p.relative_to(ROOT) for room in rooms for p in room.rglob("*.*")]
    found += [p.relative_to(ROOT) for p in ROOT.glob("*.*")]
    return {"/".join(f.parts[at:]) for f in found for at in range(len(f.parts))}


def test_files_that_pages_and_comments_name_exist():
    """A name may begin anywhere in the path: `prepare.py`, `recognise/search.py`."""
    there, wrong = files(), []
    sources = [p for room in ("compile_passes", "csrc", "fp4_ops", "meta") for p in (ROOT / room).rglob("*")]
    for page in [*PAGES, *(p for p in sources if p.suffix in (".py", ".h", ".cuh", ".cu", ".cpp"))]:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if (page.suffix == ".md" and re.match(r"\| `\d|\| `NN_", line)) or "#include" in line:
                continue  # graphs that passes write
            for name in FILE.findall(line):
                own = name.rpartition("/")[2] in NOT_OURS or "build/" in name or "NAME" in name
                if not own and name.removeprefix("../") not in there and name not in GENERATED:
                    wrong.append(f"{page.relative_to(ROOT)}:{number}: {name}")
    assert wrong == []


def test_names_of_the_package_exist_after_its_import():
    """`fp4_ops.generation.why_not` without an import of fp4_ops.generation. A module may need its own import.

    No wheel has fp4_ops.dev.
    """
    named = {n for page in PAGES for n in re.findall(r"`(fp4_ops(?:\.\w+)+)[`(]", page.read_text())}
    named = sorted(n for n in named if not n.startswith("fp4_ops.dev"))
    assert "fp4_ops.generation.why_not" in named and "fp4_ops.prepare" in named
    code = "import importlib, operator, sys, fp4_ops\n"
    code += "for name in sys.argv[1:]:\n"
    code += "    try: operator.attrgetter(name.partition('.')[2])(fp4_ops)\n"
    code += "    except AttributeError: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code, *named], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


GENERATED = {"tables.h", "operator_checks.h", "00_input.py", "01_capture.py"}


def blocks(*languages: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for language, code in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            if language in languages:
                found.setdefault(page.name, []).append(code)
    return found


PYTHON = [
    (page, i) for page, codes in blocks("python").items() if page != "README.md" for i in range(len(codes))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """FOLDER of the examples: the demo model in 4 bits."""
    pytest.importorskip("transformers", "5.17")
    out = tmp_path_factory.mktemp("pages") / "FOLDER"
    import fp4_ops.__main__

    with contextlib.redirect_stdout(io.StringIO()):
        fp4_ops.__main__.main(["quantize", str(ROOT / "examples" / "demo_model"), "-o", str(out)])
    write_gguf(out.parent / "GGUF")
    (out.parent / "examples").symlink_to(ROOT / "examples")
    return out


def write_gguf(folder):
    """GGUF/MODEL.gguf of the examples."""
    from families import tiny
    from gguf_files import metadata_of, tensors_of, write

    folder.mkdir()
    model = tiny("qwen3_moe")
    tensors = tensors_of("qwen3moe", model, dict.fromkeys(("gate", "up", "down"), "MXFP4"))
    write(folder / "MODEL.gguf", metadata_of("qwen3moe", model.config), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("page, i", PYTHON)
def test_python(page, i, folder, monkeypatch, fresh_dynamo, registered):
    """With the names that README gives them: model and tokens."""
    code = blocks("python")[page][i]
    needed = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    for name in needed:
        pytest.importorskip(name)
    if "distributed_config" in code:
        pytest.skip("test_torchrun runs it")
    if "fully_shard" in code:
        pytest.skip("test_wrapped_models.py runs such code in several processes")
    if "gguf_file" in code:
        pytest.importorskip("transformers", "5.23")
    if "generate_batch" in code:
        pytest.skip("test_serving.py runs such a call")
    own_loop = "for e in hit" in code
    names = {} if own_loop else {"model": demo_model()}
    if own_loop:
        names |= {"ids": torch.rand(5, 4).topk(2).indices, "E": 4, "one_hot": F.one_hot}
        names |= {
            "x": torch.randn(5, 8),
            "experts": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)),
        }
    names |= {"torch": torch, "tokens": torch.randint(256, (1, 32))}  # README imports torch
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **options: gm.forward)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, f"{page}: block {i}", "exec"), names)


def demo_model():
    transformers = pytest.importorskip("transformers", "5.17")
    folder = str(ROOT / "examples" / "demo_model")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def commands() -> list[str]:
    """Every `python -m fp4_ops ...` of a block of shell, and every one between backticks with an argument."""
    text = "\n".join(page.read_text() for page in PAGES)
    shell = [code for codes in blocks("", "sh").values() for code in codes]
    found = [line.partition("  #")[0].strip() for block in shell for line in block.splitlines()]
    found += re.findall(r"`(python -m fp4_ops [^`]+)`", text)
    return sorted({re.sub(r"\[(.*?)\]", r"\1", c) for c in found if c.startswith("python -m fp4_ops ")})


@pytest.mark.parametrize("command", commands())
def test_commands_have_arguments_that_are_taken(command, monkeypatch):
    import argparse

    import fp4_ops.__main__

    seen = []
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *args):
        seen.append(parse(self, *args))
        seen[0].run = lambda args: None
        return seen[0]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    arguments = shlex.split(command)[3:]
    if arguments != ["quantize"]:  # the command by its name alone
        fp4_ops.__main__.main(arguments)
        assert seen


def test_scripts_that_pages_name_take_their_arguments():
    """`python SCRIPT ...` between backticks: the script is there, and is Python."""
    text = "\n".join(page.read_text() for page in PAGES)
    scripts = set(re.findall(r"`python ((?!-)[\w/]+\.py)", text))
    assert len(scripts) > 5
    for script in scripts:
        compile((ROOT / script).read_text(), script, "exec")


@pytest.mark.more
@pytest.mark.slow
def test_torchrun(tmp_path):
    """The program of several_gpus.md, by two processes on the CPU."""
    pytest.importorskip("transformers.distributed")
    pytest.importorskip("accelerate")
    (code,) = (c for c in blocks("python")["several_gpus.md"] if "torchrun" in c)
    file = tmp_path / "serve.py"
    file.write_text(code.replace('"MODEL"', repr(str(ROOT / "examples" / "demo_model"))))
    command = re.search(r"# (torchrun .*)", code)[1].split()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def slug(heading: str) -> str:
    plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
    return re.sub(r"[^\w -]", "", plain.lower()).strip().replace(" ", "-")


def test_links_lead_somewhere():
    """Between pages, and to headings of them, as GitHub and the site name these."""
    wrong, count = [], 0
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = link.partition("#")
            if "://" in link:
                continue
            to = (page.parent / file).resolve() if file else page
            headings = re.findall(r"^#+ (.*)", to.read_text(), re.MULTILINE) if to.suffix == ".md" else []
            if not to.exists() or (anchor and anchor not in map(slug, headings)):
                wrong.append(f"{page.name}: {link}")
            count += 1
    assert count > 50 and wrong == []


def test_lines_of_pages_are_at_most_132_columns_wide():
    """Rows of tables cannot be broken; every other line can."""
    wrong = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if len(line) > 132 and not line.startswith("|"):
                wrong.append(f"{page.name}:{number}: {len(line)} columns")
    assert wrong == []


def test_the_way_through_the_compiler_names_functions_that_exist():
    """The table that leads a reader through compile_passes: `function` in `file`, function by function."""
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("| step | functions |")[2].partition("\n\n")[0]
    named = re.findall(r"((?:`[\w.]+`(?:, | and )?)+) in `([\w/]+\.py)`", table)
    assert len(named) > 10
    for names, file in named:
        code = (ROOT / "compile_passes" / file).read_text()
        for name in re.findall(r"[\w.]+", names.replace(" and ", " ")):
            parts = name.split(".")
            assert all(re.search(rf"(def|class) {p}\b|^{p}\b.*=", code, re.MULTILINE) for p in parts), name
