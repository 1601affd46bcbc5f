"""How a run is put together and taken apart: what starts when, and what ends whatever happens."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from seerl import run as run_module
from seerl.config import load_config
from seerl.errors import UserError
from seerl.run import Run, build_run
from seerl.trainer import Trainer
from tests.runs import ROOT, arguments, environment, metrics, seerl
from tests.test_run import wait_for_step


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    before = children()
    yield
    left = psutil.wait_procs([p for p in psutil.Process().children(True) if p.pid not in before], timeout=10)[
        1
    ]
    assert not [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]


def built(folder: Path, model: Path, **changes: object) -> tuple[Run, Path | None]:
    changes = {"trainer.logger": "['file']", **changes}
    return build_run(load_config(arguments(folder, model, **changes)).config)


def test_data_workers_are_forked_before_the_model_and_stay_through_a_resume(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    at_model: list[set[int]] = []
    build_models = run_module._build_models

    def noted(*args: Any) -> Any:
        at_model.append(children())
        return build_models(*args)

    monkeypatch.setattr(run_module, "_build_models", noted)
    before = children()
    run, checkpoint = built(tmp_path / "copy", tiny_qwen2_5_vl, **{"trainer.max_steps": 7})
    try:
        assert run.loader is not None
        assert checkpoint is not None
        Trainer(run).resume(checkpoint)
        assert len(at_model[0] - before) >= 2  # training rows, validation rows
        # six steps of 4 prompts are behind it, five to an epoch of 20 rows
        assert [p.uid.rpartition("#")[2] for p in run.loader.take(4)] == ["1"] * 4
        assert run.loader.state_dict()["position"] == 8
        assert children() == at_model[0]
    finally:
        run.close(0)


def test_what_raises_while_closing_keeps_nothing_else_open(
    tmp_path: Path, tiny_qwen2_5_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seerl.rollout.transformers_engine import TransformersEngine

    def broken(_: object) -> None:
        raise RuntimeError("the engine would not end")

    monkeypatch.setattr(TransformersEngine, "close", broken)
    run, _ = built(tmp_path, tiny_qwen2_5_vl)
    finished: list[int] = []
    monkeypatch.setattr(type(run.trackers), "finish", lambda _, code: finished.append(code))
    with pytest.raises(RuntimeError, match="would not end"):
        run.close(3)
    assert finished == [3]


def test_a_run_that_cannot_be_built_leaves_no_process_behind(
    tmp_path: Path, tiny_qwen2_5_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise UserError("no engine today")

    monkeypatch.setattr(run_module, "make_engine", broken)
    with pytest.raises(UserError, match="no engine today"):
        built(tmp_path, tiny_qwen2_5_vl)


def test_validation_alone_needs_no_training_data(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    only = {"trainer.val_only": "true", "data.train_files": "/gone/train.parquet"}
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **only))
    assert done.returncode == 0, done.stderr
    [line] = lines(tmp_path / "run" / "val_only" / "metrics.jsonl")
    assert (line["step"], line["val/rows"]) == (0, 5.0)
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_validation_alone_changes_nothing_of_the_run_it_evaluates(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    changes = {
        "trainer.val_only": "true",
        "data.train_files": "",
        "trainer.save_limit": 1,
        "trainer.load_checkpoint_path": copy / "run" / "global_step_6",
    }
    done = seerl("train", *arguments(copy, tiny_qwen2_5_vl, **changes))
    assert done.returncode == 0, done.stderr
    [line] = lines(copy / "run" / "val_only" / "metrics.jsonl")
    [after] = [
        x for x in lines(copy / "run" / "metrics.jsonl") if x.get("val/reward_score") and x["step"] == 6
    ]
    assert (line["step"], line["val/reward_score"]) == (6, pytest.approx(after["val/reward_score"]))
    shutil.rmtree(copy / "run" / "val_only")
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_validation_that_was_interrupted_is_made_up(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    """As killed in the validation of step 4: saved, and the tracker knows of that of step 2 alone."""
    run = Path(shutil.copytree(finished, tmp_path / "copy")) / "run"
    shutil.rmtree(run / "global_step_6")
    score = {"last_global_step": 4, "last_validated_step": 2, "best_global_step": 2, "best_score": -1.0}
    (run / "checkpoint_tracker.json").write_text(json.dumps(score))
    settings = {"trainer.max_steps": 5, "trainer.val_freq": 2}
    done = seerl("train", *arguments(tmp_path / "copy", tiny_qwen2_5_vl, **settings))
    assert done.returncode == 0, done.stderr
    again = lines(run / "metrics.jsonl")
    again = again[next(i for i, line in enumerate(again) if "resumed_from" in line) + 1 :]
    assert [(x["step"], "val/rows" in x) for x in again] == [(4, True), (5, False), (5, True)]
    tracker = json.loads((run / "checkpoint_tracker.json").read_text())
    assert (tracker["last_validated_step"], tracker["last_global_step"]) == (5, 5)
    assert tracker["best_global_step"] in (4, 5)


def test_on_policy_steps_stay_so_with_the_kl_in_the_reward(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    """And the adaptive coefficient moves, as its controller says, also where it has been taken far down."""
    changes = {
        "algorithm.disable_kl": "false",
        "algorithm.use_kl_loss": "false",
        "algorithm.kl_coef": 0.1,
        "algorithm.kl_type": "adaptive",
        "algorithm.kl_target": 1000.0,
        "algorithm.kl_horizon": 4.0,  # 16 responses a step: each takes four fifths off
    }
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **changes))
    assert done.returncode == 0, done.stderr
    logged = metrics(tmp_path / "run")
    assert [logged[s]["actor/ppo_kl"] for s in range(1, 5)] == [0.0] * 4
    assert [logged[s]["critic/kl_coef"] for s in range(1, 5)] == pytest.approx([0.1, 0.02, 0.004, 0.0008])
    assert logged[1]["critic/kl"] == pytest.approx(0.0, abs=1e-5)
    assert logged[4]["critic/kl"] != 0.0


def test_gdpo_learns_from_each_reward_of_a_list(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    """The second reward is a thousand times larger: in the sum it would drown the first."""
    tmp_path.joinpath("two.py").write_text(
        "def first(reward_input):\n    return {'overall': float('e' in reward_input['response'])}\n"
        "def second(reward_input):\n    return {'overall': 1000.0 * reward_input['response_length']}\n"
        "first.REWARD_TYPE = second.REWARD_TYPE = 'sequential'\nREWARD_TYPE = 'sequential'\n"
    )
    norms = []
    for weight in (0.0, 1.0):
        folder = tmp_path / str(weight)
        folder.mkdir()
        first = f"{{function: '{tmp_path}/two.py:first', weight: {weight}}}"
        rewards = f"[{first}, {{function: '{tmp_path}/two.py:second'}}]"
        changes = {
            "algorithm.adv_estimator": "gdpo",
            "worker.reward.reward_function": rewards,
            "trainer.max_steps": 1,
            "data.val_files": "",
        }
        done = seerl("train", *arguments(folder, tiny_qwen2_5_vl, **changes))
        assert done.returncode == 0, done.stderr
        [step] = metrics(folder / "run").values()
        assert {"reward/first", "reward/second"} <= step.keys()
        norms.append(step["actor/grad_norm"])
    assert norms[1] != pytest.approx(norms[0], rel=0.01)


@pytest.mark.parametrize("found", ["true", "false"])
def test_the_last_words_say_what_really_resumes(tmp_path: Path, tiny_qwen2_5_vl: Path, found: str) -> None:
    changes = {"trainer.max_steps": 500, "trainer.find_last_checkpoint": found, "data.val_files": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "seerl.cli", "train", *arguments(tmp_path, tiny_qwen2_5_vl, **changes)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(tmp_path / "run", 1, process)  # type: ignore[arg-type]
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert ("The same command resumes." in stderr) == (found == "true")
    assert (f"trainer.load_checkpoint_path={tmp_path}/run/global_step_" in stderr) == (found == "false")


def test_pages_that_processes_share_count_once() -> None:
    program = """
