"""What this package relies on in SGLang: predicates, worker contract, ledger."""

from __future__ import annotations

import inspect
import os

import pytest

# Every public method of SGLang's algorithm enum, and what PSD answers. A new SGLang that asks more fails here.
ANSWERS = {
    "is_some": True,
    "is_none": False,
    "is_speculative": True,
    "is_eagle": False,
    "is_eagle3": False,
    "is_frozen_kv_mtp": False,
    "is_dflash": False,
    "is_dspark": False,
    "is_dflash_family": False,
    "is_standalone": False,
    "is_ngram": False,
    "supports_target_verify_for_draft": False,
    "supports_ragged_verify": False,
    "supports_grammar_overlap": False,
    "has_draft_kv": False,
    "carries_draft_hidden_states": False,
    "need_topk": False,
}
CALLABLES = {
    "create_future_map",
    "build_disagg_draft_input",
    "handle_server_args",
    "get_num_tokens_per_req_for_target_verify",
    "get_num_tokens_per_bs_for_target_verify",
    "create_worker",
}
CLASS_LEVEL = {"from_string", "register"}


@pytest.fixture(scope="module")
def algorithm(sglang_loaded):
    """The registered PSD entry."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string("psd")


@pytest.mark.parametrize("predicate", sorted(ANSWERS))
def test_predicate(predicate: str, algorithm) -> None:
    """Each answer is a decision, written down above."""
    assert getattr(algorithm, predicate)() is ANSWERS[predicate]


def test_no_method_is_missing(algorithm) -> None:
    """``CustomSpecAlgo`` lacks methods that core calls; SGLang's own conformance test looks at some names only."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asked = {name for name, value in vars(SpeculativeAlgorithm).items() if inspect.isfunction(value)}
    asked = {name for name in asked if not name.startswith("_")}
    assert asked == set(ANSWERS) | CALLABLES
    assert all(callable(getattr(algorithm, name)) for name in asked)
    assert algorithm.get_num_tokens_per_req_for_target_verify(4, False) == 4


def test_hooks_are_applied_and_fit(sglang_loaded) -> None:
    """All hooks are in place after loading, and the ledger names this SGLang's sources."""
    from sglang_psd.hooks import verify_applied
    from sglang_psd.ledger import check_all

    verify_applied()
    assert [finding for finding in check_all() if finding.problem] == []


def test_worker_has_what_the_scheduler_calls(sglang_loaded) -> None:
    """Every public member of ``BaseSpecWorker`` exists on the worker; nothing abstract is left."""
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    from sglang_psd.target.worker import PSDWorker

    public = {name for name in vars(BaseSpecWorker) if not name.startswith("_")}
    assert public <= set(dir(PSDWorker))
    assert not inspect.isabstract(PSDWorker)


@pytest.mark.parametrize("accept_length", [0.5, 1.75, 2.8, 7.0])
@pytest.mark.parametrize("method", ["match-expected", "multinomial"])
def test_simulated_acceptance_draws_as_stock_does(accept_length: float, method: str, sglang_loaded) -> None:
    """Mean tokens a round under ``SGLANG_SIMULATE_ACC_LEN``: a comparison with STANDALONE rests on it."""
    from sglang.srt.speculative.spec_utils import _sample_simulated_acc_len

    from sglang_psd.target.simulated import SimulatedAcceptance

    draws, chunk = 4000, 4
    ours = SimulatedAcceptance(accept_length, chunk, method, "fixed", seed=1)
    mean = sum(ours.draw() for _ in range(draws)) / draws
    stock = sum(_sample_simulated_acc_len(accept_length, method, chunk) for _ in range(draws)) / draws
    assert mean == pytest.approx(stock, abs=0.1)


