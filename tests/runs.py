"""Small real runs for tests: a data set of pictures, a reward file, and the command line that trains on
them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets

from tests.groups import picture

ROOT = Path(__file__).parent.parent

REWARD = '''
def main(reward_inputs):
    """Likes the letter e: something a random model does now and then."""
    out = []
    for item in reward_inputs:
        hit = float("e" in item["response"])
        out.append({"overall": hit + 0.01 * item["response_length"], "accuracy": hit})
    return out
'''


def write_rows(path: Path, rows: int, *, first: int = 0) -> Path:
    """Parquet in geometry3k's columns; every fourth row has no image, every fifth two."""
    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    made: list[dict[str, Any]] = []
    for number in range(first, first + rows):
        count = 0 if number % 4 == 3 else 2 if number % 5 == 4 else 1
        images = []
        for place in range(count):
            encoded = io.BytesIO()
            picture(100 * number + place).save(encoded, "PNG")
            images.append({"bytes": encoded.getvalue(), "path": None})
        made.append(
            {"images": images, "problem": "<image>" * count + f"How many shapes? {number}", "answer": "3"}
        )
    datasets.Dataset.from_list(made, features=features).to_parquet(str(path))
    return path


def arguments(folder: Path, model: Path, **overrides: object) -> list[str]:
    """The command line of a run of 4 prompts x 4 responses a step, saved under `folder`."""
    if not (folder / "train.parquet").exists():
        write_rows(folder / "train.parquet", 20)
        write_rows(folder / "val.parquet", 5, first=1000)
        (folder / "reward.py").write_text(REWARD)
    values: dict[str, object] = {
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "val.parquet",
        "data.prompt_key": "problem",
        "data.max_prompt_length": 96,
        "data.max_response_length": 8,
        "data.rollout_batch_size": 4,
        "data.min_pixels": "null",
        "data.max_pixels": "null",
        "algorithm.disable_kl": "true",
        "worker.actor.global_batch_size": 4,
        "worker.actor.model.model_path": model,
        "worker.actor.model.enable_gradient_checkpointing": "false",
        "worker.actor.optim.lr": "1e-3",
        "worker.actor.fsdp.mp_param_dtype": "fp32",
        "worker.rollout.name": "transformers",
        "worker.rollout.n": 4,
        "worker.rollout.dtype": "fp32",
        "worker.reward.reward_function": f"{folder / 'reward.py'}:main",
        "worker.reward.num_workers": 1,
        "trainer.max_steps": 4,
        "trainer.logger": "['console','file']",
        "trainer.save_checkpoint_path": folder / "run",
        **overrides,
    }
    return [f"{key}={value}" for key, value in values.items()]


def seerl(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would; the caller looks at the exit code and the output."""
    return subprocess.run(
        [sys.executable, "-m", "seerl.cli", *args],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=240,
        **kwargs,
    )


def environment() -> dict[str, str]:
    """One torch thread: tests share the machine, and sums come out the same every time."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """The training steps in a run's metrics.jsonl; of a step that stands twice the later line counts."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "actor/pg_loss" in line}
