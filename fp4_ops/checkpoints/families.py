"""Handles families that publish 4-bit folders under names that transformers does not have, or with their own
code.

Kimi K2 Thinking is DeepSeek-V3's architecture under the model type `kimi_k2`. Kimi K2.5 and K2.6 name classes
that transformers spells differently. Both folders ask for `trust_remote_code`. That code stores experts in
another way, so transformers' own classes are used, even if `trust_remote_code` is given.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .files import CheckpointError

_SAME = {
    "kimi_k2": ("DeepseekV3Config", {"AutoModelForCausalLM": "DeepseekV3ForCausalLM"}),
    "kimi_k25": (
        "Kimi_K25Config",
        {"AutoModelForImageTextToText": "Kimi_K25ForConditionalGeneration", "AutoModel": "Kimi_K25Model"},
    ),
}
"""By model type: transformers' config class, and the model class for each Auto class."""

_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModel")
"""The Auto classes, in the order in which they are asked for a class."""


def register_families() -> None:
    """Makes transformers build these model types from its own classes, even if remote code is trusted.

    transformers prefers registered classes to remote code only if they are not its own, so subclasses are
    registered.
    """
    for model_type, (config_name, models) in _SAME.items():
        base = getattr(transformers, config_name, None)
        if base is None:  # an older transformers
            continue
        known = CONFIG_MAPPING.get(model_type, None)
        if known is not None and known.__module__ == __name__:
            continue
        config: Any = type(base.__name__, (base,), {"__module__": __name__})
        CONFIG_MAPPING.register(model_type, config, exist_ok=True)
        for auto, name in models.items():
            model = getattr(transformers, name)
            own = type(model.__name__, (model,), {"__module__": __name__, "config_class": config})
            getattr(transformers, auto)._model_mapping.register(config, own, exist_ok=True)


_TEXTS = ("text_config", "llm_config", "language_config")
"""Keys of config.json that hold the config of the language model."""


def has_fewer_layers(config: PretrainedConfig, stored: dict[str, Any]) -> bool:
    """Returns whether a model's config has fewer decoder layers than the config.json of its folder."""
    text = config.get_text_config(decoder=True)
    key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    parts = [stored[name] for name in _TEXTS if isinstance(stored.get(name), dict)] + [stored]
    layers = next((part[key] for part in parts if isinstance(part.get(key), int)), 0)
    return getattr(text, key, layers) < layers


def config_of(path: Any, model_type: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """Returns a folder's config. Code from the folder runs only if transformers does not have the family."""
    register_families()
    if model_type in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    if model_type is None:
        raise CheckpointError(
            f"fp4: config.json of {path} has no model_type, which says what to build. Take the config.json "
            "that was written with the files, or give the class (load_checkpoint's model_or_config)"
        )
    if not trust_remote_code:
        raise CheckpointError(
            f"fp4: {path} is a {model_type!r}, which transformers {transformers.__version__} does not have. "
            "If the folder has code for it that you trust, pass trust_remote_code=True; else give the class "
            "to build (load_checkpoint's model_or_config), or update transformers"
        )
    return AutoConfig.from_pretrained(path, trust_remote_code=True)


def named_class(config: PretrainedConfig) -> Any | None:
    """Returns transformers' class that the config names. None if transformers has no class of that name."""
    found = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((cls for cls in found if cls is not None), None)


def model_class(config: PretrainedConfig) -> Any:
    """Returns the class that the config names, or else transformers' class for it."""
    if (named := named_class(config)) is not None:
        return named
    for name in _AUTO:
        mapping = getattr(getattr(transformers, name, None), "_model_mapping", {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return AutoModelForCausalLM
