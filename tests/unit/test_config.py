"""Options: what is accepted, what wins, and what the errors say."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.config import FLAG_FIELDS, PSDConfig, flag_name, load_config_source, resolve_config
from sglang_psd.errors import PSDConfigError


def test_defaults_are_valid_and_frozen() -> None:
    config = PSDConfig()
    assert config.num_slots == 2
    assert PSDConfig(mode="sequential").num_slots == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "off"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, ["--psd-mode", "parallel", "'fast'"]),
        ({"mode": 3}, ["--psd-mode", "a string"]),
        ({"loop": "never"}, ["'loop' in --psd-config", "overlapped"]),
        ({"drafter_mem_fraction": 0.0}, ["--psd-drafter-mem-fraction", "between 0 and 1"]),
        ({"drafter_mem_fraction": 1.0}, ["--psd-drafter-mem-fraction"]),
        ({"drafter_mem_fraction": float("nan")}, ["--psd-drafter-mem-fraction"]),
        ({"proposal_top_m": 0}, ["--psd-proposal-top-m", "at least 1"]),
        ({"proposal_top_m": True}, ["--psd-proposal-top-m", "whole number"]),
        ({"proposal_top_m": 2.5}, ["--psd-proposal-top-m", "whole number"]),
        ({"proposal_top_m": 10**30}, ["--psd-proposal-top-m", "at most 2147483647"]),
        ({"max_losses": 10**30}, ["max_losses", "at most 2147483647"]),
        ({"start_timeout_s": 10**400}, ["start_timeout_s", "at most 2147483647"]),
        ({"start_timeout_s": "long"}, ["start_timeout_s", "must be a number, got 'long'"]),
        ({"drafter_mem_fraction": "all"}, ["--psd-drafter-mem-fraction must be a number, got 'all'"]),
        ({"min_parallel_requests": 1}, ["min_parallel_requests", "at least 2"]),
        ({"rebalance_threshold": 1}, ["rebalance_threshold", "at least 2"]),
        ({"draft_timeout_s": 0}, ["draft_timeout_s"]),
        ({"draft_timeout_s": 31}, ["draft_timeout_s", "at most 30 seconds"]),
        ({"draft_timeout_s": float("inf")}, ["draft_timeout_s"]),
        ({"draft_timeout_s": float("nan")}, ["draft_timeout_s"]),
        ({"start_timeout_s": -1}, ["start_timeout_s"]),
        ({"max_restart_delay_s": -1}, ["max_restart_delay_s", "at least 0"]),
        ({"max_losses": 0}, ["max_losses", "at least 1"]),
        ({"acceptance_floor": 1.0}, ["acceptance_floor", "between 0 and 1"]),
        ({"acceptance_floor": float("nan")}, ["acceptance_floor"]),
        ({"integrity_checks": 1}, ["integrity_checks", "true or false"]),
        ({"drafter_device": "tpu"}, ["--psd-drafter-device", "cuda:N or cpu", "'tpu'"]),
        ({"drafter_device": "cuda:x"}, ["--psd-drafter-device"]),
        ({"drafter_device": "cuda:"}, ["--psd-drafter-device"]),
        ({"drafter_device": "cpu:0"}, ["--psd-drafter-device"]),
        ({"trace": "/no/such/folder/trace.jsonl"}, ["--psd-trace", "existing folder"]),
        ({"trace": "/"}, ["--psd-trace"]),
        ({"trace": ""}, ["--psd-trace"]),
        ({"trace": "a\0b"}, ["--psd-trace"]),
        ({"drafter_dtype": "int8"}, ["--psd-drafter-dtype", "bfloat16"]),
    ],
)
def test_bad_values_name_the_option(options: dict, words: list[str]) -> None:
    with pytest.raises(PSDConfigError) as error:
        PSDConfig(**options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:13", None])
def test_devices(device: str | None) -> None:
    assert PSDConfig(drafter_device=device).drafter_device == device


def test_flags_win_over_json_over_defaults(tmp_path) -> None:
    source = {"mode": "sequential", "proposal_top_m": 8}
    file = tmp_path / "psd.json"
    file.write_text(json.dumps(source))
    for form in (source, json.dumps(source), f"  {json.dumps(source)} ", str(file)):
        config = resolve_config({"mode": None, "proposal_top_m": 16}, form)
        assert (config.mode, config.proposal_top_m, config.loop) == ("sequential", 16, "overlapped")
    assert resolve_config({}, None) == PSDConfig()


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('{"mode": ', "malformed JSON"),
        ("{" * 10_000, "malformed JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ('{"proposal_top_m": ' + "9" * 5000 + "}", "malformed JSON"),
        ("no-such-file.json", "readable file"),
        ("\0", "readable file"),
        ({"modes": "off"}, "no option 'modes'"),
        ({"modes": "off", 1: 2}, "no option 1;"),
        (["mode", "off"], "must hold a JSON object"),
        (5, "must hold a JSON object"),
        ('{"psd_mode": "off"}', "no option 'psd_mode'"),
    ],
)
def test_bad_sources(source, word: str) -> None:
    with pytest.raises(PSDConfigError, match=word):
        resolve_config({}, source)


def test_a_file_with_something_else(tmp_path) -> None:
    file = tmp_path / "list.json"
    file.write_text("[1]")
    with pytest.raises(PSDConfigError, match="JSON object"):
        load_config_source(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PSDConfigError, match="--psd-config"):
        load_config_source(str(file))


def test_every_field_says_how_it_is_set() -> None:
    for field in dataclasses.fields(PSDConfig):
        name = flag_name(field.name)
        assert name.startswith("--psd-") == (field.name in FLAG_FIELDS)
        assert "--psd-config" in name or field.name in FLAG_FIELDS


# --- anything at all -------------------------------------------------------------------------------

NAMES = [field.name for field in dataclasses.fields(PSDConfig) if field.name != "trace"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), VALUES, max_size=8))
@settings(max_examples=300, deadline=None)
def test_any_options_are_taken_or_refused_in_one_line(options: dict) -> None:
    try:
        config = resolve_config({}, options)
    except PSDConfigError as error:
        assert "\n" not in str(error) and str(error)
        return
    # What is taken survives the way through JSON: --psd-config and the keyword mean the same.
    assert resolve_config({}, json.dumps(options)) == config


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_config_or_an_error(text: str) -> None:
    try:
        resolve_config({}, text)
    except PSDConfigError as error:
        assert "--psd-config" in str(error) or "'" in str(error)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_file_is_a_config_or_an_error(tmp_path_factory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("config") / "psd.json"
    file.write_bytes(content)
    try:
        resolve_config({}, str(file))
    except PSDConfigError as error:
        assert "--psd-" in str(error)
