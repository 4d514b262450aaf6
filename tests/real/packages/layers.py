import torch
from groups import Group, H, alone

GROUP = Group((
    "pytorch-mixtures==0.1.5", "mh-moe==0.0.2", "latent-moe==0.0.3", "loguru==0.7.3",
    "soft-mixture-of-experts==0.2.0", "einops==0.8.2", "omegavit==0.0.1", "sparrow-mlp==3.0.2",
    "swarms-torch==0.2.3", "uni2ts==2.0.0", "jaxtyping==0.3.11", "wadler-lindig==0.1.8", "labml-nn==0.5.1",
    "labml==0.5.3", "labml-helpers==0.4.89", "aptt==1.0.3",
))  # fmt: skip
INDEXED, MASKED = ("fp4::indexed_mm",), ("fp4::grouped_mm_masked",)


def mixtures(which, **changes):
    from pytorch_mixtures.configs import MoEConfig
    from pytorch_mixtures.expert_choice_moe import ExpertChoiceMoE
    from pytorch_mixtures.topk_moe import TopkMoE

    how = dict(
        hidden_dim=H, intermediate_dim=96, num_experts=4, expert_fn="ff", expert_act="relu", router_fn="topk",
        capacity_factor=2.0, topk=2, dtype=torch.float32,
    )  # fmt: skip
    return {"topk": TopkMoE, "ec": ExpertChoiceMoE}[which](MoEConfig(**{**how, **changes}))


@GROUP.case("pytorch-mixtures", "TopkMoE, ReLU", becomes=INDEXED)
def topk_moe():
    return mixtures("topk")


@GROUP.case("pytorch-mixtures", "TopkMoE, GELU, 1 of 6", becomes=INDEXED)
def topk_moe_gelu():
    return mixtures("topk", expert_act="gelu", num_experts=6, topk=1)


@GROUP.case("pytorch-mixtures", "ExpertChoiceMoE", becomes=(), because="index_put")
def expert_choice():
    return mixtures("ec")


@GROUP.case("mh-moe", "SparseMoE", becomes=(), because="`print`")
def mh_moe():
    from mh_moe.main import SparseMoE

    return SparseMoE(H, 4, 2)


@GROUP.case("latent-moe", "LatentMoE, loop")
def latent_loop():
    from latent_moe.main import LatentMoE, LatentMoEConfig

    return LatentMoE(LatentMoEConfig(d=H, m=96, n_experts=4, top_k=1, alpha=2, impl="loop"))


@GROUP.case("latent-moe", "LatentMoE, grouped", becomes=(), because="data-dependent expression Eq(")
def latent_grouped():
    from latent_moe.main import LatentMoE, LatentMoEConfig

    return LatentMoE(LatentMoEConfig(d=H, m=96, n_experts=4, top_k=1, alpha=2, bias=True))


@GROUP.case("soft-mixture-of-experts", "SoftMoE", experts="^$", transposed=r"experts\.weight", becomes=MASKED)
def soft_mixture():
    from soft_mixture_of_experts.soft_moe import SoftMoE

    return SoftMoE(H, H, num_experts=4, slots_per_expert=2)


@GROUP.case("omegavit", "MixtureOfExperts", becomes=INDEXED)
def omegavit():
    from omegavit.main import MixtureOfExperts, ViTConfig

    return MixtureOfExperts(ViTConfig(hidden_size=H, num_experts=4))


@GROUP.case("sparrow-mlp", "MoELayer", takes="rows", becomes=INDEXED)
def sparrow():
    from sparrow.config import SparrowConfig
    from sparrow.layers import MoELayer

    return MoELayer(SparrowConfig(hidden_dim=H, num_experts=4, expert_hidden_size=96))


@GROUP.case("swarms-torch", "SimpleMoE", becomes=INDEXED)
def simple_moe():
    return alone("swarms_torch/structs/simple_moe.py").SimpleMoE(H, 96, H, num_experts=4)


@GROUP.case("swarms-torch", "SwitchMoE", takes="rows", becomes=(), because="`print`")
def switch_moe():
    return alone("swarms_torch/structs/switch_moe.py").SwitchMoE(H, 96, H, num_experts=4)


def with_centroids(b, t):
    return torch.randn(b, t, H), torch.randn(4, H)


@GROUP.case("uni2ts", "MoEFeedForward of Moirai-MoE", takes=with_centroids)
def moirai():
    return alone("uni2ts/module/ffn.py").MoEFeedForward(4, 2, H, 96)


@GROUP.case("labml-nn", "SwitchFeedForward", becomes=INDEXED)
def labml_switch():
    from labml_nn.transformers.feed_forward import FeedForward
    from labml_nn.transformers.switch import SwitchFeedForward

    return SwitchFeedForward(
        capacity_factor=1.2,
        drop_tokens=False,
        is_scale_prob=True,
        n_experts=4,
        expert=FeedForward(H, 96),
        d_model=H,
    )


@GROUP.case("labml-nn", "SwitchFeedForward, gated experts")
def labml_switch_gated():
    from labml_nn.transformers.feed_forward import FeedForward
    from labml_nn.transformers.switch import SwitchFeedForward
    from torch import nn

    expert = FeedForward(
        H, 96, activation=nn.SiLU(), is_gated=True, bias1=False, bias2=False, bias_gate=False
    )
    return SwitchFeedForward(
        capacity_factor=1.2, drop_tokens=False, is_scale_prob=True, n_experts=6, expert=expert, d_model=H
    )


@GROUP.case("aptt", "EfficientDeepSeekMoE")
def aptt_by_experts():
    return alone("aptt/layers/moe.py").EfficientDeepSeekMoE(H, 1, 6, 2, 96)