import os, time, torch
from seerl.metrics import memory_metrics
block = b"x" * 300_000_000
used = lambda: memory_metrics(torch.device("cpu"))["perf/cpu_memory_used_gb"] * 2**30 / 1e6
alone = used()
child = os.fork()
if child == 0:
    time.sleep(60)
print(alone, used() - alone)
os.kill(child, 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    alone, more = map(float, done.stdout.split())
    assert alone > 300
    assert abs(more) < 50


def started(folder: Path, model: Path, **changes: object) -> subprocess.Popen[str]:
    """A long run, in its second step or later."""
    changes = {"trainer.max_steps": 5000, "data.val_files": "", **changes}
    process = subprocess.Popen(
        [sys.executable, "-m", "seerl.cli", "train", *arguments(folder, model, **changes)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(folder / "run", 1, process)  # type: ignore[arg-type]
    return process


def test_no_worker_outlives_a_trainer_that_is_killed(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    process = started(tmp_path, tiny_qwen2_5_vl)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.communicate(timeout=30)
    left = psutil.wait_procs(workers, timeout=15)[1]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_second_interrupt_ends_at_once_without_a_trace(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    process = started(tmp_path, tiny_qwen2_5_vl)
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    said = next(line for line in iter(process.stderr.readline, "") if "Stopping" in line)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said + rest
