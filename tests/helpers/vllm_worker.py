"""Runs in vLLM's environment. Answers prompts with the models of several folders, or says why an engine does
not start.

    python vllm_worker.py CASES.json RESULTS.jsonl

A case: {"name", "folder", "prompts", "new", "options"}. A result: {"name", "tokens"} or {"name", "error"}.
With "new" 0, the engine computes embeddings: "tokens" are then the prompts' embeddings. The folder must have
a tokenizer.
"""

import gc
import json
import sys
import traceback


def run(case: dict) -> list[list]:
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "enforce_eager": True}
    llm = LLM(case["folder"], **{**options, **case["options"]})
    prompts = [{"prompt_token_ids": p} for p in case["prompts"]]
    if not case["new"]:
        return [list(o.outputs.embedding) for o in llm.embed(prompts, use_tqdm=False)]
    sampling = SamplingParams(max_tokens=case["new"], temperature=0, ignore_eos=True, detokenize=False)
    out = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in out]


def main() -> None:
    cases, results = sys.argv[1:]
    with open(cases) as file:
        for case in json.load(file):
            try:
                found = {"tokens": run(case)}
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
            with open(results, "a") as out:
                out.write(json.dumps({"name": case["name"], **found}) + "\n")
            from vllm.distributed import cleanup_dist_env_and_memory

            gc.collect()
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
