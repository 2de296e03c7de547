"""One Engine on the GPU answers prompts greedily; ``argv[1]`` is JSON: Engine keywords and sizes. Prints JSON."""

import json
import sys
import time

import sglang as sgl
from transformers import AutoTokenizer

from sglang_psd.resources import TINY_TARGET, load_prompts
from sglang_psd.server_process import free_port

NUM_HIDDEN = 4  # answers whose hidden states are printed


def hidden_states(meta: dict) -> list[list[float]] | None:
    """A row for each output token but the last, in the order of the text; None where nobody asked for them."""
    parts = meta.get("hidden_states")
    if parts is None:
        return None
    prompt, *steps = parts  # the prompt's last row belongs to the first token
    rows = [prompt[-1], *steps]
    return [[round(value, 3) for value in row] for row in rows]


def main() -> None:
    case = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in load_prompts(case["num_prompts"])
    ]
    started = time.monotonic()
    keywords = {"random_seed": 1, "log_level": "warning", "nccl_port": free_port(), **case["engine"]}
    engine = sgl.Engine(model_path=str(TINY_TARGET), **keywords)
    ready_s = time.monotonic() - started
    sampling: list | dict = {"temperature": 0, "max_new_tokens": case["max_new_tokens"]}
    if case.get("to_the_end"):
        room = [engine.server_args.context_length - len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        sampling = [{"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} for tokens in room]
    options = {"return_logprob": True, "top_logprobs_num": 2} if case["with_gaps"] else {}
    if case["engine"].get("return_hidden_states_mode"):
        options["return_hidden_states"] = True
    for prompt in prompts:  # read each alone: see tests/e2e/engine_plain.py
        engine.generate(prompt, {"temperature": 0, "max_new_tokens": 1})
    engine.generate(prompts, sampling, **options)
    started = time.monotonic()
    answers = engine.generate(prompts, sampling, **options)
    wall_s = time.monotonic() - started
    info = engine.get_server_info()["internal_states"][0]
    engine.shutdown()
    result = {
        "ids": [list(answer["output_ids"]) for answer in answers],
        "gaps": [[top[0][0] - top[1][0] for top in answer["meta_info"]["output_top_logprobs"]] for answer in answers]
        if case["with_gaps"]
        else None,
        "accept": [answer["meta_info"].get("spec_accept_length") for answer in answers],
        "verifies": [answer["meta_info"].get("spec_verify_ct") for answer in answers],
        "hidden_states": [hidden_states(answer["meta_info"]) for answer in answers[:NUM_HIDDEN]],
        "psd": info.get("psd"),
        "ready_s": round(ready_s, 1),
        "wall_s": round(wall_s, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