BASE = {"speculative_algorithm": "PSD", "speculative_num_steps": 3}
REFUSED = [
    ({}, "--speculative-draft-model-path"),
    ({"draft": "D_mid", "pp_size": 2}, "--pp-size"),
    ({"draft": "D_mid", "dp_size": 2}, "--dp-size"),
    ({"draft": "D_mid", "enable_lora": True}, "--enable-lora"),
    ({"draft": "D_mid", "enable_mixed_chunk": True}, "--enable-mixed-chunk"),
    ({"draft": "D_mid", "enable_prefill_delayer": True}, "--enable-prefill-delayer"),
    ({"draft": "D_mid", "speculative_num_steps": 0}, "--speculative-num-steps"),
    ({"draft": "D_mid", "speculative_num_draft_tokens": 9}, "--speculative-num-draft-tokens"),
    ({"draft": "D_mid", "speculative_eagle_topk": 4}, "--speculative-eagle-topk"),
    ({"draft": "D_mid", "psd_mode": "sideways"}, "--psd-mode"),
    ({"draft": "D_mid", "psd_drafter_mem_fraction": 1.5}, "--psd-drafter-mem-fraction"),
    ({"draft": "D_mid", "psd_config": '{"speed": 11}'}, "speed"),
    ({"draft": "D_mid", "psd_trace": "/nonexistent/folder/trace.jsonl"}, "--psd-trace"),
    ({"draft": "D_tok"}, "--speculative-draft-model-path"),
    ({"draft": "no_such_folder"}, "--speculative-draft-model-path"),
    ({"draft": ""}, "--speculative-draft-model-path"),
    ({"draft": "D_mid", "psd_drafter_attention_backend": "nonsense"}, "--psd-drafter-attention-backend"),
    ({"draft": "D_mid", "psd_drafter_dtype": "int8"}, "--psd-drafter-dtype"),
    ({"draft": "D_mid", "psd_drafter_device": "cuda:9"}, "--psd-drafter-device"),
    ({"draft": "D_mid", "grammar_backend": "outlines"}, "--grammar-backend"),
    ({"draft": "D_mid", "is_embedding": True}, "--is-embedding"),
    ({"draft": "D_mid", "psd_drafter_attention_backend": "fa3"}, "--psd-drafter-attention-backend"),
    ({"draft": "D_mid", "speculative_draft_attention_backend": "fa3"}, "--psd-drafter-attention-backend"),
    ({"draft": "D_mid", "speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single"),
    ({"draft": "D_mid", "speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc"),
    ({"target": "L", "draft": "L_e1", "delete_ckpt_after_loading": True}, "--delete-ckpt-after-loading"),
    ({"draft": "D_mid", "speculative_token_map": "ids.pt"}, "--speculative-token-map"),
    ({"target": "L", "draft": "L_e1", "speculative_token_map": "/nonexistent/ids.pt"}, "--speculative-token-map"),
    ({"speculative_draft_model_path": "no-such-folder"}, "--speculative-draft-model-path"),
]


@pytest.mark.parametrize(("given", "named"), REFUSED)
def test_bad_arguments_name_their_flag(given: dict, named: str, models, run_case) -> None:
    """One sentence, the flag at fault in it."""
    message = run_case(refusal, models, given)
    assert message is not None and named in message and "\n" not in message, message


def refusal(models, given: dict) -> str | None:
    """Message of the error that building the arguments raises; None when they are accepted."""
    from sglang_psd.errors import PSDConfigError
    from sglang_psd.server_args import PSDServerArgs

    keywords = {**BASE, **given}
    draft = keywords.pop("draft", None)
    if draft is not None:
        keywords["speculative_draft_model_path"] = str(models / draft)
    target = models / keywords.pop("target", "T")
    try:
        PSDServerArgs(model_path=str(target), **keywords)
    except PSDConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("enable_mis", True, "--enable-mis"),
        ("rl_on_policy_target", "fsdp", "--rl-on-policy-target"),
        ("sampling_backend", "mine", "--sampling-backend mine"),
    ],
)
def test_what_sglang_takes_on_gpus_only_is_refused(models, run_case, name, value, flag) -> None:
    """Without a GPU SGLang's own checks come first, so the arguments are made and then looked at."""

    def case() -> str:
        from sglang_psd.algorithm import validate_server_args
        from sglang_psd.errors import UnsupportedFeatureError
        from sglang_psd.server_args import PSDServerArgs

        draft = str(models / "D_mid")
        args = PSDServerArgs(model_path=str(models / "T"), speculative_draft_model_path=draft, **BASE)
        object.__setattr__(args, name, value)
        with pytest.raises(UnsupportedFeatureError) as refused:
            validate_server_args(args)
        return str(refused.value)

    assert flag in run_case(case)


