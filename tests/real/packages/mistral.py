import torch
import torch.nn.functional as F
from groups import Group, H
from torch import nn

GROUP = Group(("mistral-inference==1.6.0", "simple-parsing==0.1.9", "docstring-parser==0.18.0"))


class FeedForward(nn.Module):
    """A copy of mistral-inference's class, whose file imports xformers."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(H, 96, bias), nn.Linear(H, 96, bias)
        self.w2 = nn.Linear(96, H, bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def layer(experts: int, k: int, bias: bool = False) -> nn.Module:
    from mistral_inference.moe import MoeArgs, MoeLayer

    args = MoeArgs(num_experts=experts, num_experts_per_tok=k)
    return MoeLayer([FeedForward(bias) for _ in range(experts)], nn.Linear(H, experts, bias=False), args)


@GROUP.case("mistral-inference", "moe.MoeLayer", takes="rows")
def moe_layer():
    return layer(8, 2)


@GROUP.case("mistral-inference", "moe.MoeLayer, experts with biases, 3 of 5", takes="rows")
def moe_layer_with_biases():
    return layer(5, 3, bias=True)


def in_bfloat16(b, t):
    return torch.randn(b * t, H, dtype=torch.bfloat16)


@GROUP.case("mistral-inference", "moe.MoeLayer, bfloat16", takes=in_bfloat16, tolerance=2e-2)
def moe_layer_in_bfloat16():
    return layer(8, 2).bfloat16()
