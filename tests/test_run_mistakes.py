"""What a user gets wrong, or was damaged on the way: one message, exit code 2, nothing half-written."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from seerl.config.schema import FsdpConfig, ModelConfig
from seerl.errors import UserError
from seerl.policy.model import load_model
from tests.runs import ROOT, arguments, environment, seerl, write_rows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data.train_files": "nowhere.parquet"}, ["nowhere.parquet"]),
        ({"data.prompt_key": "question"}, ["question", "problem", "answer", "images"]),
        (
            {"worker.actor.global_batch_size": 3},
            ["worker.actor.global_batch_size", "data.rollout_batch_size", "2", "4"],
        ),
        ({"worker.rollout.n": 1}, ["worker.rollout.n", "grpo"]),
        ({"trainer.n_nodes": 2}, ["trainer.nnodes"]),
        ({"trainer.n_gpus_per_node": 4}, ["trainer.n_gpus_per_node", "0 GPU"]),
        ({"data.rollout_batch_size": 400, "worker.actor.global_batch_size": 400}, ["400", "20"]),
        ({"worker.actor.model.model_path": "/nowhere/model"}, ["/nowhere/model"]),
        ({"trainer.load_checkpoint_path": "/nowhere/global_step_7"}, ["/nowhere/global_step_7"]),
        ({"algorithm.filter_key": "beauty", "algorithm.online_filtering": "true"}, ["beauty", "accuracy"]),
    ],
)
def test_a_mistake_is_one_clear_message_and_exit_code_2(
    tmp_path: Path, tiny_qwen2_5_vl: Path, change: dict[str, object], said: list[str]
) -> None:
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **change))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr, done.stderr


def test_a_model_folder_without_weights_is_refused(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_qwen2_5_vl, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    done = seerl("train", *arguments(tmp_path, bare))
    assert done.returncode == 2
    assert "no weights" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reward_file_with_a_syntax_error_is_refused_with_its_line(
    tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def main(reward_inputs)\n    return []\n")
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **{"worker.reward.reward_function": broken}))
    assert done.returncode == 2
    assert "broken.py" in done.stderr
    assert "Traceback" not in done.stderr


def copied(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model"))


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_damaged_files_of_the_model_are_named(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    for name in ("model.safetensors", "generation_config.json"):
        folder = tmp_path / name
        folder.mkdir()
        model = copied(tiny_qwen2_5_vl, folder)
        half(model / name)
        refused(seerl("train", *arguments(folder, model)), "damaged", str(model))


@pytest.mark.parametrize("content", ["[]", "null", '{"eos_token_id": "abc"}', '{"eos_token_id": {"a": 1}}'])
def test_generation_settings_of_a_wrong_form_are_named(
    tmp_path: Path, tiny_qwen2_5_vl: Path, content: str
) -> None:
    model = copied(tiny_qwen2_5_vl, tmp_path)
    (model / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json is damaged"):
        load_model(ModelConfig(model_path=str(model)), FsdpConfig(), torch.device("cpu"))


def test_damaged_data_files_are_named(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    arguments(tmp_path, tiny_qwen2_5_vl)
    cut = write_rows(tmp_path / "cut.parquet", 20)
    half(cut)
    (tmp_path / "latin.jsonl").write_bytes('{"problem": "caf\u00e9", "answer": "1"}\n'.encode("latin-1") * 9)
    (tmp_path / "line.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 5 + '{"problem": "2\n')
    for name in ("cut.parquet", "latin.jsonl", "line.jsonl"):
        change = {"data.train_files": tmp_path / name}
        done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **change))
        refused(done, name, "its text is not UTF-8" if name == "latin.jsonl" else "cannot be read as")


def test_a_validation_set_without_a_usable_row_says_why(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    rows = '{"problem": "<image>?", "answer": "1", "images": ["gone.png"]}\n'
    (tmp_path / "bad.jsonl").write_text(rows * 3)
    change = {"data.val_files": tmp_path / "bad.jsonl"}
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **change))
    refused(done, "data.val_files", "gone.png does not exist")
    assert not list((tmp_path / "run").glob("*global_step_*"))


def refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr, done.stderr


def test_ctrl_c_while_a_run_starts_ends_it_without_a_trace(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    change = {"worker.reward.reward_function": f"{tmp_path}/slow.py:main"}
    process = subprocess.Popen(
        [sys.executable, "-m", "seerl.cli", "train", *arguments(tmp_path, tiny_qwen2_5_vl, **change)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("importing" in line for line in lines)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - started < 20
    assert "nothing was saved" in output
    assert "Traceback" not in output
