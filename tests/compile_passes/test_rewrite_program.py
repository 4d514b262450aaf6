"""export -> fp4_ops.rewrite -> run, export again, compile."""

from __future__ import annotations

import pytest
import torch
from conftest import AOTI, more
from families import TRANSPOSED, expert_block, tiny
from moe_models import fake_quantised, relative_error
from moe_styles import STYLES

import fp4_ops
from fp4_ops.compile_passes.program import RewrittenProgram

OPTIONS = {"format": "mxfp4", "activation": "bf16"}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def export(module: torch.nn.Module, x: torch.Tensor, dim: int = 0):
    shapes: tuple = ({dim: torch.export.Dim("tokens", min=2, max=64)},)
    if isinstance(module, RewrittenProgram):
        shapes = (shapes,)  # its forward takes *args
    with torch.no_grad():
        return torch.export.export(module.eval(), (x,), dynamic_shapes=shapes, strict=False)


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["where loop", "dense einsum", "gather + bmm", "sorted grouped_mm (torchtitan)"]
)
def test_styles_survive_export_rewrite_and_another_export(name):
    module = STYLES[name]()
    twin = module.twin("mxfp4")
    rewritten = fp4_ops.rewrite(export(module, torch.randn(9, 32)), OPTIONS)
    assert [s.op for s in rewritten.report.sites] == ["fp4::moe"]
    again = export(rewritten, torch.randn(9, 32)).module()
    targets = {str(n.target) for n in again.graph.nodes}
    assert "fp4.moe.default" in targets and "aten.nonzero.default" not in targets
    for n in (9, 5, 14):
        x = torch.randn(n, 32)
        with torch.no_grad():
            want = twin(x)
            assert relative_error(rewritten(x), want) < 1e-5
            assert relative_error(again(x), want) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch.compile", more("AOTInductor")])  # a prepared model: test_export.py
def test_what_is_rewritten_compiles_and_becomes_an_aotinductor_package(way, tmp_path):
    """A loop of the model's own, by both of the ways that the docs name."""
    module = STYLES["where loop"]()
    twin = module.twin("mxfp4")
    rewritten = fp4_ops.rewrite(export(module, torch.randn(9, 32)), OPTIONS)
    if way == "AOTInductor":
        path = str(tmp_path / "model.pt2")
        program = export(rewritten, torch.randn(9, 32))
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=AOTI)
        compiled = torch._inductor.aoti_load_package(path)
    else:
        compiled = torch.compile(rewritten, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, 32)
            assert relative_error(compiled(x), twin(x)) < 1e-5


