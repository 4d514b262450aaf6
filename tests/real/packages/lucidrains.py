from groups import Group, H

GROUP = Group((
    "mixture-of-experts==0.2.3", "st-moe-pytorch==0.1.8", "soft-moe-pytorch==0.1.9",
    "CoLT5-attention==0.11.2", "local-attention==1.11.2", "hyper-connections==0.4.11", "einops==0.8.2",
    "einx==0.4.3", "beartype==0.23.1",
))  # fmt: skip
W = r"\.w1$|\.w2$"
MASKED = ("fp4::grouped_mm_masked",)


@GROUP.case("mixture-of-experts", "MoE", experts="^$", transposed=W, becomes=MASKED)
def moe():
    from mixture_of_experts import MoE

    return MoE(dim=H, num_experts=4, hidden_dim=96)


@GROUP.case("st-moe-pytorch", "MoE", becomes=("fp4::indexed_mm",))
def st_moe():
    from st_moe_pytorch import MoE

    return MoE(dim=H, num_experts=4)


@GROUP.case("st-moe-pytorch", "SparseMoEBlock", becomes=("fp4::indexed_mm",))
def st_block():
    from st_moe_pytorch import MoE, SparseMoEBlock

    return SparseMoEBlock(MoE(dim=H, num_experts=4), add_ff_before=True)


@GROUP.case("soft-moe-pytorch", "SoftMoE", becomes=("fp4::indexed_mm",))
def soft_moe():
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=H, seq_len=16, num_experts=4)


@GROUP.case("soft-moe-pytorch", "SoftMoE, GEGLU")
def soft_moe_geglu():
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=H, seq_len=16, num_experts=4, geglu=True)


@GROUP.case("soft-moe-pytorch", "DynamicSlotsSoftMoE")
def dynamic_soft_moe():
    from soft_moe_pytorch import DynamicSlotsSoftMoE

    return DynamicSlotsSoftMoE(dim=H, num_experts=4, geglu=True)
