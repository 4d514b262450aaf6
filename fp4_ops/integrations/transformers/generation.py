"""Decoding loop for transformers' `generate`, with less Python between two steps of a model.

    model.generate(ids, custom_generate=fp4_ops.decoding_loop, cache_implementation="static")

`generate` still prepares inputs, cache, logits processors and stopping criteria. Then this loop replaces
transformers' own and gives the same tokens. A step calls the model and chooses the next token. The model is
compiled, and captured as one CUDA graph, where `generate` would do so, and on a CPU if `compile_config` is
given. Masks and positions are updated in place instead of being made again for each step.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .step_graph import GraphStep, without_graphs

_KNOWN = frozenset({"past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep"})
"""Arguments of a model that the loop can carry from one step to the next."""
_OWN_STEPS = (
    "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample", "_prefill",
    "_valid_auto_compile_criteria",
)  # fmt: skip
"""Methods of `generate`. If a model overrides one of them, its code may do something that this loop leaves
out."""


def decoding_loop(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generates tokens: ids [B, L] -> [B, L + new tokens]. Pass it to `generate` as `custom_generate`.

    It does greedy search and sampling, with any logits processors, stopping criteria and streamer, on dynamic
    caches and on static caches of full attention. `return_dict_in_generate` also returns scores, logits and
    the cache. For everything else (beam search, other caches, encoders, images, attentions as outputs, models
    with preparations of their own, several processes in step) it calls transformers' own loop.

    Raises ValueError for assisted generation, because `generate` does not pass a custom loop what it needs.
    """
    given = _given_to_generate()
    streamer = given.get("streamer") if streamer is None else streamer
    synced = _synced(model, given.get("synced_gpus") if synced_gpus is None else synced_gpus)
    mode = generation_config.get_generation_mode(given.get("assistant_model")).name
    usual = {
        "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
        "generation_config": generation_config, **model_kwargs,
    }  # fmt: skip
    if mode in ("BEAM_SEARCH", "BEAM_SAMPLE"):
        if streamer is not None:
            raise ValueError(
                "fp4: streamer is given with num_beams > 1, and beam search cannot stream; leave one of "
                "them out"
            )
        return type(model)._beam_search(model, input_ids, synced_gpus=synced, **usual)
    if mode not in ("SAMPLE", "GREEDY_SEARCH"):
        raise ValueError(
            f"fp4: custom_generate=fp4_ops.decoding_loop does greedy search, sampling and beam search; the "
            f"arguments ask for {mode.lower().replace('_', ' ')} (assistant_model, prompt_lookup_num_tokens, "
            "use_mtp, ...). Call generate without custom_generate"
        )
    if synced or why_not(model, input_ids, generation_config, model_kwargs):
        return type(model)._sample(model, input_ids, synced_gpus=synced, streamer=streamer, **usual)
    return _Decoding(model, input_ids, streamer, usual).run()


