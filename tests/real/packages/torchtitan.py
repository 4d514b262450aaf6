import torch
from groups import Group, H

GROUP = Group((
    "torchtitan==0.3.0", "spmd-types==0.3.1", "tyro==1.0.17", "shtab==1.13.0", "typeguard==4.6.1",
    "docstring-parser==0.18.0", "torchdata==0.11.0", "tensordict==0.15.3", "rich==15.0.0",
    "einops==0.8.2",
))  # fmt: skip
# The experts compute in bfloat16, whatever the model is in.
BF16 = dict(experts=r"inner_experts\.\w+_E(FD|DF|GD)$", tolerance=1e-2, becomes=("fp4::grouped_mm",))
BLOCK = dict(n_layers=2, dim=H, n_heads=4, attn_backend="flex", moe_comm_backend="standard")


def moe(layers):
    return layers[-1].moe.build()


@GROUP.case("torchtitan", "MoE of Qwen3", **BF16)
def qwen3():
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.qwen3 import _build_qwen3_moe_layers

    rope = CosSinRoPE.Config(dim=16, max_seq_len=64, theta=1e4)
    return moe(_build_qwen3_moe_layers(
        **BLOCK, rope=rope, fuse_qkv=True, n_kv_heads=2, head_dim=16, moe_hidden_dim=96, num_experts=8,
        top_k=2,
    ))  # fmt: skip


@GROUP.case("torchtitan", "MoE of DeepSeek-V3, shared experts", **BF16)
def deepseek_v3():
    from torchtitan.models.common.rope import ComplexRoPE
    from torchtitan.models.deepseek_v3 import _build_dsv3_layers

    return moe(_build_dsv3_layers(
        **BLOCK, rope=ComplexRoPE.Config(dim=16, max_seq_len=64, theta=1e4), n_dense_layers=1, q_lora_rank=0,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, mscale=0.7,
        dense_hidden_dim=96, moe_hidden_dim=96, num_experts=8, num_shared_experts=2, router_top_k=3,
        router_score_func="softmax", non_blocking_capacity_factor=None,
    ))  # fmt: skip


def in_bfloat16(b, t):
    return torch.randn(b, t, H, dtype=torch.bfloat16)


@GROUP.case("torchtitan", "MoE of GPT-OSS, bfloat16", takes=in_bfloat16, **BF16)
def gpt_oss():
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.gpt_oss import _build_gptoss_layers

    how = {k: v for k, v in BLOCK.items() if k != "n_heads"}
    return moe(_build_gptoss_layers(
        **how, rope=CosSinRoPE.Config(dim=16, max_seq_len=64, theta=1e4), fuse_qkv=True, hidden_dim=96,
        num_experts=8, top_k=4, load_balance_coeff=1e-3,
    )).bfloat16()  # fmt: skip
