"""Shows the shortest use: an unmodified transformers model with its experts in 4 bits.

python examples/quickstart.py
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, max_position_embeddings=256,
)  # fmt: skip
device = "cuda" if torch.cuda.is_available() else "cpu"
model = MixtralForCausalLM(config).to(device, torch.bfloat16).eval()
ids = torch.randint(0, 1000, (2, 32), device=device)

fast = torch.compile(model, backend="fp4", options={"format": "nvfp4"})  # needs no import of fp4_ops

with torch.no_grad():
    print("logits differ by", (fast(input_ids=ids).logits - model(input_ids=ids).logits).abs().max().item())

# Print what was rewritten, and the reasons for the rest:
import fp4_ops  # noqa: E402

with torch.no_grad():
    print(fp4_ops.explain(model, input_ids=ids))

# To free the bf16 experts as well, replace them permanently:
print(fp4_ops.prepare(model, format="nvfp4"))
