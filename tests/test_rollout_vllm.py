"""vLLM beside a trainer: what it must refuse, and what it must leave alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seerl.config.schema import Config
from seerl.errors import UserError
from tests.runs import environment


def test_a_limit_below_the_datas_images_is_refused() -> None:
    from seerl.rollout.vllm_engine import engine_arguments

    config = Config.model_validate({"worker": {"rollout": {"limit_images": 1}}})
    with pytest.raises(UserError, match=r"limit_images=1.* 2 images"):
        engine_arguments(config, max_images=2, can_sleep=False)


SHARED_GROUP = """
import sys, torch
import torch.distributed as dist
from seerl.config.schema import Config
from seerl.rollout.vllm_engine import VllmEngine
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
config = Config.model_validate({
    "data": {"max_prompt_length": 64, "max_response_length": 8},
    "worker": {"actor": {"model": {"model_path": sys.argv[1]}}, "rollout": {"dtype": "fp32"}},
})
engine = VllmEngine(config, device=torch.device("cpu"), end_token_ids=[], banned_token_ids=[], max_images=0)
engine.close()
ones = torch.ones(2)
dist.all_reduce(ones)
print("the group lives")
"""


def test_vllm_leaves_the_trainers_process_group_alive(tiny_qwen2_5_vl: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARED_GROUP, str(tiny_qwen2_5_vl), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert "the group lives" in done.stdout, done.stderr[-2000:]
