"""Refusals: why a place in a graph, a branch or a whole graph stays as it is, as data.

A proof says what it needs by `need(condition, kind, node, *facts)`. If the condition fails, it raises
`Refused` with a `Refusal`: a kind, the node that the reason is about, and facts such as nodes, terms and
sizes. Code chooses by the kind. Text is made last, by `Refusal.reason` and `Refusal.change`, for a report.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from functools import singledispatch
from typing import Any, NoReturn

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..meta.formats import ACTIVATIONS, SMALLEST_SIDE
from . import advice
from .advice import Advice
from .naming import called, input_name, location, source_line

_OPERATORS = f"none of: {', '.join(ACTIVATIONS)}"


@unique
class Kind(Enum):
    """Kinds of refusals, each with its sentence and the change to the model that would help.

    The fields of a sentence are filled with the facts, in order. `{}` is a fact in the user's words,
    `{:input}` is a node's name as an input, `{:at}` and `{:line}` are its line, and `{:shape}` is its shape.
    The change is a text of advice.py, or a function of the first fact's text. If it is None, one of the facts
    has the change.
    """

    def __init__(self, sentence: str, change: Advice | Callable[[str], str] | None) -> None:
        self.sentence, self.change = sentence, change

    # weights
    ARGUMENT = "the weight {} is not a parameter or buffer", advice.PARAMETER
    COMPUTED = "the weight ({}) is computed in the graph", advice.ONCE
    WRITTEN = "the graph writes to the weight {}", advice.NO_WRITES
    GATHERED_ANEW = "{} gathers the weight {:input} anew for each call", advice.NOT_GATHERED
    DIMENSIONS = "the weight {} has {} dimensions, not 3", advice.STACK
    WEIGHT_DTYPE = "the weight {} is {}, not float32, bfloat16 or float16", advice.DTYPE
    DTYPES_DIFFER = "weights of one block differ in dtype", advice.ONE_DTYPE
    DEVICE = "no kernels for device {}", advice.DEVICE
    SYMBOLIC_WEIGHT = "the weight {} has a symbolic shape", advice.STATIC_WEIGHTS
    SYMBOLIC_SHAPE = "a weight has a symbolic shape", advice.STATIC_WEIGHTS
    ODD_K = "K = {} is odd; two codes share a byte, so K must be even", advice.EVEN
    NARROW = (
        "the matrices of {:input} are {} x {}: 4 bits save little of matrices with a side below "
        f"{SMALLEST_SIDE}",
        advice.NARROW,
    )
    QUANTISED_ALONG_N = "the weight {} is quantised along a dimension that its product keeps", advice.ALONG
    PART_QUANTISED_ALONG_N = "a weight is quantised along a dimension that its product keeps", advice.ALONG
    SOME_IN_4_BITS = "some of the experts' weights are held in 4 bits, others not", advice.ONE_FORMAT
    FORMATS_DIFFER = "the experts' weights are in different formats ({})", advice.ONE_FORMAT
    PACKED_DIFFERENTLY = "gate/up and down are packed in different formats or layouts", advice.ONE_FORMAT
    SOME_COLUMNS = "a product takes only some columns of a weight that is held in 4 bits", advice.WHOLE_WEIGHT
    GLOBAL_SCALES_DIFFER = (
        "gate and up are held under global scales of their own, and the activation is not linear in up",
        advice.ONE_GLOBAL_SCALE,
    )
    PACKED_READ_AGAIN = "a weight in 4 bits has other users", advice.EVERY_USE
    OTHER_USERS = "a product of {:input} has other users than this block, at {:at}", advice.EVERY_USE
    BLOCK_STAYS = (
        "a product of {:input} has other users than this block, at {:at}, and is not rewritten: the block "
        "stays as it is",
        advice.EVERY_USE,
    )
    EVERY_USE = "not one operator: {}", advice.EVERY_USE
    EACH_PRODUCT = "not one operator: {}", None
    NO_FFN = "an expert is more or less than gate/up, an activation and down", advice.EACH_PRODUCT
    CORRECTED = (
        "the product with {:input} is corrected by one of smaller rank (LoRA), of {:input} and {:input}",
        advice.MERGE,
    )
    BAKED_WEIGHT = "the weight of a product is computed in the graph, by {}", advice.BAKED_WEIGHTS
    BAKED_WEIGHTS = "the weights of {1} products are computed in the graph, by {0}", advice.BAKED_WEIGHTS
    STACKED_WEIGHT = "the weight of a product is put together in the graph, by {}", advice.ONCE
    STACKED_WEIGHTS = "the weights of {1} products are put together in the graph, by {0}", advice.ONCE

    # experts or not
    UNROUTED = "nothing routes rows to the matrices of {0:input} ({0:shape}): no experts", advice.NO_ROUTER
    NOT_GATED = (
        "no softmax over the matrices of {0:input} ({0:shape}) is seen to weight their results, and nothing "
        "chooses among them: no experts",
        advice.GATES,
    )
    SIDE_BY_SIDE = "nothing routes rows to {} products that are alike: no experts", advice.NO_ROUTER
    PART_SHARED = (
        "all of these experts share the matrix of {0:input} ({0:shape}), so it is no expert's, and they stay "
        "with it",
        advice.PART_SHARED,
    )
    ROUTER = "a softmax or topk chooses by the product with {:input}, so it is a router", advice.ROUTER

    # rows sorted by expert, weights gathered by ids
    PRODUCT_BIAS = "_grouped_mm with a bias", advice.ROW_BIAS
    NO_OFFSETS = "_grouped_mm without offsets", advice.GROUPED
    NOT_2D_BY_3D = "_grouped_mm is not 2D x 3D (rows by experts)", advice.GROUPED
    OFFSETS_DTYPE = "the offsets are {}, not int32", advice.OFFSETS
    OFFSETS_COUNT = "one offset for each expert is needed", advice.OFFSETS
    OFFSETS_SUM = "the offsets ({}) are not a cumulative sum of counts", advice.OFFSETS
    OFFSETS_OF_OTHERS = "the offsets count ids that are not sorted anywhere", advice.OFFSETS
    HISTC_BINS = "histc has {} bins for {} experts", advice.OFFSETS
    HISTC_RANGE = "histc over [{}, {}] does not give each expert a bin; [0, {}] does", advice.OFFSETS
    HISTC_LAST = "histc over [0, {0}] counts id {0} too", advice.OFFSETS
    BINCOUNT_BINS = "bincount has {} bins for {} experts", advice.OFFSETS
    NO_HISTOGRAM = "the offsets add up {}, which is no histogram of expert ids", advice.OFFSETS
    ROWS_ORDER = "the rows ({}) are in another order than the ids that the offsets count", advice.TOKEN_ROWS
    REPEATED = "the rows ({}) are not in the order of the choices", advice.REPEATED
    NOT_RESTORED = "rows are not put back by the inverse permutation", advice.RESTORE
    UNSORTED_WEIGHTS = (
        "the routing weights are not in the order of the sorted rows: {}",
        advice.SORTED_WEIGHTS,
    )
    UNSORTED_BIAS = "the bias is not in the order of the sorted rows: {}", advice.ROW_BIAS
    MASKED_ROWS = "a mask zeroes rows of experts: {} is not a product of the experts alone", advice.BETWEEN
    ONE_ROW_A_WEIGHT = "each gathered weight must meet one row", advice.GATHERED
    ONE_ID_A_ROW = "one expert id for each row is needed", advice.GATHERED
    GATHERED_ODDLY = (
        "ids gather matrices of {:input}, but their product with rows is not read: a row meets several of "
        "them",
        advice.GATHERED,
    )
    NOT_GATHERED = "bmm with an expert weight that is not gathered by expert ids", advice.GATHERED
    READ_OUTSIDE = "{} is also read outside the expert block, so it cannot be fused away", advice.UNREAD
    ELEMENTS_MASK = "masked_scatter has a mask of elements, not of whole rows", advice.PUT_BACK
    OTHER_ROWS_PUT = "masked_scatter fills in rows that its mask did not choose", advice.PUT_BACK
    ROWS_STAY = (
        "a product of {:input}, which makes the rows of this one, stays as it is, at {:at}",
        advice.BATCH_ROWS,
    )

    # a step that is not understood; the last fact is a Step, which has the change
    OPAQUE = "{} is not understood", None
    OPAQUE_WITH_EXPERTS = "{} has experts and is not understood", None
    OPAQUE_ROWS = "{} of an expert's rows is not understood", None
    OPAQUE_OUTPUT = "{} of one expert's output, before all are added, is not understood", None

    # experts that are not read as such
    ONE_LAYER = "{} experts are one linear layer each", advice.ONE_LAYER
    READ_AS_NONE = "products of {} choices of rows are not read as experts", advice.FFN
    RANDOM_BETWEEN = "{} draws random numbers between an expert's products", advice.EVAL
    SUM_BETWEEN = "{} between the two products of an expert is no activation", advice.TWO_PRODUCTS
    BETWEEN = "{} between the two products of an expert is no activation", advice.BETWEEN_PRODUCTS
    THREE_LAYERS = "{} experts have three linear layers or more, one after the other", advice.THREE_LAYERS
    READ_COMPUTED = (
        "{} experts read what others have computed: rows that those before wrote to",
        advice.ONE_AFTER_ANOTHER,
    )
    IN_TURNS = "experts of {} blocks are added to one tensor, in turns", advice.ONE_SUM_EACH
    EXPERTS_DTYPE = "experts that compute in {}, not float32, bfloat16 or float16", advice.DTYPE
    SOME_EXPERTS = "it is the sum of {} of {} experts", advice.ALL_TOGETHER
    GIVEN_NUMBERS = (
        "{} experts, where Python was given a list of numbers: which experts and rows these are may depend "
        "on the data",
        advice.IN_THE_GRAPH,
    )
    OTHER_MASK = "an expert's rows are selected by {}, not by expert ids", advice.KINDS
    PUT_OVER = (
        "experts' rows overwrite {}, which is not zeros, and their ids may name several experts for a row",
        advice.PUT_ROWS,
    )
    FIRST_ROWS = (
        "an expert takes only some of the rows that name it, by a slice (`token[:capacity]`)",
        advice.CAPACITY,
    )

    # a block in index notation
    HIDDEN_NOT_LAST = "the last dimension is not the hidden one", advice.HIDDEN_LAST
    SHARED_BIAS = "it adds something other than each row's expert bias to rows: {}", advice.ROW_BIAS
    SOMETHING_ADDED = "something else is added to it", advice.ADD_LATER
    ONE_EXPERT = "there is only one expert", advice.ONE_EXPERT
    SEVERAL_TENSORS = "experts' rows are put over several tensors", advice.PUT_ROWS
    INDEXED_TWICE = "the weights are indexed twice", advice.INDEX_WEIGHTS
    NOT_INDEXED = "the weights are not indexed by expert", advice.INDEX_WEIGHTS
    EXPERTS_AXES = "experts lie along several axes", advice.EXPERTS_AXIS
    NOT_OVER_CHOICES = "the sum is not over the choices of each token", advice.SUM_CHOICES
    SELECTED_BY = "rows are selected by {}, not by expert ids", advice.MASK
    WHOSE_OUTPUT = "nothing says which expert's output this is", advice.OWN_COLUMN
    SCALED_BY_OTHER = "an expert's output is scaled by {}, which no expert's id chooses", advice.SCALE_LATER
    SEVERAL_AXES = "an expert's rows are summed over several axes", advice.OVER_CHOICES
    OTHER_AXIS = "rows are summed over something other than a token's choices", advice.OVER_CHOICES
    TWO_MASKS = "rows are selected by two masks", advice.MASK
    NO_MASK = "rows are summed without a mask of expert ids", advice.MASK
    MASK_OF_OTHERS = "a mask is not of expert ids", advice.MASK
    MASKED_FOR_ANOTHER = "expert {}'s output is masked for another", advice.MASK
    PRODUCTS_IN_ACTIVATION = "{} products make the activation", advice.TWO_PRODUCTS
    SEVERAL_GAINS = "several vectors scale the activation", advice.TWO_PRODUCTS
    MORE_IN_ACTIVATION = "the activation involves more than gate and up", advice.TWO_PRODUCTS
    GATE_UP_ROWS = "gate and up read different rows", advice.ROWS_OF_X
    GATE_UP_SHAPES = "gate and up differ in shape", advice.SAME_SHAPE
    NOT_OWN_GAIN = "{} is no expert's vector", advice.TWO_PRODUCTS
    NOT_ROWS_OF_X = "the rows of gate/up are not x's", advice.ROWS_OF_X
    COLUMNS_OF_X = "gate/up read some columns of x only", advice.ROWS_OF_X
    ROUTED_DIFFERENTLY = "gate/up and down products route their rows differently", advice.SAME_ROUTE
    NOT_OWN_MATRIX = "{} is no expert's matrix", advice.OWN_MATRIX
    FEWER_EXPERTS = "gate/up and down differ in experts", advice.AS_MANY
    NOT_OWN_BIAS = "{} is no expert's bias", advice.ROW_BIAS
    ROW_A_TOKEN = "x is not one row for each token", advice.ROW_A_TOKEN
    OTHER_SLICE = (
        "the output of expert {0} is joined at position {0}, but it is computed from slice {1} of a buffer",
        advice.SLICES,
    )
    NOT_CONSECUTIVE = "experts {:list} are not consecutive", advice.CONSECUTIVE
    ADDED_AGAIN = "expert {} is added {} times", advice.ONCE_EACH
    SOME_CHOICES = "expert {} serves choices {:list} of {}", advice.ALL_CHOICES
    CHOICES_WEIGHTS = "choices differ in weights", advice.SAME_WEIGHTS
    NOT_AN_ID_A_ROW = "there is not one id for each row", advice.IDS_SHAPE
    NOT_IDS_A_TOKEN = "there is not one row of ids for each token", advice.IDS_SHAPE
    CHOICES_DIMENSIONS = "a token's choices are not one dimension of the ids", advice.IDS_SHAPE
    SYMBOLIC_K = "k is symbolic", advice.STATIC_K
    OTHER_KEPT = "the rows that keep their old values are not the rows without an expert", advice.PUT_ROWS
    KEPT_APART = "rows without an expert keep {}, which cannot be computed separately", advice.PUT_ROWS
    BECOMES = "an expert's output becomes {}", advice.OUTPUT_SCALE
    SCALED_BY = "an expert's output is scaled by {}", advice.OUTPUT_SCALE

    # two experts of one block; the first facts are their numbers
    INPUTS_DIFFER = "experts {} and {} read different inputs ({}, and {})", advice.SAME_X
    SCALES_DIFFER = "experts {} and {} scale their inputs differently", advice.SCALE_BY_EXPERT
    ACTIVATIONS_DIFFER = "experts {} and {} have different activations", advice.SAME_ACTIVATION
    SHAPES_DIFFER = "experts {} and {} have different shapes ({:list} and {:list})", advice.SAME_SHAPES
    IDS_DIFFER = "experts {} and {} are routed by different ids", advice.SAME_IDS
    CHOICES_DIFFER = "experts {} and {} serve a token's choices differently", advice.SAME_CHOICES
    CONDITIONS_DIFFER = "experts {} and {} take rows on different conditions ({}, and {})", advice.CONDITION
    WEIGHTED_DIFFERENTLY = "experts {} and {} are weighted differently ({}, and {})", advice.WEIGHT_BY_EXPERT
    WEIGHTED_BY_ROW = (
        "experts {} and {} are weighted by {}: an expert's id looks up a token's row",
        advice.ROW_BY_TOKEN,
    )
    AFTER_DIFFERS = "experts {} and {} change their outputs differently ({}, and {})", advice.SAME_AFTER
    BIASES_DIFFER = "experts {} and {} differ in biases or gains", advice.ALL_BIASES
    OTHER_CHOICES = "experts {} and {} serve different choices", advice.SAME_CHOICES

    # what the operators cannot do
    OUTPUT_DTYPE = "the output is {}", advice.DTYPE
    ACTIVATION = f"activation {{}} is {_OPERATORS}", advice.ACTIVATION
    GAIN = "a vector of the expert's own scales what enters its down product", advice.FOLD_GAIN
    SOME_BIASES = "only some have biases", advice.ALL_BIASES
    SIZE = "no tensor has the size {}", advice.FLATTEN
    NOT_APART = "{} cannot be computed separately", advice.ROUTING_FIRST
    INDEXED_ODDLY = "{} is indexed oddly", advice.ROUTING_FIRST
    OWN_AXES = "{} has axes of its own", advice.ROUTING_FIRST
    WEIGHT_INDEX = "a weight is indexed by {}", advice.OWN_MATRIX
    NOT_OVER_EXPERTS = "{} is not a matrix over experts", advice.OWN_COLUMN
    TWICE_CHOSEN = "a token may have one expert twice", advice.DISTINCT
    NOT_WHOLE = "not a whole block: {} ({:at})", None

    # a whole graph that cannot be captured
    ATTRIBUTES = "the graph holds tensors as attributes (inline_inbuilt_nn_modules is off?)", advice.INLINE
    ATTRIBUTE = "the graph holds a tensor as an attribute ({})", advice.NO_ATTRIBUTES
    MX_ELEMENTS = "an input is an MXTensor of {}, not of 4 bits", advice.FOUR_BITS
    MX_BLOCKS = "an input is an MXTensor with blocks of {}, not of 32", advice.FOUR_BITS
    SPREAD = "an input is {}", advice.DTENSOR
    SUBCLASS = "an input is a tensor subclass, {}", advice.OTHER_SUBCLASS
    RESIZED = "the graph changes the shape or strides of an input in place", advice.NO_RESIZE
    INPUTS_SHARE = "two inputs share memory and the graph writes to it", advice.OWN_MEMORY
    OUTPUT_SHARES = "an output shares memory with an input that the graph writes to", advice.OWN_MEMORY
    WRITTEN_AT_DATA = (
        "a tensor is written to at a place that only the data knows{:line}",
        advice.PYTHON_NUMBER,
    )
    PART_AT_DATA = (
        "a part of a tensor that a tensor without dimensions selects is written to or returned{:line}",
        advice.INDEX_OF_ONE,
    )
    VIEW_AT_DATA = (
        "{} is given a tensor in place of a number{:line}, which only the data knows",
        advice.INDEX_OF_ONE,
    )
    NUMBER_FROM_DATA = (
        "{} is given a tensor in place of a number{:line}, which only the data knows",
        advice.PYTHON_NUMBER,
    )
    PRODUCT_NOT_FOUND = "a product of {:input} ({}) was not found: {}", None
    READ_BY_OTHER = "{} reads it", advice.PRODUCTS_ONLY

    # a branch or a loop that skips experts without rows
    MAY_BE_EMPTY = "`{}` may be empty", advice.COUNT_TOKENS
    NOT_ALL_HITS = (
        "it is not proved to run over all experts that have rows, and only the data knows how many these are",
        advice.HITS,
    )
    FAILS_FOR_ALL = "over all experts it fails: {}", advice.ALL_RUN
    FAILS_WITHOUT_ROWS = "without rows it fails: {}", advice.ALL_RUN
    BRANCH_INSIDE = "a branch inside of it ends after it", advice.ALL_RUN
    LEAVES = "it leaves the function, or the graph breaks, before both ways meet", advice.ALL_RUN
    TWO_GRAPHS = "it is in two graphs", advice.ALL_RUN
    SETTING_CHANGES = (
        "what is being computed, or a setting of torch, changes where there are rows",
        advice.ALL_RUN,
    )
    DOES_MORE = "{} may do more than compute", advice.ALL_RUN
    READ_LATER = "{}, which is read later, changes if there are rows", advice.elsewhere
    CHANGES = "{} changes if there are rows", advice.elsewhere
    MASK_CHANGES = "the mask changes, which later rounds read", advice.elsewhere("the mask")
    GRADIENTS = "gradients are asked for, and experts without rows have none", advice.NO_GRADIENTS
    SEVERAL_INDICES = "a mask is one of several indices", advice.SIZES
    SIZE_OF_DATA = "{} has a size that only the data knows", advice.SIZES
    SEVERAL_SIZES = "{} is about more than one size", advice.SIZES
    RANDOM = "{} draws random numbers", advice.NO_RANDOM
    RESHAPES = "{} changes a tensor's shape", advice.NO_SHAPES
    WRITES = "{} writes to a tensor that is read later", advice.OWN_TENSOR


@unique
class Step(Enum):
    """Kinds of steps that are not understood, each with what to write in its place."""

    RANDOM = advice.EVAL
    OTHER_TOKENS = advice.SAME_TOKENS
    CHOSEN_BY_EXPERTS = advice.BATCH_ROWS
    PUT = advice.ADD_ROWS
    CUT = advice.SPLIT
    JOINED = advice.SLICES
    SELECTED = advice.ROUTING_FIRST
    SUM_OF_PRODUCTS = advice.TWO_PRODUCTS
    ON_OUTPUT = advice.AFTER_EXPERTS
    OTHER = advice.STEPS

    @property
    def change(self) -> str:
        return str(self.value)


@dataclass(frozen=True, eq=False)
class Refusal:
    """One condition that does not hold."""

    kind: Kind
    node: fx.Node | None
    """The node that the reason is about. None for branches and whole graphs."""
    facts: tuple[Any, ...] = ()

    @property
    def site(self) -> fx.Node:
        """Return `node`, which must not be None."""
        assert self.node is not None
        return self.node

    @property
    def reason(self) -> str:
        """Return the sentence, in the user's words."""
        return _Sentence().vformat(self.kind.sentence, self.facts, {})

    @property
    def change(self) -> str:
        """Return the smallest change to the model that would help, or "none: " and the reason why no change
        helps."""
        change = self.kind.change
        if change is None:
            return next(f.change for f in self.facts if isinstance(f, (Refusal, Step)))
        return change(words(self.facts[0])) if callable(change) else str(change)