def test_multimodal_targets_are_refused(models, tmp_path, run_case) -> None:
    from transformers import AutoTokenizer, Qwen2VLConfig

    config = Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(models / "T").save_pretrained(tmp_path)
    message = run_case(refusal, models, {"draft": "D_mid", "target": tmp_path})
    assert message is not None and "multimodal" in message and "--model-path" in message and "\n" not in message


@pytest.mark.parametrize(("role", "flag"), [("target", "--model-path"), ("draft", "--speculative-draft-model-path")])
@pytest.mark.parametrize("kind", ["Qwen3Next", "FalconH1", "LlamaForSequenceClassification"])
def test_models_without_a_chain_of_tokens_are_refused(models, tmp_path, run_case, role, flag, kind) -> None:
    """Layers that carry a state from token to token keep what a rejected draft left in it; others continue no text."""

    def case() -> str | None:
        from sglang.srt.configs import FalconH1Config, Qwen3NextConfig
        from transformers import AutoTokenizer, LlamaConfig

        config = {
            "Qwen3Next": lambda: Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], vocab_size=320),
            "FalconH1": lambda: FalconH1Config(architectures=["FalconH1ForCausalLM"], vocab_size=320),
            "LlamaForSequenceClassification": lambda: LlamaConfig(architectures=[kind], vocab_size=320),
        }[kind]()
        config.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(models / "T").save_pretrained(tmp_path)
        return refusal(models, {"draft": "D_mid", role: tmp_path})

    message = run_case(case)
    named = "embedding" if kind.endswith("Classification") else "recurrent"
    assert message is not None and named in message and flag in message and kind in message and "\n" not in message


def test_a_config_file_is_read_once(models, run_case) -> None:
    """It may be a pipe, and it may change before the ranks start."""

    def case() -> tuple[str, str]:
        import dataclasses

        from sglang_psd.server_args import PSDServerArgs, read_mode

        reader, writer = os.pipe()
        os.write(writer, b'{"mode": "sequential", "proposal_top_m": 8}')
        os.close(writer)
        args = PSDServerArgs(
            model_path=str(models / "T"),
            speculative_draft_model_path=str(models / "D_mid"),
            psd_config=f"/dev/fd/{reader}",
            **BASE,
        )
        assert dataclasses.replace(args).psd().proposal_top_m == 8
        return args.psd().mode, read_mode("false")

    assert run_case(case) == ("sequential", "off")


@pytest.mark.parametrize(
    ("given", "named"), [({"psd_mode": "parallel"}, "--psd-mode"), ({"psd_config": '{"mode": "off"}'}, "--psd-config")]
)
def test_flag_without_the_algorithm_is_refused(given: dict, named: str, models, run_case) -> None:
    """A PSD flag that would be ignored is an error."""
    message = run_case(refusal, models, {"speculative_algorithm": None, "speculative_num_steps": None, **given})
    assert message is not None and "--speculative-algorithm PSD" in message and named in message


def resolved(models, given: dict) -> dict:
    """Fields after resolution, and again after ``dataclasses.replace`` and pickling."""
    import dataclasses
    import pickle

    from sglang_psd.server_args import PSDServerArgs

    args = PSDServerArgs(
        model_path=str(models / "T"), speculative_draft_model_path=str(models / "D_mid"), **{**BASE, **given}
    )
    again = pickle.loads(pickle.dumps(dataclasses.replace(args)))
    names = ("speculative_algorithm", "speculative_num_draft_tokens", "psd_mode", "psd_proposal_top_m")
    return {"first": [getattr(args, n) for n in names], "again": [getattr(again, n) for n in names]}


def test_resolution_survives_copies(models, run_case) -> None:
    """The validator is idempotent and fields travel."""
    got = run_case(resolved, models, {"psd_config": '{"mode": "sequential", "proposal_top_m": 8}'})
    assert got["first"] == got["again"] == ["PSD", 4, "sequential", 8]


def test_off_is_stock_sglang(models, run_case) -> None:
    """``--psd-mode off`` leaves no trace of speculation in the arguments."""
    got = run_case(resolved, models, {"psd_mode": "off"})
    assert got["first"][:3] == got["again"][:3] == [None, None, "off"]
