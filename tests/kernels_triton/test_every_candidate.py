"""Every candidate of tiles.py x dtype of rows x mode x format, compiled for seven architectures of GPUs.

What is compiled must have the architecture's own instructions, and must keep its values in registers; of each
number of tokens some candidate must fit the memory.

`make test` compiles one kernel for each architecture. `make test-archs` (mark `archs`) compiles all that are
chosen, which are those with the most stages that fit, each in a drawn format, and the candidates
with fewer stages where they need most. `make test-archs-all` (mark `archs_all`) compiles all.

Architectures of a family get the same PTX from Triton, so it is made once for them, and ptxas is run for
each. Some, drawn, are compiled for all and compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

import triton_targets
from triton_targets import ARCHITECTURES, BLOCK_MEMORY, FAMILIES, LARGE_STACK, device, gpu

from fp4_ops.backends.triton import launch, ops, tiles
from fp4_ops.backends.triton.launch import Need, Spec
from fp4_ops.backends.triton.tiles import Tile
from fp4_ops.meta.formats import FORMATS

pytestmark = [
    pytest.mark.skipif(launch.INTERPRET, reason="needs the compiler"),
    pytest.mark.skipif(triton_targets.tool("ptxas") is None, reason="this Triton has no ptxas"),
]

BF16, F32 = torch.bfloat16, torch.float32
FORMAT_NAMES = ("nvfp4", "mxfp4", "int4", "int4_g64", "int4_g32")
ROWS = {
    "bfloat16": (1, False, BF16),
    "float16": (2, False, torch.float16),
    "float32": (3, False, F32),
    "fp8": (1, True, F32),
}
"""Activations -> terms, whether there is a factor for each row, dtype of the output."""
MODES = {
    "dense": ops.prepare_dense,
    "masked": ops.prepare_masked,
    "grouped": ops.prepare_grouped,
    "indexed": ops.prepare_indexed,
    "columns": ops.prepare_columns,
    "gated": ops.prepare_indexed,  # the first product of `moe`; its second is "indexed"
}
ACTIVATIONS = ("silu", "swigluoai", "gelu", "gelu_tanh", "gelu_tanh_interleaved", "relu2")
SIZES = ((1536, 2048), (2880, 2880), (4096, 14336), (1504, 1060))  # the last: rows start at any byte
INSTRUCTIONS = {9: "wgmma.mma_async", 10: "tcgen05.mma"}  # of Hopper, of B200; others have mma.sync


@dataclass(frozen=True)
class Form:
    """Parameters of a kernel on which its use of memory and stack depends."""

    family: tuple[int, ...]
    rows: str
    mode: str

    def __str__(self) -> str:
        return f"sm_{self.family[0]}-{self.rows}-{self.mode}"

    def spec(self, format: str, rng: random.Random) -> Spec:
        """Sizes, bias and activation are drawn."""
        terms, factor, out = ROWS[self.rows]
        fmt, gpu = FORMATS[format], device(self.family[0])
        n, k = rng.choice(SIZES)
        scale = torch.zeros(1, dtype=rng.choice((BF16, F32)) if fmt.element == "int4" else torch.uint8)
        bias = rng.choice((None, torch.zeros(1, dtype=BF16), torch.zeros(1)))
        w = ops.WeightArgs(
            torch.zeros(16, dtype=torch.uint8), scale, torch.zeros(1) if fmt.has_global_scale else None,
            None if self.mode == "columns" else bias, 8, n, k, fmt,
        )  # fmt: skip
        if self.mode != "gated":
            return ops.spec_of(MODES[self.mode], w, terms, out, gpu, a_factor=factor)
        h = ops.Hidden(-(-k // 128) * 128, 128, terms)
        gate = rng.choice(ACTIVATIONS)
        return ops.spec_of(MODES[self.mode], w, terms, BF16, gpu, a_div=8, gate=gate, h=h)


FORMS = [
    Form(family, rows, mode)
    for family, rows, mode in itertools.product(FAMILIES, ROWS, MODES)
    if (rows, mode) != ("fp8", "gated")  # blocks with quantised activations are not fused
]


@dataclass
class Kernel:
    """A candidate as compiled for one spec."""

    spec: Spec
    tile: Tile
    needs: Need
    ptx: str
    cubins: dict[int, bytes]

    def fits(self, architecture: int) -> bool:
        return (
            self.needs.shared_memory <= BLOCK_MEMORY[architecture]
            and self.needs.tensor_memory <= launch.TENSOR_MEMORY
        )

    def stack(self, architecture: int, folder) -> int:
        if architecture not in self.cubins:
            self.cubins[architecture] = triton_targets.assemble(self.ptx, architecture, folder)
        return triton_targets.stack(self.cubins[architecture], folder)


def compiled(spec: Spec, tile: Tile, architecture: int) -> Kernel | None:
    """None: Triton itself gives up, and the next candidate is taken."""
    with gpu(architecture):
        fits = launch.fits(spec, tile, device(architecture))
        try:
            needs, made = launch.need(spec, tile), launch.compiled(spec, tile)
        except RuntimeError as error:
            assert launch.COMPILER_FAILED in str(error) and not fits
            return None
    kernel = Kernel(spec, tile, needs, made.asm["ptx"], {architecture: made.asm["cubin"]})
    assert fits == kernel.fits(architecture)
    return kernel


def candidates(spec: Spec, architecture: int) -> dict[Tile, list[Tile]]:
    """Return the tiles that a rule may choose: each shape with fewer and fewer stages."""
    problem = spec.problem()
    found: dict[Tile, list[Tile]] = {}
    for t in tiles.CANDIDATES:
        if tiles.usable(t, problem, device(architecture)):
            tile = tiles.within(t, problem)
            of_shape = found.setdefault(replace(tile, stages=0), [])
            if tile not in of_shape:
                of_shape.append(tile)
    return {shape: sorted(of_shape, key=lambda t: -t.stages) for shape, of_shape in found.items()}


def chosen(spec: Spec, stages: Iterable[Tile], family: tuple[int, ...]) -> Iterator[tuple[Kernel, list[int]]]:
    """With the most stages that fit; for which architectures of the family."""
    left = list(family)
    for tile in stages:
        kernel = compiled(spec, tile, family[0])
        here = [a for a in left if kernel is not None and kernel.fits(a)]
        if kernel is not None and here:
            yield kernel, here
        left = [a for a in left if a not in here]
        if not left:
            return


def every(spec: Spec, stages: Iterable[Tile], family: tuple[int, ...]) -> Iterator[tuple[Kernel, list[int]]]:
    """All that fit, for which architectures of the family."""
    for tile in stages:
        if (kernel := compiled(spec, tile, family[0])) is not None:
            yield kernel, [a for a in family if kernel.fits(a)]


def problems_of(kernel: Kernel, architectures: Iterable[int], folder) -> Iterator[str]:
    """Yield the problems of a kernel on each architecture."""
    for a in architectures:
        instruction = INSTRUCTIONS.get(a // 10, "mma.sync")
        if instruction not in kernel.ptx:
            yield f"sm_{a} {kernel.tile}: no {instruction}: {kernel.spec}"
        if (used := kernel.stack(a, folder)) > LARGE_STACK:
            yield f"sm_{a} {kernel.tile}: {used} bytes of stack: {kernel.spec}"


def random_of(*names: object) -> random.Random:
    """The same each time: a kernel that nothing has compiled yet is for `archs_all`, not for a run that
    changed something else."""
    return random.Random(" ".join(map(str, names)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_drawn_candidate(architecture, tmp_path):
    """One kernel: `make test` cannot compile more."""
    rng = random_of(architecture)
    spec = replace(rng.choice(FORMS), family=(architecture,)).spec(rng.choice(FORMAT_NAMES), rng)
    stages = rng.choice(list(candidates(spec, architecture).values()))
    for kernel, _ in itertools.islice(every(spec, stages, (architecture,)), 1):
        assert not list(problems_of(kernel, [architecture] * kernel.fits(architecture), tmp_path))


@pytest.mark.archs
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_that_are_chosen(form, tmp_path):
    """In a drawn format each; for each architecture some of each number of tokens, but of 128, fits.

    Where the format drawn is one that Triton does not compile for all shapes, nvfp4 has to fit.
    """
    rng, wrong, fitting = random_of(form), [], set()
    formats = rng.sample(FORMAT_NAMES, len(FORMAT_NAMES))
    shapes = list(candidates(form.spec("nvfp4", rng), form.family[0]))

    def compile_all(drawn):
        for shape, format in drawn:
            spec = form.spec(format, rng)
            within = replace(tiles.within(shape, spec.problem()))
            stages = candidates(spec, form.family[0]).get(within, ())  # int4 may not be as deep
            for kernel, here in chosen(spec, stages, form.family):
                wrong.extend(problems_of(kernel, here, tmp_path))
                fitting.update((a, kernel.tile.block_m) for a in here)

    with triton_targets.short_cache():
        compile_all((shape, formats[i % len(formats)]) for i, shape in enumerate(shapes))
        missing = set(itertools.product(form.family, (16, 32, 64))) - fitting
        compile_all((s, "nvfp4") for s in shapes if s.block_m in {m for _, m in missing})
    assert not wrong, "\n".join(wrong)
    assert fitting >= missing


def hardest(tile: Tile, architecture: int, rng: random.Random) -> Spec:
    """Float32 rows are three terms, of which this tile may not be for more than one."""
    for rows in ("float32", "bfloat16"):
        form = Form((architecture,), rows, rng.choice(("gated", "columns", "indexed")))
        for format in ("nvfp4", "mxfp4"):
            spec = form.spec(format, rng)
            if tiles.usable(tile, spec.problem(), device(architecture)):
                return spec
    form = Form((architecture,), "bfloat16", "indexed")
    return form.spec("nvfp4", rng)


@pytest.mark.archs
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_each_number_of_stages_where_it_is_hardest(family, tmp_path):
    """Those with fewer stages than fit are for GPUs that refuse what they should take."""
    rng, wrong = random_of(family), []
    with triton_targets.short_cache():
        for tile in tiles.CANDIDATES:
            spec = hardest(tile, family[0], rng)
            if tiles.usable(tile, spec.problem(), device(family[0])):
                for kernel, here in every(spec, [tile], family):
                    wrong += problems_of(kernel, here, tmp_path)
    assert not wrong, "\n".join(wrong)


@pytest.mark.archs
@pytest.mark.parametrize("form", random_of("ptx").sample([f for f in FORMS if len(f.family) > 1], 3), ids=str)
def test_a_family_has_one_ptx(form):
    rng = random_of(form)
    with triton_targets.short_cache():
        for format in FORMAT_NAMES:
            spec = form.spec(format, rng)
            tile = rng.choice([t for stages in candidates(spec, form.family[0]).values() for t in stages])
            kernels = [compiled(spec, tile, a) for a in form.family]
            plain = {triton_targets.retarget(k.ptx, 80) for k in kernels if k is not None}
            assert len(plain) == 1, (spec, tile)
            assert len({k.needs for k in kernels if k is not None}) == 1 and None not in kernels


@pytest.mark.archs_all
@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_candidate(form, format, tmp_path):
    rng, wrong, fitting = random_of(form, format), [], set()
    with triton_targets.short_cache():
        for stages in candidates(form.spec(format, rng), form.family[0]).values():
            spec = form.spec(format, rng)
            for kernel, here in every(spec, stages, form.family):
                wrong += problems_of(kernel, here, tmp_path)
                fitting |= {(a, kernel.tile.block_m) for a in here}
    assert not wrong, "\n".join(wrong)
    assert fitting >= set(itertools.product(form.family, (16, 32, 64)))
