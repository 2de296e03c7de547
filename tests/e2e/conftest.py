"""Servers shared by the tests of the users' doors.

Four processes start once per session: an Engine without speculation (the oracle), a server behind ``sglang serve``, one
behind ``python -m sglang.launch_server``, and one with a target whose tokens are bytes. The last tests of the session
end the servers the way users do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from sglang_psd.resources import TINY_TARGET, load_prompts
from sglang_psd.server_process import ServerProcess
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, KITS_FLAGS, ON_GPU, PSD_FLAGS, SERVE

START_TIMEOUT_S = 420.0
NUM_PROMPTS = 8
MAX_TOKENS = 64
BYTES_STEPS = 8
# Of SGLang's kit for speculative servers (``SpecParityKit``).
PARITY_PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "The three primary colors are",
    "def fibonacci(n):",
)
BYTES_MAX_RUNNING = 10


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for server logs and traces."""
    return tmp_path_factory.mktemp("e2e")


def run_script(name: str, *arguments: str, timeout_s: float = START_TIMEOUT_S) -> dict:
    """Run ``tests/e2e/<name>`` in a fresh interpreter; its last line is JSON."""
    script = Path(__file__).parent / name
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=ENVIRONMENT,
        cwd=script.parents[2],
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def plain() -> dict:
    """What the same target says without speculation: ``answers`` to the prompts, and ``parity`` by text."""
    return run_script("engine_plain.py", json.dumps(PARITY_PROMPTS))


@pytest.fixture(scope="session")
def oracle(served, launched, plain) -> dict:
    """Greedy answers of the same target without speculation: ``texts`` and ``ids`` per prompt.

    Depends on the servers only so that all three processes load side by side.
    """
    return plain


@pytest.fixture(scope="session")
def served(logs: Path) -> Iterator[ServerProcess]:
    """A PSD server started with ``sglang serve``; ready when first used."""
    flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *PSD_FLAGS, "--psd-mode", "parallel"]
    flags += ["--psd-trace", str(logs / "served.jsonl"), "--enable-metrics", *KITS_FLAGS]
    server = ServerProcess(flags, logs / "served.log", SERVE, ENVIRONMENT)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def launched(logs: Path) -> Iterator[ServerProcess]:
    """A PSD server started with ``python -m sglang.launch_server``, configured through ``--psd-config``."""
    config = logs / "psd.json"
    config.write_text(
        json.dumps({"mode": "sequential", "standby": True, "integrity_checks": True, "hung_after_s": 3.0})
    )
    flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *PSD_FLAGS, "--psd-config", str(config)]
    server = ServerProcess(flags, logs / "launched.log", environment=ENVIRONMENT)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def bytes_server(logs: Path, models: Path) -> Iterator[ServerProcess]:
    """A PSD server whose target's tokens are bytes, ready; drafts are many a round and always right."""
    if ON_GPU:
        pytest.skip("the attention kernels of a GPU do not take heads of 16")
    flags = ["--model-path", str(models / "T"), "--random-seed", "1", "--max-total-tokens", "8192"]
    flags += ["--speculative-algorithm", "PSD", "--speculative-draft-model-path", str(models / "D_same")]
    flags += ["--speculative-num-steps", str(BYTES_STEPS), "--max-running-requests", str(BYTES_MAX_RUNNING)]
    flags += [
        "--psd-config",
        '{"standby": false}',
        "--reasoning-parser",
        "qwen3",
        "--tool-call-parser",
        "qwen25",
        "--enable-custom-logit-processor",
    ]
    server = ServerProcess([*flags, "--enable-metrics"], logs / "bytes.log", environment=ENVIRONMENT)
    try:
        server.wait_ready(START_TIMEOUT_S)
        yield server
    finally:
        server.stop()


def warm_up(url: str, prompts: list[str]) -> None:
    """Let the server read each prompt alone (see ``engine_plain.py``)."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    for prompt in prompts:
        client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=1
        )


@pytest.fixture(scope="session")
def served_url(served: ServerProcess, launched: ServerProcess, prompts: list[str]) -> str:
    """Address of ``served``, once it is ready; both servers load side by side."""
    served.wait_ready(START_TIMEOUT_S)
    warm_up(served.url, prompts)
    return served.url


@pytest.fixture(scope="session")
def launched_url(served: ServerProcess, launched: ServerProcess, prompts: list[str]) -> str:
    """Address of ``launched``, once it is ready; both servers load side by side."""
    launched.wait_ready(START_TIMEOUT_S)
    warm_up(launched.url, prompts)
    return launched.url


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """User messages the doors are tried with."""
    return load_prompts(NUM_PROMPTS)


def process_tree(server: ServerProcess) -> list[psutil.Process]:
    """The launcher and everything below it."""
    root = psutil.Process(server.pid)
    return [root, *root.children(recursive=True)]
