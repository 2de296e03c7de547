"""Result files, the map made of them, the timeline: on files that a run of the tiny pair on two CPU cores wrote."""

from __future__ import annotations

import copy
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from sglang_psd.bench.map import crossover, gains, regions, series_of
from sglang_psd.bench.plots import draw_plots, require_matplotlib
from sglang_psd.bench.report import report
from sglang_psd.bench.results import ResultFile, load_results
from sglang_psd.bench.rounds import is_verify, read_trace
from sglang_psd.bench.table import results_table
from sglang_psd.bench.timeline import DEVICE, DRAFTER, TARGET, steady_window, trace_events, write_timeline
from sglang_psd.errors import PSDConfigError

DATA = Path(__file__).parent / "data"
DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = {
    "target": "T", "draft": "D", "dataset": "prompts", "temperature": 0.0, "waves": 1, "extra": [],
    "environment_accept_length": None, "simulated": {"3": None}, "command": "sglang-psd bench",
}  # fmt: skip


@pytest.fixture
def recorded() -> dict:
    """Plain, sequential and parallel at 2 and 4 requests in flight, k=3, real weights."""
    return load_results(DATA / "bench_tiny.json")


@pytest.fixture
def lines() -> list[dict]:
    """Step trace of one parallel cell of that run."""
    return read_trace(DATA / "bench_tiny.trace.jsonl")


def cells(data: dict, arm: str) -> list[dict]:
    return [cell for cell in data["cells"].values() if cell["arm"] == arm]


def map_rows(page: str) -> list[list[str]]:
    """Rows of the map's table as text."""
    table = page.split("## The map")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return rows[2:]


def test_map_shows_medians_of_what_was_measured(recorded: dict) -> None:
    rows = map_rows(report({"bench_tiny.json": recorded}))
    assert len(rows) == len(cells(recorded, "plain"))
    for row in rows:
        for arm, shown in (("plain", row[6].split()[1]), ("sequential", row[7]), ("parallel", row[8])):
            (cell,) = [cell for cell in cells(recorded, arm) if cell["n"] == int(row[2])]
            measured = [m["decode_tok_s"] for m in cell["measurements"]]
            assert shown == f"{statistics.median(measured):.0f}"


def slow_down(data: dict, n: int, factor: float) -> None:
    """Make the PSD arms ``factor`` as fast at ``n``."""
    for arm in ("sequential", "parallel"):
        for cell in cells(data, arm):
            for measurement in cell["measurements"] if cell["n"] == n else ():
                for name in ("decode_tok_s", "decode_tok_s_per_gpu", "tok_s", "tok_s_per_gpu"):
                    measurement[name] *= factor


@pytest.mark.parametrize("slow", [2, 4])
def test_losing_regions_come_first(recorded: dict, slow: int) -> None:
    slow_down(recorded, slow, 0.01)
    found = regions(series_of([recorded]))
    assert found[0].n == slow and found[0].winner == "plain" and found[0].gain < 0.1
    page = report({"bench_tiny.json": recorded})
    assert map_rows(page)[0][2] == str(slow)
    lost = sum(region.gain < 1 for region in found)
    assert f"Stock SGLang wins {lost} of {len(found)} rows" in page


def split(data: dict) -> tuple[dict, dict]:
    """The plain arm in a file of its own."""
    first, second = copy.deepcopy(data), copy.deepcopy(data)
    first["cells"] = {key: cell for key, cell in data["cells"].items() if cell["arm"] == "plain"}
    second["cells"] = {key: cell for key, cell in data["cells"].items() if cell["arm"] != "plain"}
    return first, second


def test_arms_without_a_draft_count_across_files(recorded: dict) -> None:
    plain, psd = split(recorded)
    plain["settings"]["draft"] = "another"
    assert series_of([plain, psd]) == series_of([recorded])


@pytest.mark.parametrize("name", ["extra", "target", "waves"])
def test_but_not_under_other_conditions(recorded: dict, name: str) -> None:
    plain, psd = split(recorded)
    plain["settings"][name] = "another"
    assert regions(series_of([plain, psd])) == []


