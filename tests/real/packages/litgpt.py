from groups import Group, H

GROUP = Group((
    "litgpt==0.5.13", "lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0",
    "pytorch-lightning==2.6.6",
))  # fmt: skip
SIZES = dict(
    n_layer=2, n_head=4, n_embd=H, n_query_groups=2, padded_vocab_size=128, block_size=64, bias=False,
    norm_class_name="RMSNorm", parallel_residual=False, rotary_percentage=1.0, intermediate_size=96,
    mlp_class_name="LLaMAMoE", n_expert=8, n_expert_per_token=2, moe_intermediate_size=32,
)  # fmt: skip
GROUPED = dict(
    n_shared_expert=1, n_expert_groups=2, n_topk_groups=1, n_topk_scores_per_group=2, first_k_dense_replace=0,
    routed_scaling_factor=2.5, norm_topk_prob=True,
)  # fmt: skip


def config(**changes):
    from litgpt import Config

    return Config(**{**SIZES, **changes})


@GROUP.case("litgpt", "LLaMAMoE")
def moe():
    from litgpt.model import LLaMAMoE

    return LLaMAMoE(config())


@GROUP.case("litgpt", "LLaMAMoE, groups and shared experts")
def moe_grouped():
    from litgpt.model import LLaMAMoE

    return LLaMAMoE(config(**GROUPED))


@GROUP.case("litgpt", "GPT (Mixtral)", takes="ids")
def gpt():
    from litgpt import GPT

    return GPT(config())


@GROUP.case("litgpt", "GPT, biases", takes="ids")
def gpt_biases():
    from litgpt import GPT

    return GPT(config(bias=True))


@GROUP.case("litgpt", "GPT (Qwen3-MoE)", takes="ids")
def gpt_qwen():
    from litgpt import GPT

    return GPT(config(norm_qk=True, norm_topk_prob=True, n_expert_per_token=4))