class Refused(Exception):
    """A step of a proof does not hold. The place in the graph stays as it is."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal

    def __str__(self) -> str:
        return self.refusal.reason


def need(condition: Any, kind: Kind, node: fx.Node | None, *facts: Any) -> None:
    """Check one step of a proof. A symbolic condition must hold for all sizes; no guard is added."""
    if not statically_known_true(condition):
        raise Refused(Refusal(kind, node, facts))


def refuse(kind: Kind, node: fx.Node | None, *facts: Any) -> NoReturn:
    raise Refused(Refusal(kind, node, facts))


# --- text ---


@singledispatch
def words(fact: Any) -> str:
    """Return a fact in the user's words. Each folder registers how its own types of facts are printed."""
    return str(fact)


words.register(fx.Node, called)


@words.register
def _(fact: Refusal) -> str:
    return fact.reason


def _line(node: fx.Node) -> str:
    code = source_line(node)
    return f" (`{code}`, {location(node)})" if code else ""


_WAYS: dict[str, Callable[[Any], str]] = {
    "": words,
    "input": input_name,
    "at": location,
    "line": _line,
    "shape": lambda node: " x ".join(map(str, node.meta["val"].shape)),
    "list": lambda items: str(list(items)),
}


class _Sentence(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return _WAYS[format_spec](value)
