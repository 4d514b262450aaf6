from groups import Group
from hf import add

GROUP = Group((
    "transformers==4.51.3", "tokenizers==0.21.4", "huggingface-hub==0.36.2", "requests", "urllib3", "idna",
    "certifi", "charset-normalizer",
))  # fmt: skip
add(
    GROUP,
    "aria_text", "dbrx", "deepseek_v3", "granitemoe", "granitemoeshared", "jamba", "jetmoe",
    "mixtral", "nllb-moe", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
add(GROUP, "llama4_text", becomes=("fp4::grouped_mm_masked",))
# Tokens beyond an expert's capacity keep what they had.
add(GROUP, "switch_transformers", becomes=(), because="are put over clone")
