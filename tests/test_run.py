"""Whole runs as a user starts them: they learn, resume exactly, stop when told, and say what is wrong."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import ROOT, arguments, environment, metrics, seerl

SAME = (
    "actor/pg_loss",
    "actor/grad_norm",
    "reward/overall",
    "actor/entropy_loss",
    "actor/lr",
    "response_length/mean",
)


def test_a_run_logs_every_step_and_leaves_checkpoints(finished: Path) -> None:
    run = finished / "run"
    logged = metrics(run)
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    for name in (
        "actor/pg_loss",
        "actor/entropy_loss",
        "actor/pg_clipfrac_higher",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/grad_norm",
        "actor/lr",
        "critic/score/mean",
        "critic/rewards/max",
        "critic/advantages/min",
        "critic/returns/mean",
        "response_length/clip_ratio",
        "prompt_length/mean",
        "reward/accuracy",
        "timing_s/gen",
        "timing_s/reward",
        "timing_s/update_actor",
        "timing_s/sync",
        "timing_s/step",
        "timing_per_token_ms/gen",
        "perf/throughput",
        "perf/total_num_tokens",
        "perf/cpu_memory_used_gb",
        "rollout/logprob_diff_max",
    ):
        assert name in logged[3], name
    assert all(0 < step["perf/mfu_actor"] < 1 for step in logged.values())
    assert sorted(p.name for p in run.glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
        "global_step_6",
    ]
    assert not list(run.glob(".*partial*"))
    assert json.loads((run / "checkpoint_tracker.json").read_text())["last_global_step"] == 6


def test_engine_and_trainer_agree_on_probabilities(finished: Path) -> None:
    assert all(step["rollout/logprob_diff_max"] < 1e-4 for step in metrics(finished / "run").values())
    assert all(step["actor/ppo_kl"] == 0 for step in metrics(finished / "run").values())


def test_killed_at_any_step_and_run_again_gives_the_same_later_steps(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    args = arguments(tmp_path, tiny_qwen2_5_vl, **{"trainer.max_steps": 6, "trainer.save_freq": 2})
    process = subprocess.Popen(
        [sys.executable, "-m", "seerl.cli", "train", *args],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    wait_for_step(tmp_path / "run", 3, process)
    process.kill()
    process.wait()
    again = seerl("train", *args)
    assert again.returncode == 0, again.stderr
    whole, resumed = metrics(finished / "run"), metrics(tmp_path / "run")
    for step in range(3, 7):
        for name in SAME:
            assert resumed[step][name] == pytest.approx(whole[step][name], rel=1e-6, abs=1e-9), (step, name)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if (run / "metrics.jsonl").exists() and step in metrics(run):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def test_ctrl_c_saves_says_where_and_exits_130(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    args = arguments(tmp_path, tiny_qwen2_5_vl, **{"trainer.max_steps": 500})
    process = subprocess.Popen(
        [sys.executable, "-m", "seerl.cli", "train", *args],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(tmp_path / "run", 2, process)  # type: ignore[arg-type]
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    saved = list((tmp_path / "run").glob("global_step_*"))
    assert len(saved) == 1
    assert str(saved[0]) in stderr
    assert "Traceback" not in stderr


def test_a_finished_run_started_again_trains_no_further(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    before = metrics(finished / "run")
    copy = shutil.copytree(finished, tmp_path / "copy")
    args = arguments(copy, tiny_qwen2_5_vl, **{"trainer.max_steps": 6, "trainer.save_freq": 2})
    assert seerl("train", *args).returncode == 0
    assert metrics(copy / "run") == before


def test_off_policy_steps_kl_loss_and_text_only_models_run(tmp_path: Path, tiny_qwen2: Path) -> None:
    args = arguments(
        tmp_path,
        tiny_qwen2,
        **{
            "trainer.max_steps": 2,
            "worker.actor.global_batch_size": 2,
            "worker.actor.ppo_epochs": 2,
            "algorithm.disable_kl": "false",
            "algorithm.use_kl_loss": "true",
            "algorithm.kl_penalty": "low_var_kl",
            "algorithm.kl_coef": 0.01,
            "data.val_files": '""',
        },
    )
    rows = tmp_path / "text.jsonl"
    rows.write_text(
        "\n".join(json.dumps({"problem": f"What is {i} + 1?", "answer": i + 1}) for i in range(12))
    )
    done = seerl("train", *args, f"data.train_files={rows}")
    assert done.returncode == 0, done.stderr
    logged = metrics(tmp_path / "run")
    assert logged[1]["actor/kl_loss"] >= 0
    assert logged[2]["actor/kl_loss"] > 0
    assert logged[1]["timing_s/old"] > 0
    assert logged[1]["timing_s/ref"] > 0
    assert abs(logged[2]["actor/ppo_kl"]) > 0


def test_the_command_that_easyr1_users_type_runs_seerl(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    args = arguments(
        tmp_path, tiny_qwen2_5_vl, **{"trainer.max_steps": 1, "trainer.val_before_train": "false"}
    )
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main", *args],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "this is SeeRL" in done.stderr
    assert sorted(metrics(tmp_path / "run")) == [1]


def test_vllm_trains_and_agrees_with_the_trainer_at_every_step(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    settings = {"worker.rollout.name": "vllm", "trainer.max_steps": 3}
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **settings))
    assert done.returncode == 0, done.stderr
    logged = metrics(tmp_path / "run")
    assert sorted(logged) == [1, 2, 3]
    assert all(step["rollout/logprob_diff_max"] < 1e-4 for step in logged.values())