def why_not(model: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> str:
    """Says why transformers' own loop runs; "" if this one does."""
    from transformers import DynamicCache, GenerationMixin, StaticCache
    from transformers.cache_utils import StaticLayer

    config, cache = generation_config, model_kwargs.get("past_key_values")
    unknown = [name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN]
    own = [n for n in _OWN_STEPS if getattr(type(model), n, None) is not getattr(GenerationMixin, n, 0)]
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if model.config.is_encoder_decoder:
        return "an encoder"
    if unknown:
        return f"{unknown[0]} for the model"
    if own or model.is_remote_code():
        return f"{own[0] if own else 'code'} of the model's own"
    if not model_kwargs.get("use_cache") or type(cache) not in (DynamicCache, StaticCache):
        return f"the cache {type(cache).__name__}"
    if type(cache) is StaticCache and any(type(layer) is not StaticLayer for layer in cache.layers):
        return "a static cache of other than full attention"
    if config.is_assistant or config.prefill_chunk_size is not None:
        return "is_assistant or prefill_chunk_size"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions or output_hidden_states"
    if (positions is not None and positions.dim() != 2) or (mask is not None and mask.dim() != 2):
        return "position_ids or an attention_mask that is no matrix"
    if input_ids.dim() != 2 or input_ids.device != model.device:
        return "input_ids of another shape or device"
    return ""


def _given_to_generate() -> dict[str, Any]:
    """Reads the arguments of the calling `generate`, which does not pass all of them to a custom loop."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _synced(model: Any, asked: bool | None) -> bool:
    """True if processes that share a model take each step together. Decides as `generate` does."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return bool(asked)
    if asked is not None:
        return asked
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    shared = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return shared and torch.distributed.get_world_size() > 1


class _Decoding:
    """State of one call of `generate`: the prompt first, then one token after another."""

    def __init__(self, model: Any, input_ids: Tensor, streamer: Any, usual: dict[str, Any]) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        self.model, self.prompt, self.streamer = model, input_ids, streamer
        self.kwargs = dict(usual)
        self.config = self.kwargs.pop("generation_config")
        self.processors, self.criteria = (
            self.kwargs.pop("logits_processor"),
            self.kwargs.pop("stopping_criteria"),
        )
        self.returns = self.config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if self.returns and self.config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.returns and self.config.output_logits else None
        self.pads = any(hasattr(c, "eos_token_id") for c in self.criteria)
        # Unknown processors and criteria may read all token ids. max_position_embeddings needs a warning.
        known = all(
            type(c) is EosTokenCriteria
            or (type(c) is MaxLengthCriteria and c.max_position_embeddings is None)
            for c in self.criteria
        )
        self.simple = known and not self.processors
        keeps = self.scores is not None or self.logits is not None
        self._takes_the_largest = not (self.processors or self.config.do_sample or keeps)
        self.max_length = min(
            (c.max_length for c in self.criteria if type(c) is MaxLengthCriteria), default=sys.maxsize
        )
        self.ends: list[Any] = [c for c in self.criteria if type(c) is EosTokenCriteria]

    def run(self) -> Any:
        model, ids, kwargs = self.model, self.prompt, self.kwargs
        compiles = self._compiles()
        outputs = model._prefill(ids, self.config, kwargs, is_first_iteration=True)
        cache = outputs.past_key_values
        step: Callable[[Tensor], Any] = (
            self._step(cache) if compiles else _Step(model.__call__, False, cache, kwargs)
        )
        flag = self._flag(cache)
        pad: Any = self.config._pad_token_tensor
        pad = pad.to(ids.device) if pad is not None else None
        unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        new: list[Tensor] = []
        length = ids.shape[1]
        with model._optimize_model_for_decode():
            while True:
                token = self._choose(ids, outputs)
                del outputs
                if self.pads:
                    token = token * unfinished + pad * (1 - unfinished)
                length += 1
                if self.simple:
                    new.append(token[:, None])
                    done = length >= self.max_length
                    if self.ends:
                        for criteria in self.ends:
                            unfinished = unfinished & ~criteria(new[-1], None)
                        if flag.already_set():  # the previous step finished all rows, so this step is dropped
                            new.pop()
                            break
                        done = done or flag.is_set(unfinished)
                else:
                    ids = torch.cat([ids, token[:, None]], -1)
                    unfinished = unfinished & ~self.criteria(ids, self.scores)
                    done = not bool(unfinished.any())
                if self.streamer is not None:
                    self.streamer.put(token.cpu())
                if done:
                    break
                outputs = step(token)
        if self.streamer is not None:
            self.streamer.end()
        sequences = torch.cat([ids, *new], -1)
        if not self.returns:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        output: Any = GenerateDecoderOnlyOutput
        return output(sequences=sequences, scores=self.scores, logits=self.logits, past_key_values=cache)

    def _compiles(self) -> bool:
        """True where `generate` compiles the step, and on a CPU if the arguments have a `compile_config`."""
        if self.prompt.device.type == "cpu" and self.config.compile_config is not None:
            self.config = copy.copy(self.config)
            self.config.compile_config = copy.copy(self.config.compile_config)
            self.config.compile_config._compile_all_devices = True
        return self.model._valid_auto_compile_criteria(self.kwargs, self.config)

    def _step(self, cache: Any) -> Callable[[Tensor], Any]:
        """Returns the compiled step, as one CUDA graph if the configuration asks for CUDA graphs."""
        model, config = self.model, self.config.compile_config
        plain = without_graphs(config or _default_config(model)) if self.prompt.is_cuda else None
        if plain is None or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            return _Step(model.get_compiled_call(config), True, cache, self.kwargs)
        step = _Step(model.get_compiled_call(plain), True, cache, self.kwargs)

        def use_torchs_graphs() -> None:
            step.forward = model.get_compiled_call(config)

        return GraphStep(step, use_torchs_graphs)

    def _choose(self, ids: Tensor, outputs: Any) -> Tensor:
        """Chooses each row's next token."""
        logits = outputs.logits[:, -1]
        if self._takes_the_largest and _compares_fast(logits):
            return logits.argmax(-1)
        # A copy, because a CUDA graph overwrites the logits.
        logits = logits.to(copy=True, dtype=torch.float32)
        scores = self.processors(ids, logits) if self.processors else logits
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.config.do_sample:
            return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        return scores.argmax(-1)

    def _flag(self, cache: Any) -> _Flag:
        """Returns a late flag if the extra step has no visible effect on the cache, random numbers or
        outputs."""
        shows = self.config.do_sample or self.returns or getattr(cache, "_is_user_defined", False)
        return _Flag(
            self.prompt.device, late=_looks_late(self.prompt.device) and not shows and not self.streamer
        )


def _looks_late(device: torch.device) -> bool:
    return device.type == "cuda"


def _compares_fast(logits: Tensor) -> bool:
    """True if 16-bit logits should be compared without a float32 copy. On a CPU, torch's kernel for 16 bits
    is slower."""
    return logits.is_cuda and logits.dtype.itemsize == 2


def _default_config(model: Any) -> Any:
    from transformers import CompileConfig

    return getattr(model, "_default_compile_config", CompileConfig)()


class _Flag:
    """Says whether all rows are finished. A `late` flag answers one step later, so the host never waits."""

    def __init__(self, device: torch.device, late: bool) -> None:
        self.late, self.cuda = late, device.type == "cuda"
        self.host: Tensor | None = None
        self.copied = torch.cuda.Event() if self.cuda else None

    def is_set(self, unfinished: Tensor) -> bool:
        if not self.late:
            return not bool(unfinished.any())
        if self.host is None:
            self.host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=self.cuda)
        self.host.copy_(unfinished.any().logical_not(), non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        return False

    def already_set(self) -> bool:
        """Answers the last call of `is_set` if that call had no answer yet."""
        if self.host is None:
            return False
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.host)


class _Step:
    """Calls the model with one token for each row. Keeps mask and positions between steps."""

    def __init__(self, forward: Any, compiled: bool, cache: Any, model_kwargs: dict[str, Any]) -> None:
        self.forward, self.compiled, self.cache = forward, compiled, cache
        self.fixed: dict[str, Any] = {
            name: model_kwargs[name] for name in ("use_cache", "logits_to_keep") if name in model_kwargs
        }
        positions = model_kwargs.get("position_ids")
        self.positions = None if positions is None else positions[:, -1:].clone()
        self.mask = model_kwargs.get("attention_mask")
        self.static = bool(cache.is_compileable)
        if self.mask is not None and self.static:  # the positions hide later tokens
            later = max(0, cache.layers[0].max_cache_len - self.mask.shape[1])
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), later)], -1)

    def __call__(self, token: Tensor) -> Any:
        arguments: dict[str, Any] = {"input_ids": token[:, None], "past_key_values": self.cache, **self.fixed}
        if self.positions is not None:
            self.positions += 1
            arguments["position_ids"] = self.positions
        if self.mask is not None:
            if not self.static:
                self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], -1)
            arguments["attention_mask"] = self.mask
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        return self.forward(**arguments, return_dict=True)
