"""GGUF files, as llama.cpp writes them: experts read packed, everything else dequantised.

`reader` knows the file, `types` the arithmetic of ggml's types, `architectures` the names and the config, and
`weights` joins them to what the rest of `checkpoints` reads.
"""

from .architectures import OTHER_CONFIG
from .architectures import config_of as gguf_config
from .reader import GGUF, find_gguf
from .weights import dense_of, experts_of

__all__ = ["GGUF", "OTHER_CONFIG", "dense_of", "experts_of", "find_gguf", "gguf_config"]