class Between(torch.nn.Module):
    """Experts between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (
            torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(n)) for n in (3, 7)
        )
        self.experts = STYLES["where loop"]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.before, self.experts, *self.after):
            x = layer(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("way", ["names", more("AOTInductor")])
def test_constants_are_not_called_like_inputs_of_a_package(way, tmp_path):
    """AOTInductor calls them arg0_1 and so on; two variables with one name are an error in its C++."""
    x = torch.randn(9, 32)
    rewritten = fp4_ops.rewrite(export(Between(), x), OPTIONS)
    program = export(rewritten, x)
    inputs = len(program.graph.find_nodes(op="placeholder"))
    names = {name for name, _ in rewritten.named_buffers()}
    assert names.isdisjoint(f"arg{i}_1" for i in range(inputs)) and len(names) == inputs - 1
    if way == "AOTInductor":
        path = str(tmp_path / "model.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=AOTI)
        with torch.no_grad():
            assert relative_error(torch._inductor.aoti_load_package(path)(x), rewritten(x)) < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_families(family):
    block = expert_block(tiny(family, "grouped_mm"))
    x = torch.randn(1, 9, 64)
    rewritten = fp4_ops.rewrite(export(block, x, dim=1), OPTIONS)
    with torch.no_grad():
        for p in block.parameters():
            if p.dim() == 3:
                p.copy_(fake_quantised(p, "mxfp4", family in TRANSPOSED))
        got, want = first(rewritten(x)), first(block(x))
    assert relative_error(got, want) < 1e-5
    assert sum(b.nbytes for b in rewritten.buffers()) < sum(p.nbytes for p in block.parameters()) / 4


def test_what_cannot_be_rewritten_is_an_error():
    program = export(torch.nn.Linear(32, 8), torch.randn(4, 32))
    with pytest.raises(ValueError, match="nothing was rewritten: nothing in it looks like experts"):
        fp4_ops.rewrite(program)

    mixed = STYLES["where loop"]()
    mixed.list[2].act = torch.nn.functional.gelu
    with pytest.raises(ValueError, match=r"have different activations .*Change: none: "):
        fp4_ops.rewrite(export(mixed, torch.randn(4, 32)))

    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x * self.count

    with pytest.raises(ValueError, match=r"writes to its buffers or inputs\. Change: return new values"):
        fp4_ops.rewrite(export(Writes(), torch.randn(4, 32)))


def test_a_prepared_model_is_4_bits_already():
    block = expert_block(tiny("mixtral", "grouped_mm"))
    fp4_ops.prepare(block)
    program = export(block, torch.randn(1, 9, 64), dim=1)
    told = r"the program already holds 1 fp4 operators \(1 fp4::moe\); it runs in 4 bits as it is"
    with pytest.raises(ValueError, match=told):
        fp4_ops.rewrite(program)


@pytest.mark.parametrize("strict", [False, True])
def test_export_calls_no_backend(strict):
    """As docs/deployment.md says: the original weights, until the program is rewritten."""
    module, x = STYLES["dense einsum"](), torch.randn(9, 32)
    compiled = torch.compile(module, backend="fp4")
    with torch.no_grad():
        program = torch.export.export(compiled, (x,), strict=strict)
        assert not any(str(n.target).startswith("fp4") for n in program.graph.nodes)
        rewritten = fp4_ops.rewrite(program, OPTIONS)
        assert relative_error(rewritten(x), module.twin("mxfp4")(x)) < 1e-5


class Stacked(torch.nn.Module):
    """Rows that another program dispatched. Only the parameters' names say whose they are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, holder = name, torch.nn.Module()
        holder.w1, holder.w2 = (torch.nn.Parameter(torch.randn(4, 32, 32) / 6) for _ in range(2))
        self.add_module(name, holder)

    def forward(self, rows):
        own = self.get_submodule(self.name)
        return torch.bmm(torch.relu(torch.bmm(rows, own.w1)), own.w2)


def test_parameters_have_their_names():
    module = Stacked("experts")
    report = fp4_ops.rewrite(export(module, torch.randn(4, 9, 32), dim=1), OPTIONS).report
    assert {name for s in report.sites for name in s.weights} == {"experts.w1", "experts.w2"}
    with pytest.raises(ValueError, match=r"nothing routes rows to the matrices of layers\.w\d "):
        fp4_ops.rewrite(export(Stacked("layers"), torch.randn(4, 9, 32), dim=1), OPTIONS)


class ReadAlone(torch.nn.Module):
    """One expert of a block also reads other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(32, 4)
        self.ffns = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.SiLU(), torch.nn.Linear(48, 32))
            for _ in range(4)
        )

    def forward(self, x):
        y = torch.stack([ffn(x) for ffn in self.ffns], 1)
        return (self.gate(x).softmax(-1)[..., None] * y).sum(1), self.ffns[0](x.sin())


def test_a_weight_is_read_in_one_precision():
    module, x = ReadAlone(), torch.randn(9, 32)
    rewritten = fp4_ops.rewrite(export(module, x), OPTIONS)
    assert {s.op for s in rewritten.report.sites} == {"fp4::mm"}
    with torch.no_grad():
        for ffn in module.ffns:
            for i in (0, 2):
                codes = torch.ops.fp4.quantize(ffn[i].weight, "mxfp4")
                ffn[i].weight.copy_(torch.ops.fp4.dequantize(*codes, "mxfp4", torch.float32))
        for got, want in zip(rewritten(x), module(x), strict=True):
            assert relative_error(got, want) < 1e-5
