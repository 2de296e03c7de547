"""EAGLE heads on real GPUs: the mailbox, the text, and SGLang's own EAGLE-3 worker beside ours.

SGLang's worker verifies with other kernels of its own and drafts in the target's process; on the same head, prompts and
number of drafts both must accept the same number of drafts, up to ties that bf16 kernels resolve differently. In exact
mode (deterministic kernels, no CUDA graphs) the texts are equal bit by bit.

With one GPU the cases whose head shares it run. With ``PSD_RESULTS`` set, the figures are written there as
``gpu_eagle.json`` or ``gpu_eagle_one_gpu.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_psd.resources import TINY_EAGLE3
from tests.e2e.flags import ENVIRONMENT
from tests.gpu.test_gpu_identity import (
    EXACT,
    FA3,
    MEMORY,
    NUM_GPUS,
    NUM_PROMPTS,
    SHARED,
    TIE_GAP,
    finish_case,
    first_differences,
    parameters,
    psd,
    runs_here,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU"),
    pytest.mark.skipif(not TINY_EAGLE3.is_dir(), reason="the checkout holds no tiny EAGLE-3 head"),
]
STOCK = {
    **MEMORY,
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": str(TINY_EAGLE3),
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
HIDDEN = {"return_hidden_states_mode": "full"}
CASES: dict[str, dict] = {
    "plain": dict(MEMORY),
    "plain_exact": {**MEMORY, **EXACT},
    "plain_hidden": {**MEMORY, **HIDDEN},
    "stock_k3": STOCK,
    "eagle_parallel_k3": psd("parallel", 3, draft=TINY_EAGLE3),
    "eagle_sequential_k3": psd("sequential", 3, draft=TINY_EAGLE3),
    "eagle_parallel_k1": psd("parallel", 1, draft=TINY_EAGLE3),
    "eagle_parallel_k8": psd("parallel", 8, draft=TINY_EAGLE3),
    "eagle_shared_k3": psd("sequential", 3, draft=TINY_EAGLE3, **SHARED),
    "eagle_shared_parallel_k5": psd("parallel", 5, draft=TINY_EAGLE3, **SHARED),
    "eagle_shared_fa3_k3": psd("parallel", 3, draft=TINY_EAGLE3, **SHARED, **FA3),
    "eagle_shared_k3_exact": psd("parallel", 3, draft=TINY_EAGLE3, **SHARED, **EXACT),
    # The head reads three layers of the target, its users get the last one's: CUDA graphs have to keep both.
    "eagle_shared_hidden_k3": psd("parallel", 3, draft=TINY_EAGLE3, **SHARED, **HIDDEN),
    "eagle_parallel_k3_exact": psd("parallel", 3, draft=TINY_EAGLE3, **EXACT),
}
PSD_CASES = [name for name in CASES if name.startswith("eagle")]


def cases(*names: str) -> list:
    """Parameters for cases of this file."""
    return parameters(CASES, names)


def _start(name: str) -> subprocess.Popen:
    case = {
        # A prompt that is read again keeps the same hidden states in every engine when nothing is cached.
        "engine": {**CASES[name], "disable_radix_cache": True},
        "num_prompts": NUM_PROMPTS,
        "max_new_tokens": 128,
        "with_gaps": name.startswith("plain"),
    }
    command = [sys.executable, str(Path(__file__).parent / "engine_case.py"), json.dumps(case)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict]:
    """Result of every case; a case that failed holds ``{"error": ...}``. All engines run side by side."""
    running = {name: _start(name) for name in CASES if runs_here(CASES[name])}
    results = {name: finish_case(process) for name, process in running.items()}
    folder = os.environ.get("PSD_RESULTS")
    if folder:
        summary = {
            "command": "PSD_RESULTS=docs/results python -m pytest tests/gpu/test_gpu_eagle.py",
            "gpu": torch.cuda.get_device_name(0),
            "num_gpus": NUM_GPUS,
            "torch": torch.__version__,
            "accept_length": {name: round(accept_length(r), 4) for name, r in results.items() if "error" not in r},
            "differences": {
                name: first_differences(results[plain_case(name)], r)
                for name, r in results.items()
                if "error" not in r and "error" not in results[plain_case(name)]
            },
            "psd": {name: r["psd"] for name, r in results.items() if r.get("psd")},
            "errors": {name: r["error"][-1500:] for name, r in results.items() if "error" in r},
        }
        Path(folder, "gpu_eagle.json" if NUM_GPUS > 1 else "gpu_eagle_one_gpu.json").write_text(
            json.dumps(summary, indent=1) + "\n"
        )
    return results


def plain_case(name: str) -> str:
    """The engine without speculation that a case is held against."""
    return next((f"plain{end}" for end in ("_exact", "_hidden") if end in name), "plain")


def accept_length(result: dict) -> float:
    """Tokens per verify, the first token of each answer left out; 0 without verifies."""
    verifies = sum(count or 0 for count in result["verifies"])
    return (sum(map(len, result["ids"])) - len(result["ids"])) / verifies if verifies else 0.0


@pytest.mark.parametrize("name", cases(*CASES))
def test_engine_answers(name: str, outcomes: dict[str, dict]) -> None:
    """Every case starts and answers every prompt."""
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert all(outcomes[name]["ids"])


@pytest.mark.parametrize("name", cases(*PSD_CASES))
def test_greedy_text(name: str, outcomes: dict[str, dict]) -> None:
    """bf16: a first difference only at ties; exact mode: none."""
    found = first_differences(outcomes[plain_case(name)], outcomes[name])
    wide = found if name.endswith("_exact") else [item for item in found if item[2] > TIE_GAP]
    assert not wide, wide


@pytest.mark.parametrize(
    "name", cases("eagle_parallel_k3", "eagle_sequential_k3", "eagle_parallel_k3_exact", "eagle_shared_k3")
)
def test_accept_length_is_that_of_sglang(name: str, outcomes: dict[str, dict]) -> None:
    """The same head on the same prompts is right as often as in SGLang's own EAGLE-3 worker."""
    ours, stock = accept_length(outcomes[name]), accept_length(outcomes["stock_k3"])
    assert stock > 1.5, "the head is of no use in SGLang's own worker"
    assert abs(ours - stock) / stock < 0.03, (ours, stock)


