"""The oracle: an Engine without speculation answers the prompts one at a time. Prints one JSON line."""

import json

import sglang as sgl
from transformers import AutoTokenizer

from sglang_psd.resources import TINY_TARGET, load_prompts
from tests.e2e.flags import BASE_KEYWORDS


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    engine = sgl.Engine(model_path=str(TINY_TARGET), disable_radix_cache=True, **BASE_KEYWORDS)
    answers = []
    for prompt in load_prompts(8):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        answer = engine.generate(text, sampling_params={"temperature": 0, "max_new_tokens": 64})
        answers.append({"prompt": text, "text": answer["text"], "ids": list(answer["output_ids"])})
    engine.shutdown()
    print(json.dumps({"answers": answers}))


if __name__ == "__main__":
    main()
