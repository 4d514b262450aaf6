"""Dense models. None has experts, but many have weights and products like those of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, HEADS = 64, 4
OWN: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {}
"""Name -> model, and the shape of its input."""
Inputs = tuple[tuple[Tensor, ...], dict[str, Tensor]]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def own(name: str, *shape: int) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(cls: type[nn.Module]) -> type[nn.Module]:
        OWN[name] = cls, shape
        return cls

    return add


# --- one matrix for each of several slices of a token ---


@own("projections of heads (xLSTM)", 2, 9, H)
class HeadwiseProjections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (parameter(HEADS, 32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.cat([x, x], -1).view(*x.shape[:2], HEADS, 32)
        q, k, v = (torch.einsum("bthd,hde->bhte", heads, w) for w in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return y.transpose(1, 2).reshape(*x.shape[:2], -1)


@own("block-diagonal FFN, no router", 2, 9, 2 * H)
class BlockDiagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parameter(HEADS, 32, 48), parameter(HEADS, 48, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("bthd,hdi->bthi", x.unflatten(-1, (HEADS, 32)), self.up))
        return torch.einsum("bthi,hid->bthd", h, self.down).flatten(2)


@own("parts of a token, an FFN each", 9, 2 * H)
class PartsOfAToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ffn = (nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(HEADS))
        self.parts = nn.ModuleList(ffn)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([ffn(part) for ffn, part in zip(self.parts, x.chunk(HEADS, -1))], -1).softmax(-1)


@own("latent attention, absorbed projections", 2, 9, H)
class LatentAttention(nn.Module):
    """Probabilities mix latents, which all heads share; then each head has a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.latent = nn.Linear(H, HEADS * 32), nn.Linear(H, 48)
        self.w_uk, self.w_uv, self.o = parameter(HEADS, 32, 48), parameter(HEADS, 48, 32), nn.Linear(128, H)

    def forward(self, x: Tensor) -> Tensor:
        c, q = self.latent(x), self.q(x).unflatten(-1, (HEADS, 32))
        scores = torch.einsum("bthd,hdc,bsc->bhts", q, self.w_uk, c)
        mixed = torch.einsum("bhts,bsc->bhtc", scores.softmax(-1), c)
        return self.o(torch.einsum("bhtc,hcd->bthd", mixed, self.w_uv).flatten(2))


@own("heads of the tokens that a topk kept", 12, 128)
class PrunedTokens(nn.Module):
    """A choice of tokens that is the same for all matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.w = nn.Linear(128, 1), parameter(HEADS, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.score(x).squeeze(-1).topk(6).indices
        return torch.einsum("thd,hde->the", x[kept].view(-1, HEADS, 32), self.w).flatten(1)


@own("gated heads", 2, 9, H)
class GatedHeads(nn.Module):
    """A sigmoid scales each head before all heads enter one matrix: they are not added up."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.gate, self.o = parameter(HEADS, H, 32), nn.Linear(H, HEADS), nn.Linear(128, H)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bth,ehd->bted", x, self.v) * self.gate(x).sigmoid()[..., None]
        return self.o(y.flatten(2))


# --- several models in one ---


