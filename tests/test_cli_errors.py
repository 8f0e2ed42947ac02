"""What the command line cannot do it says in one line to stderr, with exit code 2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from hooked_ssm import cli
from hooked_ssm.sweeps import RunFolder, parse_sweep
from tests.sweeps.tiny import SWEEP, wait_until


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.yaml").write_text("grid: [")
    (tmp_path / "grid.json").write_text(json.dumps(SWEEP))
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "runs" / "abc").mkdir(parents=True)
    (tmp_path / "runs" / "abc" / "spec.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("hooks mamba --layers 0", "n_layers=0"),
        ("hooks mamba --layers -1", "n_layers=-1"),
        ("hooks mambo", "did you mean 'mamba'"),
        ("sweep bad.yaml --out runs2", "cannot read the sweep bad.yaml"),
        ("sweep list.yaml --out runs2", "list.yaml"),
        ("sweep none.yaml --out runs2", "cannot read the sweep none.yaml"),
        ("sweep grid.json --out runs2 --gpus 0.5", "--gpus=0.5 needs --executor ray"),
        ("sweep grid.json --out runs2 --address auto", "--address=auto needs --executor ray"),
        ("sweep grid.json --out runs2 --executor ray --threads 2", "needs --executor local"),
        ("sweep grid.json --out runs2 --threads 0", "threads=0"),
        ("sweep grid.json", "needs a folder for its runs; give --out FOLDER"),
        ("sweep grid.json --out runs2 --device foo", "device='foo'; allowed: a device of torch"),
        ("sweep grid.json --out runs2 --import nope", "module 'nope' cannot be imported"),
        ("report file --out report.html", "holds no runs"),
        ("report none --out report.html", "holds no runs"),
        ("report runs --out report.html", "spec.json is no JSON"),
        ("report runs --out report.txt", "ends in .html"),
        ("report runs --out report.html --import nope", "module 'nope' cannot be imported"),
        ("demo --out file/under", "is, or lies in, a file"),
        ("demo --out out --seed -1", "seed=-1"),
        ("demo --out out --architecture mambo", "did you mean 'mamba'"),
    ],
)
def test_one_line_and_exit_code_2(command, message, here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hooked-ssm", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert message in err and "Traceback" not in err
    assert err.startswith("error: ") and err.strip().count("\n") == 0


def test_a_dry_run_says_how_far_the_runs_are(here, capsys):
    assert "missing" in listed("sweep grid.json --dry-run", capsys)
    first, *others = parse_sweep(SWEEP)
    run = RunFolder.of("runs2", first)
    run.path.mkdir(parents=True)
    run.begin(first)
    assert "unfinished, at step 0" in listed("sweep grid.json --out runs2 --dry-run", capsys)
    run.fail(ValueError("no"))
    words = listed("sweep grid.json --out runs2 --dry-run", capsys).split()
    assert words.count("failed") == 1 and words.count("missing") == len(others)


def listed(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.app(command.split())
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are Unix's")
@pytest.mark.usefixtures("as_in_a_terminal")
def test_ctrl_c_at_the_start_of_a_sweep_is_no_traceback(here):
    command = [sys.executable, "-m", "hooked_ssm.cli", "sweep", "grid.json", "--out", "new"]
    sweep = subprocess.Popen(
        command, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until((here / "new").exists)
    os.killpg(sweep.pid, signal.SIGINT)
    out, err = sweep.communicate(timeout=60)
    assert "Traceback" not in err and sweep.returncode == 130
    assert "Interrupted: 0 of 12 runs complete" in out


def test_unreadable_files_are_one_line_too(here, monkeypatch, capsys):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", "runs")

    monkeypatch.setattr("hooked_ssm.sweeps.write_report", denied)
    monkeypatch.setattr(sys, "argv", ["hooked-ssm", "report", "runs", "--out", "report.html"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip() == "error: [Errno 13] Permission denied: 'runs'"
