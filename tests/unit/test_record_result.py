"""``scripts/record_result.py``: results are written by the run that made them, and a failed run says so."""

import json
import subprocess
import sys
from pathlib import Path

from scripts.record_result import provenance

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_result.py"


def _record(tmp_path, program):
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), str(out), "--", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    return done, json.loads(out.read_text())


def test_the_object_on_the_last_line_is_kept_with_command_and_machine(tmp_path):
    done, result = _record(tmp_path, "print('{\"identical\": false}'); print('{\"identical\": true}'); print()")
    assert done.returncode == 0
    assert result["identical"] is True
    assert result["exit_status"] == 0
    assert "-c" in result["command"] and "cores" in result["machine"]
    assert '{"identical": true}' in done.stdout


def test_a_summary_in_words_is_kept_as_text(tmp_path):
    _, result = _record(tmp_path, "print('{\"a\": 1}'); print('== 3 passed ==')")
    assert result["last_line"] == "== 3 passed =="
    assert "a" not in result


def test_a_failed_run_is_recorded_as_one_and_its_status_passed_on(tmp_path):
    done, result = _record(tmp_path, "print('[1]'); raise SystemExit(3)")
    assert done.returncode == 3
    assert result["exit_status"] == 3
    assert result["last_line"] == "[1]"


def test_a_command_names_no_folder_of_this_machine():
    command = [sys.executable, str(SCRIPT), "--out", "/elsewhere/x.json", "--parts", "wire"]
    recorded = provenance(command)["command"]
    assert recorded == f"{Path(sys.executable).name} scripts/record_result.py --out x.json --parts wire"


def test_wrong_usage_is_told_and_writes_nothing(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), "x.json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "usage" in done.stderr
    assert not list(tmp_path.iterdir())