@own("ensemble (TabM)", 9, H)
class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = parameter(8, H, 96), parameter(8, 96, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(torch.einsum("bkh,khi->bki", x[:, None].expand(-1, 8, -1), self.w1))
        return torch.einsum("bki,kio->bko", h, self.w2).mean(1)


@own("BatchEnsemble", 9, H)
class BatchEnsemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r, self.s, self.w = parameter(8, 1, H), parameter(8, 1, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return (self.w(x * self.r) * self.s).mean(0)


@own("mixture of heads, weights that are parameters", 9, H)
class LearnedMixture(nn.Module):
    """The weights of the sum are the same for all inputs: nothing is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.mix = parameter(HEADS, H, 96), parameter(HEADS, 96, H), parameter(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(torch.einsum("th,ehi->tei", x, self.up))
        return torch.einsum("teh,e->th", torch.einsum("tei,eih->teh", h, self.down), self.mix.softmax(-1))


@own("branches (DARTS), weights that are parameters", 9, H)
class LearnedBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ffn = (nn.Sequential(nn.Linear(H, 96), nn.SiLU(), nn.Linear(96, H)) for _ in range(HEADS))
        self.branches, self.alpha = nn.ModuleList(ffn), parameter(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return sum(a * ffn(x) for a, ffn in zip(self.alpha.softmax(-1), self.branches))


# --- a softmax weighs outputs, but no router chooses ---


@own("attention over branches by their sum (SKNet)", 2, 9, H)
class SelectiveKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ffn = (nn.Sequential(nn.Linear(H, 96), nn.ReLU(), nn.Linear(96, H)) for _ in range(3))
        self.branches, self.squeeze, self.select = nn.ModuleList(ffn), nn.Linear(H, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([branch(x) for branch in self.branches], 1)
        weights = self.select(F.relu(self.squeeze(y.sum(1).mean(1)))).softmax(-1)
        return (weights[:, :, None, None] * y).sum(1)


@own("attention over adapters (AdapterFusion)", 2, 9, H)
class AdapterFusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)
        ffn = (nn.Sequential(nn.Linear(H, 48), nn.GELU(), nn.Linear(48, H)) for _ in range(3))
        self.adapters = nn.ModuleList(ffn)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([adapter(x) for adapter in self.adapters], 2)
        scores = torch.einsum("bth,btah->bta", self.q(x), self.k(y))
        return x + torch.einsum("bta,btah->bth", scores.softmax(-1), y)


@own("attention over branches of one Linear", 2, 9, H)
class SelectiveLinear(SelectiveKernel):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(H, H) for _ in range(3))


@own("attention over adapters with a norm", 2, 9, H)
class FusionOfNorms(AdapterFusion):
    def __init__(self) -> None:
        super().__init__()
        ffn = (
            nn.Sequential(nn.Linear(H, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, H)) for _ in range(3)
        )
        self.adapters = nn.ModuleList(ffn)


@own("two branches, their sum squeezed (SENet)", 2, 9, H)
class SqueezeAndExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.squeeze, self.excite = nn.Linear(H, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (branch(x) for branch in self.branches)
        gates = self.excite(F.relu(self.squeeze((first + second).mean(1)))).sigmoid()[:, None]
        return gates[..., :1] * first + gates[..., 1:] * second


@own("heads weighted by their own norms", 2, 9, H)
class WeightedByNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.o = parameter(HEADS, H, 32), parameter(HEADS, 32, H)

    def forward(self, x: Tensor) -> Tensor:
        v = torch.einsum("bth,nhd->btnd", x, self.v)
        return torch.einsum("btnd,ndh->bth", v * v.norm(dim=-1, keepdim=True).softmax(2), self.o)


@own("the best of several heads (multiple choice learning)", 9, H)
class BestHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.rate = parameter(HEADS, H, 96), parameter(HEADS, 96, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bki,kio->bko", F.relu(torch.einsum("bh,khi->bki", x, self.w1)), self.w2)
        best = self.rate(y).squeeze(-1).argmax(1)
        return y[torch.arange(x.shape[0]), best]


@own("a kernel for each example (CondConv)", 9, H)
class ConditionalKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route, self.w = nn.Linear(H, 32), parameter(32, H, H)

    def forward(self, x: Tensor) -> Tensor:
        kernels = torch.einsum("bn,nhk->bhk", self.route(x).sigmoid(), self.w)
        return torch.einsum("bh,bhk->bk", x, kernels)


@own("a kernel for each example, after a ReLU", 9, H)
class KernelAfterRelu(ConditionalKernel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu(x))


@own("a kernel for each sequence, by its mean", 2, 9, H)
class KernelByMean(ConditionalKernel):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        kernels = torch.einsum("bn,nhk->bhk", self.route(x.mean(1)).sigmoid(), self.w)
        return torch.einsum("bth,bhk->btk", x, kernels)


class KernelBeforeGate(ConditionalKernel):
    """A gate scales the columns of the rows that meet the kernel. A column's gate is no expert's score."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, H), nn.Linear(H, H)

    def gated(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        kernels = torch.einsum("bn,nhk->bhk", self.route(x).sigmoid(), self.w)
        return torch.einsum("bh,bhk->bk", self.gated(x), kernels)


@own("a kernel for each example, x sigmoid(x)", 9, H)
class KernelOfSwish(KernelBeforeGate):
    def gated(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


@own("a kernel for each example, mish written out", 9, H)
class KernelOfMish(KernelBeforeGate):
    def gated(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y * F.softplus(y).tanh()


@own("a kernel for each example, ReLU", 9, H)
class KernelOfRelu(KernelBeforeGate):
    def gated(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x))


@own("a kernel for each example, gated linear unit", 9, H)
class KernelOfGlu(KernelBeforeGate):
    def gated(self, x: Tensor) -> Tensor:
        return self.up(x) * self.down(x).sigmoid()


@own("a kernel for each example, gated residual", 9, H)
class KernelOfResidual(KernelBeforeGate):
    def gated(self, x: Tensor) -> Tensor:
        return x + x * self.up(x).softmax(-1)


@own("squeeze and excite, then a kernel for each example", 9, H)
class KernelAfterExcitation(ConditionalKernel):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(H, 32), nn.Linear(32, H)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.excite(F.relu(self.squeeze(x))).sigmoid())


# --- heads of one trunk ---


class Trunk(nn.Module):
    """An attention that is written out comes first."""

    def __init__(self, *heads: nn.Module) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(H, 3 * H), nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        z = (q @ k.transpose(1, 2)).masked_fill(later, -1e9).softmax(-1) @ v
        return torch.cat([head(z) for head in self.heads], -1)


@own("attention, then an FFN for each task", 2, 9, H)
class TaskFfns(Trunk):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(H, 96), nn.ReLU(), nn.Linear(96, 40)) for _ in range(5)))


