from groups import Group
from hf import add

GROUP = Group((
    "transformers==4.51.3", "tokenizers==0.21.4", "huggingface-hub==0.36.2", "requests", "urllib3", "idna",
    "certifi", "charset-normalizer",
))  # fmt: skip
add(
    GROUP,
    "aria_text", "dbrx", "deepseek_v3", "granitemoe", "granitemoeshared", "jamba", "jetmoe",
    "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
add(GROUP, "llama4_text", becomes=("fp4::grouped_mm_masked",))
add(GROUP, "nllb-moe", "switch_transformers", becomes=("fp4::indexed_mm",))
