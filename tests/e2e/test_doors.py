"""Every door a user comes through leads to the same text as without speculation."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest

from sglang_psd.config import FLAG_FIELDS, flag_name
from sglang_psd.resources import PROMPTS, TINY_TARGET
from tests.command import run_command
from tests.e2e.conftest import MAX_TOKENS, run_script
from tests.e2e.flags import ENVIRONMENT, NUM_STEPS, ON_GPU, SERVE

pytestmark = pytest.mark.e2e


def server_info(url: str) -> dict:
    """``/server_info`` as a dictionary."""
    with urllib.request.urlopen(url + "/server_info", timeout=60) as answer:
        return json.load(answer)


def generate(url: str, **body) -> dict | list:
    """POST ``/generate``."""
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@pytest.mark.parametrize("door", ["served_url", "launched_url"])
def test_native_generate(door: str, request: pytest.FixtureRequest, oracle: dict) -> None:
    """``sglang serve`` (parallel) and ``launch_server`` (sequential): ids of a concurrent batch equal the oracle's."""
    url = request.getfixturevalue(door)
    answers = oracle["answers"]
    got = generate(
        url,
        text=[answer["prompt"] for answer in answers],
        sampling_params={"temperature": 0, "max_new_tokens": MAX_TOKENS},
    )
    assert [answer["output_ids"] for answer in got] == [answer["ids"] for answer in answers]
    assert all(1.0 <= answer["meta_info"]["spec_accept_length"] <= NUM_STEPS + 1 for answer in got)


def test_server_info_shows_psd(served_url: str, launched_url: str) -> None:
    """Resolved flags and running figures, from flags and from ``--psd-config``."""
    info = server_info(served_url)
    psd = info["internal_states"][0]["psd"]
    assert (info["psd_mode"], psd["mode"], psd["num_steps"]) == ("parallel", "parallel", NUM_STEPS)
    assert psd["slot_sizes"] == [0, 0] and psd["drafter"]["failure"] is None
    for figure in ("accept_length", "verify_ms", "draft_ms", "handoff_to_drafter_us", "handoff_to_target_us"):
        assert psd[figure] >= 0
    other = server_info(launched_url)
    assert (other["psd_mode"], other["internal_states"][0]["psd"]["slot_sizes"]) == ("sequential", [0])


def test_openai_chat_streaming(served_url: str, prompts: list[str], oracle: dict) -> None:
    """Joined deltas equal the oracle's text; the last chunk carries usage."""
    client = openai.OpenAI(base_url=served_url + "/v1", api_key="none")
    for prompt, expected in zip(prompts[:3], oracle["answers"]):
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, reasons, usage = "", [], None
        for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            usage = chunk.usage or usage
        assert text == expected["text"]
        assert len(reasons) == 1 and usage is not None and usage.completion_tokens == len(expected["ids"])


def test_openai_completions(served_url: str, oracle: dict) -> None:
    """``/v1/completions``, streamed and not, several prompts and n > 1."""
    client = openai.OpenAI(base_url=served_url + "/v1", api_key="none")
    expected = oracle["answers"][:4]
    request = {"model": "default", "temperature": 0, "max_tokens": MAX_TOKENS}
    whole = client.completions.create(prompt=[answer["prompt"] for answer in expected], **request)
    assert [choice.text for choice in whole.choices] == [answer["text"] for answer in expected]
    stream = client.completions.create(prompt=expected[0]["prompt"], stream=True, **request)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]["text"]
    several = client.completions.create(prompt=expected[1]["prompt"], n=3, **request)
    assert [choice.text for choice in several.choices] == [expected[1]["text"]] * 3


def test_openai_sampling_and_seed(served_url: str, oracle: dict) -> None:
    """Temperature samples (many answers), a seed repeats its text."""
    client = openai.OpenAI(base_url=served_url + "/v1", api_key="none")
    request = {"model": "default", "prompt": oracle["answers"][0]["prompt"], "max_tokens": 16, "temperature": 1.0}
    free = client.completions.create(n=8, **request)
    distinct = len({choice.text for choice in free.choices})
    # The GPU runs with deterministic inference, where SGLang gives every request without a seed the same one.
    assert distinct == 1 if ON_GPU else distinct > 4
    seeded = [client.completions.create(seed=7, **request).choices[0].text for _ in range(3)]
    assert len(set(seeded)) == 1
    assert client.completions.create(seed=8, **request).choices[0].text != seeded[0]


def test_frontend_program(served_url: str, oracle: dict) -> None:
    """An ``sgl.function`` with gen, fork and select."""
    import sglang as sgl

    @sgl.function
    def program(s, question: str):
        s += question
        forks = s.fork(2)
        for fork in forks:
            fork += sgl.gen("answer", max_tokens=MAX_TOKENS, temperature=0)
        s += sgl.select("choice", choices=["yes", "no", "maybe"])
        s["left"], s["right"] = forks[0]["answer"], forks[1]["answer"]

    backend = sgl.RuntimeEndpoint(served_url)
    expected = oracle["answers"][0]
    state = program.run(question=expected["prompt"], backend=backend)
    assert state["left"] == state["right"] == expected["text"]
    assert state["choice"] in ("yes", "no", "maybe")