@pytest.mark.parametrize("name", cases("eagle_sequential_k3", "eagle_shared_k3"))
def test_per_answer_rounds_of_sglang(name: str, outcomes: dict[str, dict]) -> None:
    """Where both texts are equal, most answers take exactly as many rounds: an index that is off by one loses many."""
    stock, ours = outcomes["stock_k3"], outcomes[name]
    same = [i for i, (a, b) in enumerate(zip(stock["ids"], ours["ids"])) if a == b]
    assert len(same) > NUM_PROMPTS // 2
    equal = sum(stock["verifies"][i] == ours["verifies"][i] for i in same)
    assert equal >= 0.7 * len(same), [(stock["verifies"][i], ours["verifies"][i]) for i in same]


@pytest.mark.parametrize("name", cases("eagle_shared_hidden_k3"))
def test_users_get_the_last_layer(name: str, outcomes: dict[str, dict]) -> None:
    """Hidden states of answers are those of the plain engine, up to bf16, as far as both have the same text."""
    plain, ours = outcomes[plain_case(name)], outcomes[name]
    for number, (expected, got) in enumerate(zip(plain["hidden_states"], ours["hidden_states"])):
        same = [a == b for a, b in zip(plain["ids"][number], ours["ids"][number])]
        common = [*same, False].index(False)
        assert len(got) == len(ours["ids"][number]) and common > 4
        a, b = torch.tensor(expected[:common]), torch.tensor(got[:common])
        assert torch.cosine_similarity(a, b).min() > 0.99, number


@pytest.mark.parametrize("name", cases("eagle_parallel_k3", "eagle_shared_parallel_k5"))
def test_hidden_states_are_handed_over_on_the_device(name: str, outcomes: dict[str, dict]) -> None:
    """The report names bytes and time of the handoffs, and nothing was dropped."""
    handoff = outcomes[name]["psd"]["features"]
    assert handoff["handoffs"] > 50 and handoff["bytes"] > 0 and handoff["dropped"] == 0
    assert handoff["mean_us"] < 2000, handoff


def _reader(connection) -> None:
    import msgspec

    from sglang_psd.channel.mailbox import Mailbox

    mailbox = Mailbox(64, 48, torch.bfloat16, "cuda", "")
    connection.send_bytes(msgspec.msgpack.encode(mailbox.handle()))
    offset, count = connection.recv()
    connection.send(mailbox.read(offset, count).float().cpu().tolist())
    connection.recv()


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
def test_mailbox_between_gpus() -> None:
    """Rows written from the first GPU are read by another process on the second one."""
    import msgspec

    from sglang_psd.channel.mailbox import MailboxWriter
    from sglang_psd.channel.messages import MailboxHandle

    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (visible or "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[1]
    process = context.Process(target=_reader, args=(there,))
    process.start()
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    writer = MailboxWriter(msgspec.msgpack.decode(here.recv_bytes(), type=MailboxHandle), 1)
    rows = torch.randn(7, 48, device="cuda:0").to(torch.bfloat16)
    writer.write(20, rows)
    torch.cuda.synchronize()
    here.send((20, 7))
    assert here.recv() == rows.float().cpu().tolist()
    here.send("done")
    process.join(60)
    assert process.exitcode == 0
