# ruff: noqa: F401, I001 (in the order of docs/support.md)
"""Ways in which people write a Mixture-of-Experts layer without thinking of fp4_ops, by kind.

`STYLES` has all of them by name. moe_style_base.py says what a style is.
"""

from moe_style_base import (
    STYLES, style, relu2, Expert, Style, ListStyle, StackedStyle, FusedStyle,
)  # fmt: skip
from moe_style_loops import (
    WhereLoop, OneHotLoop, TokenMaskLoop, SlotMaskLoop, FlatMaskLoop, ScatterAddLoop, IndexPutLoop,
    LatentLoop, SkippingLoop, GuardedLoop, AnyLoop, SumLoop, TorchAnyLoop, LenLoop,
)  # fmt: skip
from moe_style_dense import (
    DenseLoop, DenseMaskedLoop, NormedLoop, SoftLoop, DenseStack, DenseEinsum, DenseBmm, ScaledBmm,
    GatherEinsum, GatherBmm, Argmax, ArgmaxLoop, ArgmaxIndexAdd, ArgmaxDense, ArgmaxSplits, ArgmaxBmm,
)  # fmt: skip
from moe_style_sorted import (
    grouped_mm, SortedGroupedMM, PermuteUnpermute, SortedSplits, ScatteredSplits, BinnedSplits,
    RestoredSplits, SlicedLoop, BinnedSlices, Slices, ChunkedSlices, GroupedSlices, StackedSlices,
    FlatSlices, SoftSlots, Capacity,
)  # fmt: skip
import hit_styles
