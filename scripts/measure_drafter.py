"""Measure T_d(b): what drafting costs on this GPU, and what plain decode steps of the same model cost.

    python scripts/measure_drafter.py MODEL OUT.json --steps 1,3,5 --batches 1,8,32,64 [--attention-backend fa3]

MODEL is a checkpoint, or a folder with only a config.json when --load-format dummy is given. Each configuration runs
in a process of its own. Times are of whole rounds as the scheduler sees them: message in, proposals out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PROMPT_LEN = 512
WARM_UP, REPEATS = 10, 60


def spec_for(args: argparse.Namespace, steps: int):
    from sglang_psd.drafter.spec import DrafterSpec

    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    return DrafterSpec(
        endpoint="",
        parent_pid=0,
        model_path=args.model,
        load_format=args.load_format,
        device="cuda",
        device_label="cuda:0",
        dtype="bfloat16",
        attention_backend=args.attention_backend,
        mem_fraction=0.5,
        max_requests=max(args.batches),
        vocab_limit=vocab_size,
        num_steps=steps,
        top_m=32,
        random_seed=1,
        context_length=args.context_length,
        log_level="warning",
    )


def summary(times_s: list[float]) -> dict[str, float]:
    """Median, least and most, in milliseconds."""
    ms = [1e3 * t for t in times_s]
    return {"median": round(statistics.median(ms), 4), "min": round(min(ms), 4), "max": round(max(ms), 4)}


def measure_chains(args: argparse.Namespace, steps: int) -> dict:
    """Rounds of the real drafter engine."""
    import numpy as np
    import torch

    from sglang_psd.channel.messages import TOKEN, Close, Open, Round, RoundRow, Sampling
    from sglang_psd.drafter.engine import DraftEngine

    started = time.monotonic()
    engine = DraftEngine(spec_for(args, steps))
    result: dict = {
        "start_s": round(time.monotonic() - started, 1),
        "kv_tokens": engine._model.kv_tokens,
        "batches": {},
    }
    random = np.random.default_rng(1)
    kinds = {
        "greedy": Sampling(True, 1.0, 1, 1.0, 0.0, None),
        "sampled": Sampling(False, 0.8, 1 << 30, 0.95, 0.0, None),
        "seeded": Sampling(False, 0.8, 1 << 30, 0.95, 0.0, 7),
    }
    for batch in args.batches:
        for name, sampling in kinds.items():
            rids = [f"{name}-{i}" for i in range(batch)]
            for rid in rids:
                tokens = random.integers(0, 1000, PROMPT_LEN).astype(TOKEN)
                engine.open(Open(rid, tokens.tobytes(), sampling))
            while engine.prefill_some():
                pass
            lengths = dict.fromkeys(rids, PROMPT_LEN)
            drafts = np.zeros((batch, steps), TOKEN)
            times = []
            for i in range(WARM_UP + REPEATS):
                # Every third request accepts all drafts, the others none, so that both kinds of catch-up occur.
                rows = []
                for j, rid in enumerate(rids):
                    accepted = drafts[j].tolist() if i and (i + j) % 3 == 0 else []
                    new = [*accepted, int(random.integers(0, 1000))]
                    lengths[rid] += len(new)
                    rows.append(RoundRow(rid, lengths[rid], new))
                torch.cuda.synchronize()
                t = time.monotonic()
                # As the drafter's loop does: the short way, or where a round is out of the ordinary the long one.
                proposals = engine.draft_known(Round(i, rows, steps), t) or engine.draft(i, rows, steps, t)
                taken = time.monotonic() - t
                engine.use_pause()  # as the drafter's loop does while the target verifies; not timed
                assert proposals.counts == [steps] * batch
                drafts = np.frombuffer(proposals.tokens, TOKEN).reshape(batch, steps)
                if i >= WARM_UP:
                    times.append(taken)
            engine.close(Close(rids))
            result["batches"].setdefault(str(batch), {})[name] = summary(times)
    assert engine.stats(0).free_kv_tokens == result["kv_tokens"]
    if args.profile:
        result["profiles"] = [profile_chain(engine, batch) for batch in args.batches]
    return result


def profile_chain(engine, batch: int) -> dict:
    """Kernels of one greedy chain."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from sglang_psd.channel.messages import Sampling
    from sglang_psd.drafter.rows import DraftState

    model, steps = engine._model, engine.spec.num_steps
    states = [DraftState(str(i), Sampling(True, 1.0, 1, 1.0, 0.0, None), [1] * PROMPT_LEN) for i in range(batch)]
    model.reserve_all(states, [PROMPT_LEN + steps] * batch)
    for state in states:
        state.fed = state.tokens[:-1]
    model.draft_chain(states, steps)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            model.draft_chain(states, steps)
        torch.cuda.synchronize()
    for state in states:
        model.release(state)
    kernels = [event for event in profiler.key_averages() if event.self_device_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return {
        "batch": batch,
        "kernels_per_chain": sum(event.count for event in kernels) / 5,
        "busy_ms_per_chain": round(sum(event.self_device_time_total for event in kernels) / 5e3, 3),
        "top": [
            [event.key[:60], event.count // 5, round(event.self_device_time_total / 5e3, 4)] for event in kernels[:10]
        ],
    }


def measure_decode(args: argparse.Namespace) -> dict:
    """Plain decode steps of stock SGLang with its own CUDA graphs."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    from sglang_psd.drafter.loading import load_worker

    worker = load_worker(
        spec_for(args, 1),
        max_running_requests=max(args.batches),
        disable_cuda_graph=False,
        cuda_graph_backend_prefill="disabled",
        cuda_graph_max_bs_decode=max(args.batches),
    )
    runner = worker.model_runner
    table, allocator = worker.get_memory_pool()
    result = {}
    with torch.inference_mode():
        for batch in args.batches:
            for row in range(1, batch + 1):
                slots = allocator.alloc(PROMPT_LEN + 1)
                table.req_to_token[row, : PROMPT_LEN + 1] = slots.to(table.req_to_token.dtype)
            rows = torch.arange(1, batch + 1, device="cuda")
            lens = torch.full((batch,), PROMPT_LEN, device="cuda")
            times = []
            for i in range(WARM_UP + REPEATS):
                forward = ForwardBatch(
                    forward_mode=ForwardMode.DECODE,
                    batch_size=batch,
                    input_ids=torch.ones(batch, dtype=torch.int64, device="cuda"),
                    req_pool_indices=rows,
                    seq_lens=lens,
                    out_cache_loc=table.req_to_token[rows, lens - 1].to(torch.int64),
                    seq_lens_sum=batch * PROMPT_LEN,
                    seq_lens_cpu=torch.full((batch,), PROMPT_LEN),
                    positions=lens - 1,
                    capture_hidden_mode=CaptureHiddenMode.NULL,
                    spec_algorithm=runner.spec_algorithm,
                    num_token_non_padded_cpu=batch,
                )
                torch.cuda.synchronize()
                t = time.monotonic()
                runner.forward(forward).logits_output.next_token_logits.argmax(-1)
                torch.cuda.synchronize()
                if i >= WARM_UP:
                    times.append(time.monotonic() - t)
            result[str(batch)] = summary(times)
            allocator.clear()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=lambda text: [int(x) for x in text.split(",")], default=[1, 3, 5])
    parser.add_argument("--batches", type=lambda text: [int(x) for x in text.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--attention-backend", default="flashinfer")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--profile", action="store_true", help="name the kernels of one chain")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is not None:
        part = measure_decode(args) if args.only == "decode" else measure_chains(args, int(args.only))
        print("RESULT " + json.dumps(part), flush=True)
        os._exit(0)  # SGLang's threads would keep the process
    import torch

    report: dict = {
        "command": "python " + " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(0),
        "prompt_len": PROMPT_LEN,
        "unit": "ms per round; a round is message in, proposals out",
    }
    for part in ["decode", *map(str, args.steps)]:
        log = args.out.with_suffix(f".{part}.log")
        with log.open("w") as output:
            subprocess.run([sys.executable, *sys.argv, "--only", part], stdout=output, stderr=subprocess.STDOUT)
        lines = log.read_text().splitlines()
        found = next((json.loads(line[7:]) for line in lines if line.startswith("RESULT ")), {"error": lines[-30:]})
        report["plain_decode_step_ms" if part == "decode" else f"chain_k{part}"] = found
        print(part, json.dumps(found)[:1500], flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
