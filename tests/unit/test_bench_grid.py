"""Which cells are measured where, and what every server is started with."""

from __future__ import annotations

import pytest

from sglang_psd.bench.arms import ARMS, find_arms, graph_sizes, occupied, server_flags, tp_size_of
from sglang_psd.bench.grid import cells_of, measured_sizes, plan
from sglang_psd.bench.options import BenchOptions
from sglang_psd.errors import PSDConfigError, PSDError

NAMES = ["plain", "standalone", "sequential", "parallel"]


def arms(*names: str) -> list:
    return find_arms(list(names), gpus=2, tp_size=1)


def flag(flags: list[str], name: str) -> str:
    """Value of a flag."""
    return flags[flags.index(name) + 1]


def test_one_server_start_per_arm_and_k_with_all_n_on_it() -> None:
    options = BenchOptions(num_steps=[1, 3], concurrency=[16, 8], output_len=[32, 64], rate=[2.0])
    servers = list(plan(options, arms(*NAMES)))
    assert [(s.arm.name, s.k) for s in servers] == [
        ("plain", None),
        *[(name, k) for k in (1, 3) for name in NAMES[1:]],
    ]
    for server in servers:
        assert [(c.n, c.output_len, c.rate) for c in server.cells] == [
            (8, 32, None), (8, 64, None), (16, 32, None), (16, 64, None), (0, 32, 2.0), (0, 64, 2.0),
        ]  # fmt: skip
        assert len({cell.key for cell in server.cells}) == len(server.cells)
    keys = [server.key for server in servers]
    assert len(set(keys)) == len(keys)


def test_a_repeat_goes_over_all_arms() -> None:
    servers = list(plan(BenchOptions(repeats=3), arms("plain", "parallel")))
    assert [(s.repeat, s.arm.name) for s in servers] == [(r, name) for r in range(3) for name in ("plain", "parallel")]


def test_reference_protocol_gives_parallel_twice_as_many() -> None:
    options = BenchOptions(concurrency=[8, 32], protocol=["reference"], rate=[1.0])
    for name, sizes in (("standalone", [8, 32]), ("parallel", [16, 64])):
        cells = cells_of(ARMS[name], 3, "reference", options)
        assert [cell.n for cell in cells] == sizes, "and no Poisson cells"
        assert [cell.row for cell in cells] == [8, 32]
    assert measured_sizes(options, arms(*NAMES), "reference") == [8, 16, 32, 64]
    assert measured_sizes(options, arms(*NAMES), "fair") == [8, 32]


def test_all_arms_get_the_same_limits_and_graphs() -> None:
    common = {"target": "T", "draft": "D", "k": 3, "tp_size": 1, "sizes": [8, 31]}
    for arm in arms("replicas", *NAMES):
        flags = server_flags(arm, gpus=2, eager=False, **common)
        assert flag(flags, "--max-running-requests") == "31"
        at = flags.index("--cuda-graph-bs-decode")
        assert flags[at + 1 : at + 6] == ["1", "4", "8", "16", "31"]
        eager = server_flags(arm, gpus=2, eager=True, **common)
        assert "--cuda-graph-bs-decode" not in eager
        assert flag(eager, "--cuda-graph-backend-decode") == flag(eager, "--cuda-graph-backend-prefill") == "disabled"
        assert not any(f.startswith("--cuda") for f in server_flags(arm, gpus=0, eager=True, **common))
    assert graph_sizes([7]) == [1, 4, 7]


def test_what_sets_the_arms_apart() -> None:
    def flags(name: str) -> list[str]:
        common = {"target": "T", "draft": "D", "gpus": 4, "tp_size": 2, "eager": False, "sizes": [8]}
        return server_flags(ARMS[name], k=5, **common)

    assert "--speculative-algorithm" not in flags("plain") and "--dp-size" not in flags("plain")
    assert flag(flags("replicas"), "--dp-size") == flag(flags("replicas-standalone"), "--dp-size") == "2"
    assert flag(flags("standalone"), "--speculative-num-draft-tokens") == "6"
    for mode in ("sequential", "parallel"):
        assert flag(flags(mode), "--speculative-algorithm") == "PSD" and flag(flags(mode), "--psd-mode") == mode
        assert flag(flags(mode), "--speculative-num-steps") == "5"


