"""Advice for every refusal: the smallest change to the model after which the block is recognised.

Each kind of refusal (refusal.py) names one of these texts. In the texts, x is the tokens [T, H], ids and
weights are the routing [T, k] over E experts, and rows are tokens repeated for their experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..meta.formats import ACTIVATIONS


@dataclass(frozen=True)
class NoChange:
    """Says why no change to the model would help."""

    why: str

    def __str__(self) -> str:
        return f"none: {self.why}"


Advice = str | NoChange


# --- weights ---

PARAMETER = (
    "hold the weight as a parameter or buffer of a module: an argument may be another one at each call"
)
ONCE = "compute the weight once, outside forward, and keep the result as a parameter or buffer"
NO_WRITES = "write to the weight outside of the compiled function: at the next call it is packed anew"
STACK = "stack the experts' matrices in one parameter [E, N, K] or [E, K, N]"
DTYPE = "use float32, bfloat16 or float16: model.to(torch.bfloat16) before it is compiled"
ONE_DTYPE = "cast all weights of the experts to one dtype"
DEVICE = "move the model to a CPU or a CUDA GPU: there are no kernels for other devices"
STATIC_WEIGHTS = "hold the weight as a parameter or buffer of a module, and mark none of its sizes as dynamic"
EVEN = "pad K to an even number with zeros, in the weight and in the rows that it multiplies"
ALONG = "quantise the weight along the dimension that its product sums over, or leave this one unquantised"
ONE_FORMAT = "quantise all experts' weights in one format, or leave all as they were"
WHOLE_WEIGHT = "quantise the parts of the weight separately, because each has a matrix product of its own"
ONE_GLOBAL_SCALE = "quantise gate and up of an expert together, as one weight with one global scale"
OWN_MATRIX = (
    "let expert e's products read parameters of its own: w[e], a slice of it, or self.experts[e].weight"
)
PRODUCTS_ONLY = "use such a weight in matrix products only: F.linear, x @ w.T, torch.bmm, _grouped_mm"
FOUR_BITS = "quantise the weight to nvfp4, or to mxfp4 in blocks of 32, or leave it unquantised"
OTHER_SUBCLASS = NoChange(
    "fp4_ops does not know the contents of such a tensor. It rewrites graphs whose weights are ordinary "
    "tensors, FP4Tensor, or torchao's NVFP4Tensor or MXTensor"
)

DTENSOR = (
    "call to_local() on the weight before you use it, to get the part of this process, or keep the weight "
    "whole: in transformers by a tp_plan with 'replicate' for embed_tokens and lm_head"
)

NARROW = NoChange(
    "they keep their accuracy, and cost little to read. If they are adapters (LoRA), merge them into the "
    "weights that they correct before the model is compiled: w + scale * b @ a"
)
NO_ROUTER = (
    "if these are experts, select their rows by ids (topk, argmax, one_hot) in the same graph, or weight "
    "their outputs by a router's scores. Or give the weight a path with 'expert' in it: self.experts.w1"
)
GATES = (
    "if these are experts, weight their results by a router's gates and add them up in the same graph: "
    "(y * router(x).softmax(-1)[:, None]).sum(-1) for y [T, N, E]"
)
PART_SHARED = (
    "apply the shared layer outside of the experts: to x before them, or to the sum of their outputs after "
    "them"
)
ROUTER = NoChange("with a router in 4 bits tokens would go to other experts than the model chooses")

# --- rows sorted by expert, weights gathered by ids ---

OFFSETS = (
    "count the ids that sort the rows: ids, perm = ids.flatten().sort(); counts = torch.histc(ids.float(), "
    "bins=E, min=0, max=E - 1); offs = counts.cumsum(0, dtype=torch.int32)"
)
GROUPED = (
    "multiply rows [S, K] sorted by expert with one weight [E, K, N] and offs=. If all experts have the same "
    "number of rows, use torch.bmm"
)
TOKEN_ROWS = (
    "gather the rows by the permutation that sorts the ids: x[perm // k] where ids, perm = "
    "ids.flatten().sort()"
)
STATIC_K = "give the number of choices for each token as a Python number, not as a dynamic dimension"
RESTORE = "put the rows back by the inverse permutation, y[perm.argsort()], and sum .view(T, k, H) over dim 1"
SORTED_WEIGHTS = "scale sorted rows by weights.flatten()[perm], or scale them once they are in token order"
GATHERED = "gather one weight for each row by its expert id: torch.bmm(weight[ids], rows.unsqueeze(-1))"
REPEATED = "repeat each token k times in a row, x.repeat_interleave(k, 0), in the order of ids.flatten()"

# --- a whole block ---

SAME_ROUTE = "route gate/up and down by the same ids: one permutation and the same offsets for both products"
AS_MANY = "give gate/up and down the same number of experts"
ACTIVATION = (
    "to get one fp4::moe, use one of these activations: "
    + ", ".join(ACTIVATIONS)
    + ". Their formulas are in meta/formats.py; gate and up must have the same roles as there. With "
    "any other activation, each product becomes a separate operator in 4 bits"
)
BETWEEN = "put nothing but the activation, and each row's own bias[ids], between the two products"
ROW_BIAS = (
    "add the expert's own bias, bias[ids] for each row, once and before the routing weights; nothing else"
)
UNREAD = "let nothing outside of the block read its intermediate results: return only the block's output"
SUM_CHOICES = (
    "put a token's k rows one after the other, x.repeat_interleave(k, 0) for ids.flatten(), and sum these k "
    "rows in all columns: rows.view(T, k, H).sum(1)"
)

# --- experts in index notation ---

STEPS = (
    "write this step with simpler operators: matrix products, + and *, indexing, torch.where, index_add, "
    "index_put, scatter that adds, views. Or move the step before or after the experts"
)
ADD_ROWS = (
    "add each expert's rows with out.index_add_(0, token, y): out[token] += y adds one row where token names "
    "a row twice, and out[token] = y forgets what other experts wrote"
)
PUT_ROWS = (
    "if each row has one expert, select the rows by the ids, out[ids == e] = y: rows without an expert then "
    "keep their values. If a token has several experts, add their rows to zeros: "
    "torch.zeros_like(x).index_add_(0, token, y)"
)
PUT_BACK = (
    "add an expert's rows to the tokens that they were taken from: token, slot = torch.where(ids == e); "
    "out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])"
)
SAME_TOKENS = (
    "state at the start of forward that ids and weights have one row for each row of x: "
    "torch._check(ids.shape[0] == x.shape[0]), or compile the router together with the experts"
)
SPLIT = (
    "sort the rows by the ids that topk chose, and split them by the number of rows of each expert: counts = "
    "torch.bincount(ids.flatten(), minlength=E); perm = ids.flatten().argsort(); x[perm // "
    "k].split(counts.tolist()). Join the outputs in that order, scale them by weights.flatten()[perm], and "
    "add them up with out.index_add(0, perm // k, y)"
)
FFN = (
    "write an expert as down(act(gate(x)) * up(x)) or down(act(up(x))); for one product alone stack the "
    "experts' weights and gather them by ids: torch.bmm(w[ids], rows.unsqueeze(-1))"
)
ONE_AFTER_ANOTHER = NoChange(
    "experts that refine each other's outputs must run one after the other, but one operator runs all of "
    "them on the same x. If each expert writes only its own rows of a shared tensor, let it read x[token] "
    "and add to zeros by index_add"
)
EVAL = (
    "call model.eval(), which turns dropout off. If inference needs noise, too, draw it before the experts, "
    "or after their outputs are added up"
)
ONE_LAYER = (
    "pass options={'linear': True}, with which each nn.Linear is in 4 bits by itself; or stack the experts' "
    "weights and gather them by ids: torch.bmm(w[ids], rows.unsqueeze(-1))"
)
AFTER_EXPERTS = (
    "do it after the experts' outputs are added up. Before that, these are allowed: a function of each "
    "element (relu, tanh), a vector [H] or one number for each row as a factor, and F.rms_norm over the "
    "whole row"
)
BATCH_ROWS = (
    "if every expert takes the same number of tokens, C, gather them as rows [E, C, H] and multiply these by "
    "the stacked weights: torch.bmm(rows, w). Otherwise no change helps: the proof only covers experts that "
    "tokens choose, not tokens that experts choose"
)
HIDDEN_LAST = "let the experts' output end in its hidden dimension: [..., H]"
FLATTEN = "flatten the tokens before the experts, x.view(-1, H), so that one dimension is dynamic"
ADD_LATER = (
    "add it after the experts' weighted outputs are summed up (times weights.sum(-1, keepdim=True), if "
    "each choice adds it)"
)
ONE_EXPERT = NoChange("a single expert is a linear layer; with options={'linear': True} it is in 4 bits, too")
IN_THE_GRAPH = (
    "keep the numbers in the graph: counts = torch.bincount(ids.flatten(), minlength=E) of ids that topk "
    "chose, then rows.split(counts.tolist()); or loop over all experts, token, slot = torch.where(ids == e)"
)
ALL_TOGETHER = "add all experts' outputs up in one sum before anything else reads them"
ONE_SUM_EACH = "add up the experts of each block first, and then the outputs of the blocks: out = a(x) + b(x)"
THREE_LAYERS = (
    "pass options={'linear': True}, with which each nn.Linear is in 4 bits by itself; one operator has two "
    "layers, gate/up and down"
)
MASK = (
    "select an expert's rows by its own number, token, slot = torch.where(ids == e); ids that should not "
    "count can be set to E before"
)
KINDS = (
    "number the kinds of tokens, and compare the number: ids = torch.where(image, 1, 0); "
    "out[ids == e] = experts[e](x[ids == e])"
)
CONDITION = (
    "put the condition into the ids before the experts, ids = torch.where(keep, ids, E): id E is no "
    "expert's. What differs among experts can be looked up by id: limit[ids]"
)
CAPACITY = (
    "make a mask of the rows that an expert keeps: hot = F.one_hot(ids.flatten(), E); kept = (hot * "
    "(hot.cumsum(0) <= capacity)).view(*ids.shape, E); token, slot = torch.where(kept[..., e])"
)
OWN_COLUMN = (
    "weight expert e by its column, full[:, e] with full = zeros(T, E).scatter(1, ids, weights), or mask "
    "its rows"
)
SLICES = (
    "give expert e slice e of the buffer [E, C, H] and join the outputs in that order: "
    "torch.stack([expert(buffer[e]) for e, expert in enumerate(experts)]). Append a row that is no expert's "
    "after that: torch.cat([joined.flatten(0, 1), row])"
)
ROW_BY_TOKEN = (
    "index the scores by the token first, then by its id: scores.gather(-1, ids), or "
    "scores[token, ids[token]]"
)
SCALE_LATER = "scale the sum of all experts' outputs by it: out * scale[task]"
OVER_CHOICES = "sum an expert's rows only over the choices of one token"
INDEX_WEIGHTS = "index the weights once, by the expert's id in their first dimension: w[ids]"
EXPERTS_AXIS = "stack the experts along one dimension of the weights, and sum over that"
BETWEEN_PRODUCTS = (
    "have an activation without parameters between an expert's products (relu, gelu, silu, ...), and do the "
    "rest before or after the experts; fold a BatchNorm in eval() into the Linear before it "
    "(torch.nn.utils.fusion.fuse_linear_bn_eval)"
)
TWO_PRODUCTS = (
    "compute the activation from one product of x (up), or from two (gate and up). If a product has a "
    "correction (LoRA), merge the correction into the weight: w + scale * b @ a"
)
ROWS_OF_X = "give gate and up the token's whole row, x[token]. One number for each row may scale it"
SAME_SHAPE = "give gate and up the same number of rows"
CONSECUTIVE = (
    "loop over all experts from the first to the last; those that should not run get no rows by ids = "
    "torch.where(ids == e, E, ids) before the loop"
)
ONCE_EACH = (
    "run each expert once, for its own id. Put the weight that its output should have into the routing "
    "weights"
)
ALL_CHOICES = "run every expert for each of a token's k choices, or mask all at once: torch.where(ids == e)"
SAME_WEIGHTS = "let expert e have the same weights for each choice"
ROW_A_TOKEN = "give the experts one row of x for each token, and one row of ids"
IDS_SHAPE = "use ids [T, k], or one id for each row of the output"
OUTPUT_SCALE = (
    "scale an expert's output by a vector [H], by one number for each row, or with F.rms_norm over the whole "
    "row. A factor that is the same for all experts can scale their sum instead. No change helps for others"
)
ROUTING_FIRST = (
    "compute ids and weights, [T, k] each, before the experts, and index them by token and slot only"
)
DISTINCT = "take the ids from topk, whose choices differ, or sum over token, slot = torch.where(ids == e)"
FOLD_GAIN = "multiply the vector into the columns of the down weight, once, when the weights are loaded"
ALL_BIASES = "give all experts a bias, zeros where there is none"

SAME_X = "let all experts read rows of the same x"
SCALE_BY_EXPERT = (
    "scale all experts' inputs in the same way. If each expert has its own factor, look it up by id: "
    "scale[ids]"
)
SAME_ACTIVATION = NoChange(
    "experts with different activations compute different functions, and one operator has one"
)
SAME_SHAPES = (
    "pad the smaller experts with zeros: rows of gate and up, columns of down. The outputs stay the same if "
    "the activation of zero is zero. If it is not, no change helps: one operator has experts of one shape"
)
SAME_IDS = "compare the same ids with each expert's number, ids == e"
SAME_CHOICES = "use the choices of a token in the same way in all experts"
WEIGHT_BY_EXPERT = (
    "multiply the factor that differs between experts into the routing weights before the experts, "
    "weights * scale[ids], or into each expert's down weight"
)
SAME_AFTER = (
    "change all experts' outputs in the same way: the same norm, with one eps and one gain, over the values "
    "of one row. If each expert needs a norm of its own, no change helps"
)

# --- whole graphs ---

EVERY_USE = (
    "to get one fp4::moe, call the experts again for each use of their outputs (for each gate), and use an "
    "expert's output in the weighted sum only. If they are experts of a transformers model, "
    "fp4_ops.prepare(model) works, too"
)
EACH_PRODUCT = NoChange("each of its products is in 4 bits, as an operator of its own")
NOT_GATHERED = NoChange(
    "it would be packed at each call. For inference leave the experts out of the sharding, or load the "
    "whole model on each rank and call fp4_ops.prepare(model): 4 bits take a quarter of the memory"
)
NO_GRADIENTS = "run the model under torch.no_grad() or torch.inference_mode()"
OWN_GRADIENTS = (
    "take what turns gradients on out of the model's code (torch.enable_grad(), set_grad_enabled(True), "
    "inference_mode(False)), or call the experts there under torch.no_grad()"
)
BAKED_WEIGHTS = (
    "make them parameters before the model is compiled: torch.nn.utils.prune.remove, "
    "parametrize.remove_parametrizations, remove_weight_norm, or the like"
)
MERGE = (
    "merge the correction into the weight before the model is compiled, w + scale * b @ a: in PEFT "
    "model.merge_and_unload(), or model.merge_adapter(), which can be undone"
)
INDEX_OF_ONE = (
    "take the part by a tensor of one dimension: w.index_select(0, i.view(1)), or for n elements from i on "
    "w.index_select(0, i + torch.arange(n, device=i.device))"
)
PYTHON_NUMBER = (
    "give the model a Python number in its place, or compute this outside of the compiled function"
)
INLINE = "leave torch._dynamo.config.inline_inbuilt_nn_modules on"
NO_ATTRIBUTES = (
    "make the tensor a buffer or parameter of a module, or create it in forward without data: torch.zeros, "
    "arange"
)
NO_RESIZE = "do not change an input's shape or strides in place: return a view of it"
OWN_MEMORY = "clone one of the two, so that what the graph writes to has memory of its own"
PURE = "return new values instead of writing them to buffers or inputs (a cache, a counter)"
STACK_DEPTH = (
    "Python's stack was full. Make the first call of the compiled model from code that is less deeply "
    "nested, or raise the limit with sys.setrecursionlimit"
)
FAULT = NoChange(
    "this is a fault of fp4_ops, please report it with the model; the log at level DEBUG has the traceback"
)

# --- branches and loops that skip experts without rows ---

ALL_RUN = "in the code that is skipped, only compute rows and add them up"
HITS = (
    "take the experts from a mask of ids that topk chose: mask = one_hot(ids, E).permute(2, 1, 0); hit = "
    "(mask.sum((-1, -2)) > 0).nonzero()"
)
COUNT_TOKENS = "test the number of tokens instead: it is known without the data"


def elsewhere(name: str) -> str:
    return f"compute {name} outside of the code that is skipped"


NO_RANDOM = "draw the random numbers before the loop"
NO_SHAPES = "make a view instead of changing the shape in place"
OWN_TENSOR = "write to the experts' output by index only: out.index_add_(0, token, rows)"
SIZES = "select the rows by torch.where(ids == e), and take no other sizes from the data"
