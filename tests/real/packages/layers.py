import torch
from groups import Group, H

GROUP = Group((
    "pytorch-mixtures==0.1.5", "mh-moe==0.0.2", "latent-moe==0.0.3", "soft-moe==0.0.1", "loguru==0.7.3",
    "soft-mixture-of-experts==0.2.0", "einops==0.8.2", "omegavit==0.0.1", "sparrow-mlp==3.0.2",
    "aptt==1.0.3",
))  # fmt: skip


def mixtures(which, **changes):
    from pytorch_mixtures.configs import MoEConfig
    from pytorch_mixtures.expert_choice_moe import ExpertChoiceMoE
    from pytorch_mixtures.topk_moe import TopkMoE

    how = dict(
        hidden_dim=H, intermediate_dim=96, num_experts=4, expert_fn="ff", expert_act="relu", router_fn="topk",
        capacity_factor=2.0, topk=2, dtype=torch.float32,
    )  # fmt: skip
    return {"topk": TopkMoE, "ec": ExpertChoiceMoE}[which](MoEConfig(**{**how, **changes}))


@GROUP.case("pytorch-mixtures", "TopkMoE, ReLU")
def topk_moe():
    return mixtures("topk")


@GROUP.case("pytorch-mixtures", "TopkMoE, GELU, 1 of 6")
def topk_moe_gelu():
    return mixtures("topk", expert_act="gelu", num_experts=6, topk=1)


@GROUP.case("pytorch-mixtures", "ExpertChoiceMoE")
def expert_choice():
    return mixtures("ec")


@GROUP.case("mh-moe", "SparseMoE")
def mh_moe():
    from mh_moe.main import SparseMoE

    return SparseMoE(H, 4, 2)


@GROUP.case("latent-moe", "LatentMoE, loop", but="shared|router")
def latent_loop():
    from latent_moe.main import LatentMoE, LatentMoEConfig

    return LatentMoE(LatentMoEConfig(d=H, m=96, n_experts=4, top_k=1, alpha=2, impl="loop"))


@GROUP.case("latent-moe", "LatentMoE, grouped", but="shared|router")
def latent_grouped():
    from latent_moe.main import LatentMoE, LatentMoEConfig

    return LatentMoE(LatentMoEConfig(d=H, m=96, n_experts=4, top_k=1, alpha=2, bias=True))


@GROUP.case("soft-moe", "SoftMoELayerWrapper")
def soft_moe():
    from soft_moe.soft_moe import SoftMoELayerWrapper
    from torch import nn

    def layer():
        return nn.Sequential(nn.Linear(H, 96), nn.GELU(), nn.Linear(96, H))

    return SoftMoELayerWrapper(H, num_experts=4, slots_per_expert=2, layer=layer)


@GROUP.case("soft-mixture-of-experts", "SoftMoE", experts="^$", transposed=r"experts\.weight")
def soft_mixture():
    from soft_mixture_of_experts.soft_moe import SoftMoE

    return SoftMoE(H, H, num_experts=4, slots_per_expert=2)


@GROUP.case("omegavit", "MixtureOfExperts")
def omegavit():
    from omegavit.main import MixtureOfExperts, ViTConfig

    return MixtureOfExperts(ViTConfig(hidden_size=H, num_experts=4))


@GROUP.case("sparrow-mlp", "MoELayer", takes="rows")
def sparrow():
    from sparrow.config import SparrowConfig
    from sparrow.layers import MoELayer

    return MoELayer(SparrowConfig(hidden_dim=H, num_experts=4, expert_hidden_size=96))


@GROUP.case("aptt", "DeepSeekMoE")
def aptt():
    from aptt.layers.moe import DeepSeekMoE

    return DeepSeekMoE(d_model=H, n_shared_experts=1, n_routed_experts=4, n_expert_per_token=2, d_ffn=96)
