"""Reads GGUF files, as llama.cpp writes them. Experts stay packed, everything else is dequantised.

`reader` parses the file. `types` has the arithmetic of ggml's types, `architectures` the names and the
config. `weights` turns these into the stored weights that the rest of `checkpoints` reads.
"""

from .architectures import OTHER_CONFIG, layers_of
from .architectures import config_of as gguf_config
from .reader import GGUF, find_gguf
from .weights import dense_of, experts_of

__all__ = ["GGUF", "OTHER_CONFIG", "dense_of", "experts_of", "find_gguf", "gguf_config", "layers_of"]