def test_other_attention_backends_are_other_rows(recorded: dict) -> None:
    other = copy.deepcopy(recorded)
    other["settings"]["extra"] = ["--attention-backend", "fa3"]
    rows = map_rows(report({"one.json": recorded, "other.json": other}))
    assert sorted({row[5] for row in rows}) == ["default", "fa3"]
    assert len(rows) == 2 * len(map_rows(report({"one.json": recorded})))


def test_a_drafter_on_the_targets_gpu_is_an_arm_of_its_own(recorded: dict) -> None:
    """Per GPU it has twice the rate of one on a GPU of its own; without a GPU there is nothing to tell apart."""
    assert all(server["shared"] for server in recorded["servers"].values() if server["arm"] != "plain")
    shared = copy.deepcopy(recorded)
    shared["runs"][-1]["environment"]["gpus"] = ["GPU"]
    own = copy.deepcopy(shared)
    for server in own["servers"].values():
        server["shared"] = False
    slow_down(own, 2, 0.5)
    (found, *_) = (region for region in regions(series_of([own, shared])) if region.n == 2)
    assert list(found.psd) == ["sequential", "parallel", "sequential, shared GPU", "parallel, shared GPU"]
    assert found.psd["sequential, shared GPU"] == pytest.approx(2 * found.psd["sequential"])
    page = report({"own.json": own, "shared.json": shared})
    assert "| sequential, shared GPU (fair) |" in page and "| parallel, shared GPU (fair) |" not in page
    assert list(regions(series_of([recorded]))[0].psd) == ["sequential", "parallel"]


def test_gain_at_the_simulated_accept_length(recorded: dict) -> None:
    """What luck added to an arm's rate is taken off again; real acceptance is no luck."""
    assert all(region.level_gain is None for region in regions(series_of([recorded])))
    recorded["settings"]["simulated"] = {"3": 2.0}
    for cell in recorded["cells"].values():
        for measurement in cell["measurements"]:
            measurement["accept_length"] = None if cell["arm"] == "plain" else 2.0
    before = {region.n: region.gain for region in regions(series_of([recorded]))}
    for cell in recorded["cells"].values():
        for measurement in cell["measurements"] if cell["arm"] != "plain" else ():
            measurement["accept_length"] *= 1.25
            measurement["decode_tok_s_per_gpu"] *= 1.25
    for region in regions(series_of([recorded])):
        assert region.gain == pytest.approx(1.25 * before[region.n])
        assert region.level_gain == pytest.approx(before[region.n])


def test_reference_protocol_stands_beside_the_fair_one(recorded: dict) -> None:
    """The recorded cells renamed: standalone needs a GPU."""
    fair = map_rows(report({"bench_tiny.json": recorded}))
    for key, cell in list(recorded["cells"].items()):
        if cell["k"] is not None:
            twin = copy.deepcopy(cell)
            twin["arm"] = cell["arm"].replace("sequential", "standalone")
            twin["protocol"] = "reference"
            twin["n"] = cell["n"] * (2 if cell["arm"] == "parallel" else 1)
            recorded["cells"]["reference " + key] = twin
    page = report({"bench_tiny.json": recorded})
    table = page.split("## The reference's protocol")[1].split("\n## ")[0]
    assert "| tiny-draft | 3 | 2 against 4 |" in table
    assert map_rows(page) == fair, "which stays out of the map"


def test_gain_and_crossover() -> None:
    assert crossover([(8, 1.5), (32, 0.5)]) == [pytest.approx(16.0)]
    assert crossover([(8, 1.5), (32, 1.1)]) == []


def test_gains_pair_equal_n(recorded: dict) -> None:
    (series,) = series_of([recorded]).values()
    del series["plain"][0]
    assert [n for n, _ in gains(series, "parallel", "plain")] == [4]


def test_failures_are_reported(recorded: dict) -> None:
    (cell, *_) = cells(recorded, "parallel")
    cell["measurements"] = []
    cell["errors"] = [{"repeat": 0, "reason": "the server ended", "log": ["workspace"]}]
    page = report({"bench_tiny.json": recorded})
    assert "## What failed" in page and "the server ended" in page
    assert results_table(recorded).row_count == len(recorded["cells"])


def test_page_in_docs_is_what_its_files_give() -> None:
    page = (DOCS / "performance.md").read_text()
    names = re.findall(r"^- `(.+?)` \(", page.split("## Measured")[1].split("\n## ")[0], re.M)
    assert names
    assert page == report({name: load_results(DOCS / "results" / name) for name in names})


