from groups import Group
from hf import add

GROUP = Group((
    "transformers==4.57.3", "tokenizers==0.22.2", "huggingface-hub==0.36.2", "requests", "urllib3", "idna",
    "certifi", "charset-normalizer",
))  # fmt: skip
add(
    GROUP,
    "aria_text", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe",
    "glm4v_moe_text", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
    "jamba", "jetmoe", "llama4_text", "longcat_flash", "minimax", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text",
)  # fmt: skip
add(GROUP, "nllb-moe", "switch_transformers", becomes=("fp4::indexed_mm",))