@pytest.mark.parametrize(
    ("names", "gpus", "tp_size", "says"),
    [
        (["pearl"], 2, 1, "does not exist yet"),
        (["auto"], 2, 1, "does not exist yet"),
        (["eagle3"], 0, 1, "needs a GPU"),
        (["tetris"], 2, 1, "does not exist yet"),
        (["fastest"], 2, 1, "--arms knows plain"),
        (["standalone"], 0, 1, "needs a GPU"),
        (["replicas"], 1, 1, "two copies"),
        (["replicas-standalone"], 3, 2, "4 GPUs"),
    ],
)
def test_impossible_arms_are_refused(names: list[str], gpus: int, tp_size: int, says: str) -> None:
    with pytest.raises(PSDError, match=says):
        find_arms(names, gpus=gpus, tp_size=tp_size)


def test_tp_size_is_read_from_what_is_passed_on() -> None:
    assert tp_size_of([]) == 1
    assert tp_size_of(["--dtype", "half", "--tp-size", "4"]) == tp_size_of(["--tp=4"]) == 4
    with pytest.raises(PSDConfigError, match="whole number"):
        tp_size_of(["--tp", "many"])


@pytest.mark.parametrize(
    ("info", "gpus", "shared"),
    [
        ({"tp_size": 1, "dp_size": 1}, 1, False),
        ({"tp_size": 2, "dp_size": 2}, 4, False),
        ({"tp_size": 2, "drafter": "cuda:2"}, 3, False),
        ({"tp_size": 1, "drafter": "cuda:0"}, 1, True),
        ({"tp_size": 1, "base_gpu_id": 1, "drafter": "cuda:0"}, 2, False),
        ({"tp_size": 1, "device": "cpu", "drafter": "cpu"}, 1, True),
    ],
)
def test_gpus_are_counted_on_the_running_server(info: dict, gpus: int, shared: bool) -> None:
    device = info.pop("drafter", None)
    state = {} if device is None else {"psd": {"drafter": {"device": device}}}
    found = occupied({**info, "internal_states": [state], "max_total_num_tokens": 10})
    assert (found["gpus"], found["shared"]) == (gpus, shared)
    assert found["kv_tokens"] == 10 * info.get("dp_size", 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"concurrency": [8, 0]}, "--concurrency"),
        ({"num_steps": [0]}, "--num-steps"),
        ({"output_len": []}, "--output-len needs at least one"),
        ({"batches": 0}, "--batches"),
        ({"rate": [float("inf")]}, "--rate"),
        ({"protocol": ["unfair"]}, "--protocol knows fair, reference"),
        ({"num_steps": [1, 3], "simulate": [2.0]}, "one accept length for each k"),
        ({"num_steps": [1], "simulate": [0.5]}, "--simulate"),
        ({"trace_file": "t.jsonl"}, "--timeline"),
        ({"timeline": "t.json", "trace": False}, "--no-trace"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(given: dict, says: str) -> None:
    with pytest.raises(PSDConfigError, match=says):
        BenchOptions(**given)


def test_simulated_acceptance_belongs_to_its_k() -> None:
    options = BenchOptions(num_steps=[1, 3], simulate=[1.75, 2.8])
    assert [options.simulated(k) for k in (None, 1, 3)] == [None, 1.75, 2.8]
    assert BenchOptions().simulated(3) is None


@pytest.mark.parametrize(
    ("extra", "dummy"), [([], False), (["--load-format", "dummy"], True), (["--load-format=dummy"], True)]
)
def test_made_up_weights_are_noticed(extra: list[str], dummy: bool) -> None:
    assert BenchOptions(extra=extra).dummy_weights is dummy


def test_eagle_arms_name_the_head() -> None:
    (arm,) = find_arms(["eagle3"], gpus=1, tp_size=1)
    flags = arm.flags("head", 3)
    assert flags[:4] == ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "head"]
    assert flags[4:] == find_arms(["standalone"], gpus=1, tp_size=1)[0].flags("head", 3)[4:]