# --- result files -----------------------------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = ResultFile(path, SETTINGS, {"gpus": []})
    entry = first.entry({"key": "c", "arm": "plain"})
    entry["measurements"].append({"repeat": 1})
    entry["errors"].append({"repeat": 0})
    first.save()
    second = ResultFile(path, {**SETTINGS, "simulated": {"1": 1.7}, "command": "again"}, {"gpus": []})
    assert (second.measured("c", 1), second.measured("c", 0), second.measured("d", 1)) == (1, 0, 0)
    assert second.failed("c", 0) and not second.failed("c", 1)
    assert second.data["settings"]["simulated"] == {"3": None, "1": 1.7}
    assert [run["command"] for run in second.data["runs"]] == ["sglang-psd bench", "again"]
    second.forget_errors()
    assert not second.failed("c", 0)
    assert ResultFile(path, {**SETTINGS, "target": "other"}, {}, fresh=True).data["cells"] == {}


@pytest.mark.parametrize("change", [{"target": "other"}, {"extra": ["--tp", "2"]}, {"simulated": {"3": 2.8}}])
def test_measurements_of_something_else_are_not_mixed_in(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "r.json"
    ResultFile(path, SETTINGS, {}).save()
    with pytest.raises(PSDConfigError, match="--fresh"):
        ResultFile(path, {**SETTINGS, **change}, {})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "another/1"}'])
def test_foreign_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(PSDConfigError, match="sglang-psd bench"):
        load_results(path)


# --- timeline ---------------------------------------------------------------------------------------------------------


def test_every_step_and_every_draft_is_in_the_timeline(lines: list[dict]) -> None:
    events = trace_events(lines)
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(e["name"].startswith("verify") for e in spans) == sum(is_verify(line) for line in lines)
    assert sum(e["pid"] == DRAFTER for e in spans) == sum(line["type"] == "Draft" for line in lines)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    for process in (TARGET, DRAFTER):
        device = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (process, DEVICE))
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(device)), (
            "one thing at a time on a device"
        )


def test_handoffs_are_arrows_forward_in_time(lines: list[dict]) -> None:
    arrows: dict[str, dict[str, int]] = {}
    for event in trace_events(lines):
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event["ts"]
    assert len(arrows) == 2 * sum(line["type"] == "Draft" for line in lines)
    assert all(arrow["s"] <= arrow["f"] for arrow in arrows.values())


def test_steady_window_is_a_pair_of_rounds(lines: list[dict]) -> None:
    window = steady_window(lines)
    assert window is not None
    inside = [
        line["slot"]
        for line in sorted((line for line in lines if is_verify(line)), key=lambda line: line["verify_start_us"])
        if line["verify_start_us"] >= window[0] and line["verify_end_us"] <= window[1]
    ]
    assert inside in ([0, 1, 0], [1, 0, 1])
    assert steady_window([line for line in lines if not is_verify(line)]) is None


def test_pictures_are_drawn(recorded: dict, lines: list[dict], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = draw_plots([recorded], tmp_path) + write_timeline(lines, tmp_path / "t.json", title="t")
    assert [path.suffix for path in written] == [".svg", ".svg", ".json", ".svg"]
    assert all(path.stat().st_size > 1000 for path in written)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_missing_matplotlib_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PSDConfigError, match=re.escape("sglang-psd[bench]")):
        require_matplotlib()


def test_the_page_of_the_benchmark_lists_every_figure() -> None:
    """docs/benchmark.md, by what a run has written."""
    page = (DOCS / "benchmark.md").read_text().split("## Figures", 1)[1].split("## Pictures", 1)[0]
    listed = set(re.findall(r"`(\w+)`", page))
    cells = json.loads((DOCS / "results" / "cpu_bench.json").read_text())["cells"].values()
    written = {name for cell in cells for measured in cell["measurements"] for name in measured}
    rounds = {name for cell in cells for measured in cell["measurements"] for name in measured.get("rounds") or {}}
    assert written and rounds and written <= listed
    assert {re.sub("_p(50|99)$", "", name) for name in rounds} <= listed