@own("attention, then an FFN with a norm for each task", 2, 9, H)
class TaskFfnsWithNorms(Trunk):
    def __init__(self) -> None:
        ffn = (
            nn.Sequential(nn.Linear(H, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 40)) for _ in range(5)
        )
        super().__init__(*ffn)


@own("attention, then a layer for each task", 2, 9, H)
class TaskLayers(Trunk):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(H, 40) for _ in range(5)))
        self.pool = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.pool(x))
        return torch.cat([super().forward(z), *(head(z) for head in self.heads)], -1)


@own("prototypes, then a layer for each task", 9, H)
class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.heads = parameter(8, H), nn.ModuleList(nn.Linear(H, 40) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        near = (x @ self.prototypes.t()).softmax(-1)
        z = x + near @ self.prototypes
        return torch.cat([head(z) for head in self.heads] + [self.prototypes[near.argmax(-1)]], -1)


# --- others ---


@own("grouped codebook", 50, 128)
class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(HEADS, 40, 32))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.einsum("bgd,gcd->bgc", x.view(-1, HEADS, 32), self.codebook).argmax(-1)
        return self.codebook[torch.arange(HEADS), nearest].flatten(1)


@own("bilinear layer", 9, H)
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(H, 32), nn.Linear(H, 40), parameter(32, 40, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,bik->bk", self.a(x), torch.einsum("bj,ijk->bik", self.b(x), self.w))


@own("low-rank factors", 9, H)
class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.core = parameter(H, 32), parameter(32, H), parameter(1, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm((x @ self.a)[None], self.core)[0] @ self.b


@own("depthwise convolutions", 2, H, 24)
class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth, self.point = nn.Conv1d(H, H, 3, groups=H), nn.Conv1d(H, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(F.gelu(self.depth(x))).softmax(1)


@own("residual convolutions (ResNet)", 2, 3, 16, 16)
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv, self.head = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(x + self.conv(x)).mean((2, 3))).softmax(-1)


@own("routers of a group each (hierarchical)", 2, 3, 20, H)
class Routers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert_gating = nn.Parameter(torch.randn(2, H, 32) * 0.15)

    def forward(self, x: Tensor) -> Tensor:
        p = torch.einsum("...bnd,...de->...bne", x, self.expert_gating).softmax(-1)
        return p.topk(2, -1).values


# --- transformers ---


def tiny(name: str) -> tuple[nn.Module, Inputs]:
    """One layer or two of a model of transformers, and inputs."""
    import transformers as t

    ids = torch.randint(0, 60, (2, 9))
    text = {"vocab_size": 64, "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    wide = {**text, "intermediate_size": 96}
    vision = {**wide, "image_size": 16, "patch_size": 8}
    del vision["vocab_size"]
    image = torch.randn(2, 3, 16, 16)
    if name == "bert":
        return t.BertModel(t.BertConfig(**wide)), ((ids,), {"attention_mask": torch.ones(2, 9).long()})
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**wide)), ((ids,), {})
    if name == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": H, "n_layer": 1, "n_head": HEADS}
        return t.GPT2LMHeadModel(t.GPT2Config(**sizes)), ((ids,), {})
    if name == "t5":
        sizes = {"d_model": H, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": HEADS}
        return t.T5Model(t.T5Config(vocab_size=64, **sizes)), ((ids,), {"decoder_input_ids": ids})
    if name == "mamba":
        sizes = {"vocab_size": 64, "hidden_size": H, "num_hidden_layers": 1, "state_size": 8}
        return t.MambaModel(t.MambaConfig(**sizes)), ((ids,), {})
    if name == "recurrent_gemma":
        sizes = {**wide, "lru_width": 128, "num_hidden_layers": 2, "head_dim": 16}
        config = t.RecurrentGemmaConfig(**sizes, block_types=["recurrent", "attention"])
        return t.RecurrentGemmaForCausalLM(config), ((ids,), {"use_cache": False})
    if name == "xlstm":
        sizes = {"vocab_size": 64, "hidden_size": H, "num_hidden_layers": 1, "num_heads": HEADS}
        return t.xLSTMModel(t.xLSTMConfig(**sizes, chunk_size=16)), ((ids,), {"use_cache": False})
    if name == "vit":
        return t.ViTModel(t.ViTConfig(**vision)), ((image,), {})
    if name == "clip":
        config = t.CLIPConfig(text_config=wide, vision_config=vision, projection_dim=32)
        return t.CLIPModel(config), ((ids, image), {})
    if name == "whisper":
        sizes = {"d_model": H, "encoder_layers": 1, "encoder_attention_heads": HEADS, "encoder_ffn_dim": 96}
        sizes |= {"decoder_layers": 1, "decoder_attention_heads": HEADS, "decoder_ffn_dim": 96}
        config = t.WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=16)
        return t.WhisperModel(config).encoder, ((torch.randn(2, 8, 32),), {})
    if name == "wav2vec2":
        sizes = {"conv_dim": (32,), "conv_kernel": (8,), "conv_stride": (8,), "num_conv_pos_embeddings": 8}
        config = t.Wav2Vec2Config(
            **wide, **sizes, num_conv_pos_embedding_groups=4, num_codevectors_per_group=8
        )
        return t.Wav2Vec2Model(config), ((torch.randn(2, 160),), {})
    assert name == "convnext"
    config = t.ConvNextConfig(hidden_sizes=[32, 32, 32, 32], depths=[1, 1, 1, 1], image_size=32)
    return t.ConvNextModel(config), ((torch.randn(2, 3, 32, 32),), {})


FAMILIES = (
    "bert", "llama", "gpt2", "t5", "mamba", "recurrent_gemma", "xlstm", "vit", "clip", "whisper", "wav2vec2",
    "convnext",
)  # fmt: skip


def build(name: str) -> tuple[nn.Module, Inputs]:
    if name in OWN:
        cls, shape = OWN[name]
        return cls().eval(), ((torch.randn(*shape),), {})
    model, inputs = tiny(name)
    return model.eval(), inputs