def test_bench_serving(run_case, served_url: str, logs: Path) -> None:
    """``python -m sglang.bench_serving`` with a JSONL of real prompts: everything completes, accept length is known."""
    data = logs / "prompts.jsonl"
    with open(PROMPTS, encoding="utf-8") as source, open(data, "w", encoding="utf-8") as out:
        for line in list(source)[:24]:
            turns = [
                {"role": "user", "content": json.loads(line)["prompt"]},
                {"role": "assistant", "content": "word " * 24},
            ]
            out.write(json.dumps({"conversations": turns}) + "\n")
    result = logs / "bench.jsonl"
    flags = ["--backend", "sglang", "--base-url", served_url]
    flags += ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "24"]
    flags += ["--model", str(TINY_TARGET), "--max-concurrency", "6", "--output-file", str(result)]
    done = run_case(run_command, "sglang.bench_serving", flags, timeout_s=300)
    assert done.code == 0, done.out[-1500:] + done.err[-3000:]
    figures = json.loads(result.read_text().splitlines()[-1])
    assert figures["completed"] == 24
    assert 1.0 <= figures["accept_length"] <= NUM_STEPS + 1


def test_trace_shows_overlap(served_url: str, logs: Path, oracle: dict) -> None:
    """In the trace of the parallel server the drafter works on one slot while the target verifies the other."""
    generate(
        served_url,
        text=[answer["prompt"] for answer in oracle["answers"]],
        sampling_params={"temperature": 0, "max_new_tokens": MAX_TOKENS, "ignore_eos": True},
    )
    time.sleep(1.5)  # the idle server flushes its trace
    lines = [json.loads(line) for line in (logs / "served.jsonl").read_text().splitlines()]
    verifies = [line for line in lines if line["type"] == "Step" and not line["is_prompt_run"]]
    drafts = [line for line in lines if line["type"] == "Draft"]
    assert {line["slot"] for line in verifies} == {0, 1}
    assert all(0 <= line["accepted_num"] <= line["verify_len"] for line in verifies)
    assert all(line["generated_num"] == line["accepted_num"] + len(line["batched_requests"]) for line in verifies)
    side_by_side = [
        draft
        for draft in drafts
        for verify in verifies
        if min(draft["end_us"], verify["verify_end_us"]) > max(draft["start_us"], verify["verify_start_us"])
        and not set(draft["batched_requests"]) & set(verify["batched_requests"])
    ]
    assert len(side_by_side) > len(verifies) / 4
    assert server_info(served_url)["internal_states"][0]["psd"]["overlap_fraction"] > 0


def test_engine(oracle: dict) -> None:
    """``sgl.Engine`` keywords; synchronous, asynchronous and streaming; nothing is left after shutdown."""
    answers = oracle["answers"]
    result = run_script("engine_psd.py", json.dumps([answer["prompt"] for answer in answers]))
    expected = [answer["ids"] for answer in answers]
    assert result["sync"] == expected and result["async"] == expected
    assert result["streamed"][-1] == answers[0]["text"]
    assert result["psd_mode"] == "parallel" and result["psd"]["rounds"] > 0
    assert all(accept >= 1.0 for accept in result["accept"])
    deadline = time.monotonic() + 15
    while any(psutil.pid_exists(pid) for pid in result["children"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in result["children"] if psutil.pid_exists(pid)]


EARLY_ARGUMENTS = """
import argparse, sys
import sglang as sgl
from sglang.srt.server_args import ServerArgs

keywords = {"model_path": sys.argv[1], "speculative_algorithm": "PSD", "speculative_draft_model_path": sys.argv[1]}
for build in (sgl.Runtime, ServerArgs):
    try:
        build(**keywords, psd_mode="sideways")
    except ValueError as error:
        print(error)
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = [f"--{name.replace('_', '-')}={value}" for name, value in keywords.items()]
print(ServerArgs.from_cli_args(parser.parse_args([*flags, "--psd-mode", "sequential"])).psd().mode)
"""


def test_arguments_made_before_plugins_are_loaded() -> None:
    """``sgl.Runtime``, ``ServerArgs`` itself, and a parser of one's own, as SGLang's offline benchmarks have it."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY_ARGUMENTS, str(TINY_TARGET)],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRONMENT,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and lines[2] == "sequential", done.stdout + done.stderr[-2000:]
    assert all(line.startswith("--psd-mode must be one of") for line in lines[:2])


def test_help_lists_the_flags() -> None:
    """The installed command shows the PSD flags; ``tests/rig/test_command_line.py`` asks the other one."""
    done = subprocess.run([*SERVE, "--help"], capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0 and [flag for flag in FLAG_FIELDS if flag_name(flag) not in done.stdout] == []
