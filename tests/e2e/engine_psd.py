"""``sgl.Engine`` with PSD keywords: synchronous, asynchronous, streaming. Prints one JSON line."""

import asyncio
import json
import sys

import psutil
import sglang as sgl

from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import free_port
from tests.e2e.flags import BASE_KEYWORDS, PSD_KEYWORDS

SAMPLING = {"temperature": 0, "max_new_tokens": 64}


async def generate_async(engine: sgl.Engine, prompts: list[str]) -> list[dict]:
    return list(await asyncio.gather(*(engine.async_generate(prompt, SAMPLING) for prompt in prompts)))


async def stream_async(engine: sgl.Engine, prompt: str) -> list[str]:
    chunks = []
    async for chunk in await engine.async_generate(prompt, SAMPLING, stream=True):
        chunks.append(chunk["text"])
    return chunks


def main() -> None:
    prompts = json.loads(sys.argv[1])
    keywords = {"psd_mode": "parallel", "nccl_port": free_port(), **BASE_KEYWORDS, **PSD_KEYWORDS}
    engine = sgl.Engine(model_path=str(TINY_TARGET), **keywords)
    for prompt in prompts:
        engine.generate(prompt, {"temperature": 0, "max_new_tokens": 1})
    sync = engine.generate(prompts, SAMPLING)
    concurrent = engine.loop.run_until_complete(generate_async(engine, prompts))
    streamed = engine.loop.run_until_complete(stream_async(engine, prompts[0]))
    info = engine.get_server_info()
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    engine.shutdown()
    print(
        json.dumps(
            {
                "sync": [list(answer["output_ids"]) for answer in sync],
                "async": [list(answer["output_ids"]) for answer in concurrent],
                "streamed": streamed,
                "accept": [answer["meta_info"].get("spec_accept_length") for answer in sync],
                "psd": info["internal_states"][0]["psd"],
                "psd_mode": info["psd_mode"],
                "children": children,
            }
        )
    )


if __name__ == "__main__":
    main()
