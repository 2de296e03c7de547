"""The oracle: an Engine without speculation answers the prompts one at a time. Prints one JSON line.

Each prompt is read once before it counts, as ``conftest.warm_up`` does with the servers: on a GPU the last bits of a
prompt's KV depend on how it was read. ``argv[1]`` is JSON: texts to be continued by 48 tokens, for ``parity``.
"""

import json
import sys

import sglang as sgl
from transformers import AutoTokenizer

from sglang_psd.resources import TINY_TARGET, load_prompts
from sglang_psd.server_process import free_port
from tests.e2e.flags import BASE_KEYWORDS


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    engine = sgl.Engine(model_path=str(TINY_TARGET), nccl_port=free_port(), **BASE_KEYWORDS)
    answers = []
    for prompt in load_prompts(8):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        engine.generate(text, sampling_params={"temperature": 0, "max_new_tokens": 1})
        answer = engine.generate(text, sampling_params={"temperature": 0, "max_new_tokens": 64})
        answers.append({"prompt": text, "text": answer["text"], "ids": list(answer["output_ids"])})
    parity = {
        text: engine.generate(text, sampling_params={"temperature": 0, "max_new_tokens": 48})["text"]
        for text in json.loads(sys.argv[1])
    }
    engine.shutdown()
    print(json.dumps({"answers": answers, "parity": parity}))


if __name__ == "__main__":
    main()
