"""The configurations of EasyR1's example scripts, as their users have them, pass `seerl check` unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from seerl.config import check_config, load_config
from seerl.reward.loading import check_reward

ROOT = Path(__file__).parent.parent

GEO = ["data.train_files=hiyouga/geometry3k@train", "data.val_files=hiyouga/geometry3k@test"]
BF16 = ["worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16"]

SCRIPTS = {
    "qwen2_5_7b_math_grpo": ["worker.actor.model.model_path=Qwen/Qwen2.5-7B-Instruct"],
    "qwen3_4b_math_grpo": ["data.max_response_length=4096", "worker.actor.model.model_path=Qwen/Qwen3-4B"],
    "qwen3_4b_math_grpo_lora": [
        "data.max_response_length=2048",
        "worker.actor.model.model_path=Qwen/Qwen3-4B",
        "worker.actor.model.lora.rank=64",
        "worker.actor.model.lora.alpha=64",
        "worker.actor.optim.lr=1e-5",
        "worker.rollout.tensor_parallel_size=1",
        "trainer.n_gpus_per_node=1",
    ],
    "qwen2_5_vl_3b_geo3k_grpo": [
        *GEO,
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct",
        "trainer.n_gpus_per_node=2",
    ],
    "qwen2_5_vl_7b_geo3k_cispo": [
        *GEO,
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct",
        "worker.actor.loss_type=cispo",
        "trainer.n_gpus_per_node=8",
    ],
    "qwen2_5_vl_32b_geo3k_grpo": [
        *GEO,
        *BF16,
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-32B-Instruct",
        "worker.rollout.tensor_parallel_size=8",
        "trainer.n_gpus_per_node=8",
    ],
    "qwen3_vl_30b_geo3k_grpo": [
        *GEO,
        *BF16,
        "worker.actor.model.model_path=Qwen/Qwen3-VL-30B-A3B-Instruct",
        "worker.rollout.tensor_parallel_size=8",
        "trainer.n_gpus_per_node=8",
    ],
    "glm4_1v_9b_thinking_geo3k_grpo": [
        *GEO,
        "worker.actor.model.model_path=zai-org/GLM-4.1V-9B-Thinking",
        "worker.actor.padding_free=False",
        "trainer.n_gpus_per_node=8",
    ],
    "qwen3_14b_dapo17k_dapo": [
        "data.train_files=Saigyouji-Yuyuko1000/dapo17k@train",
        "data.val_files=Saigyouji-Yuyuko1000/dapo17k@test",
        "data.format_prompt=./examples/format_prompt/math.jinja",
        "data.max_prompt_length=2048",
        "data.max_response_length=20480",
        "data.rollout_batch_size=512",
        "data.mini_rollout_batch_size=1536",
        "worker.actor.micro_batch_size_per_device_for_update=1",
        "worker.actor.micro_batch_size_per_device_for_experience=8",
        "worker.actor.model.model_path=Qwen/Qwen3-14B-Base",
        *BF16,
        "worker.actor.optim.weight_decay=0.1",
        "worker.actor.optim.lr_warmup_steps=10",
        "worker.actor.global_batch_size=32",
        "worker.actor.clip_ratio_low=0.2",
        "worker.actor.clip_ratio_high=0.28",
        "worker.actor.clip_ratio_dual=10.0",
        "worker.rollout.n=16",
        "worker.rollout.max_num_batched_tokens=22528",
        'worker.rollout.val_override_config={"n":16,"temperature":1.0,"top_p":0.7}',
        "worker.rollout.gpu_memory_utilization=0.8",
        "worker.reward.reward_function=./examples/reward_function/dapo.py:compute_score",
        'worker.reward.reward_function_kwargs={"max_response_length":20480,"overlong_buffer_length":4096,'
        '"overlong_penalty_factor":1.0}',
        "algorithm.disable_kl=True",
        "algorithm.online_filtering=True",
        "algorithm.filter_key=accuracy_normalized",
        "algorithm.filter_low=0.01",
        "algorithm.filter_high=0.99",
        "trainer.total_epochs=10",
        "trainer.max_try_make_batch=10",
        "trainer.n_gpus_per_node=8",
    ],
    "qwen2_5_vl_3b_clevr": [
        "data.train_files=BUAADreamer/clevr_count_70k@train",
        "data.val_files=BUAADreamer/clevr_count_70k@test",
        "data.format_prompt=./examples/format_prompt/r1v.jinja",
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct",
        "worker.rollout.tensor_parallel_size=1",
        "worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score",
        "trainer.n_gpus_per_node=2",
    ],
    "qwen2_5_vl_7b_geo3k_reinforce": [
        *GEO,
        "data.format_prompt=./examples/format_prompt/math.jinja",
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_loss=false",
        "algorithm.kl_penalty=kl",
        "algorithm.kl_coef=1.0e-3",
        "trainer.n_gpus_per_node=8",
    ],
    "qwen2_5_vl_7b_geo3k_gspo": [
        *GEO,
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct",
        "worker.actor.loss_type=gspo_token",
        "worker.actor.loss_avg_mode=seq",
        "worker.actor.clip_ratio_low=3e-4",
        "worker.actor.clip_ratio_high=4e-4",
        "trainer.n_gpus_per_node=8",
    ],
    "qwen2_5_vl_7b_geo3k_dapo": [
        *GEO,
        "data.mini_rollout_batch_size=128",
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct",
        "worker.actor.clip_ratio_low=0.2",
        "worker.actor.clip_ratio_high=0.28",
        "algorithm.disable_kl=True",
        "algorithm.online_filtering=True",
        "trainer.n_gpus_per_node=8",
    ],
    "qwen2_5_vl_7b_multi_image": [
        "data.train_files=hiyouga/journeybench-multi-image-vqa@train",
        "data.val_files=hiyouga/journeybench-multi-image-vqa@test",
        "data.rollout_batch_size=256",
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct",
        "worker.rollout.limit_images=2",
        "trainer.n_gpus_per_node=8",
    ],
    "videos": [
        "data.video_key=videos",
        "data.video_fps=0.25",
        "data.format_prompt=",
        'data.image_dir=""',
        "data.max_pixels=262144",
        "data.max_prompt_length=16384",
        "worker.rollout.max_num_batched_tokens=24576",
        "worker.actor.model.freeze_vision_tower=true",
        "worker.actor.model.model_path=Qwen/Qwen3-VL-4B-Instruct",
        "trainer.logger=[file,wandb]",
        "trainer.n_gpus_per_node=2",
    ],
    "sampling of validation by dotted keys": [
        "worker.actor.model.model_path=Qwen/Qwen3-VL-8B-Instruct",
        "worker.rollout.val_override_config.max_tokens=6144",
        "worker.rollout.val_override_config.temperature=0.0",
        "worker.actor.model.lora.target_modules=all-linear",
        "worker.actor.model.lora.exclude_modules=.*visual.*",
        "trainer.n_gpus_per_node=8",
    ],
    "two machines": [
        "worker.actor.model.model_path=Qwen/Qwen3-4B",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "trainer.save_checkpoint_path=./checkpoints/math",
    ],
    "earlier keys on the command line": [
        "worker.actor.ulysses_sequence_parallel_size=1",
        "worker.reward.reward_type=batch",
        "worker.reward.score_function=./examples/reward_function/math.py:compute_score",
        "worker.reward.val_reward_function=null",
        "trainer.total_episodes=15",
        "trainer.logger=['console','swanlab']",
    ],
}

FIRST_RELEASE = """
data: {train_files: hiyouga/math12k@train, val_files: hiyouga/math12k@test, prompt_key: problem,
  rollout_batch_size: 512, max_prompt_length: 2048, max_response_length: 2048}
algorithm: {adv_estimator: grpo, kl_coef: 0.0}
worker:
  actor:
    global_batch_size: 128
    use_kl_loss: true
    kl_loss_coef: 1.0e-3
    kl_loss_type: low_var_kl
    model: {model_path: Qwen/Qwen2.5-7B-Instruct}
    offload: {param_offload: true, optimizer_offload: true}
  rollout: {tensor_parallel_size: 2, gpu_memory_utilization: 0.7, n: 5, enable_chunked_prefill: true}
  ref: {offload: {param_offload: true}}
  reward: {compute_score: math}
trainer: {total_episodes: 15, logger: [console, wandb], n_gpus_per_node: 8, nnodes: 1, save_freq: 5,
  test_freq: 5}
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_script_passes_the_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    args = ["config=examples/config.yaml", *SCRIPTS[name], f"trainer.experiment_name={name}"]
    loaded = load_config(args)
    assert check_config(loaded.config, here=False, extra_checks=[]).errors == []
    assert len(loaded.notes) == sum("earlier" in name for _ in range(5))


@pytest.mark.parametrize("name", ["qwen3_14b_dapo17k_dapo", "qwen2_5_vl_3b_clevr"])
def test_the_reward_of_a_script_takes_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(["config=examples/config.yaml", *SCRIPTS[name]]).config
    assert check_reward(config) == []


def test_a_configuration_of_the_first_release_means_what_it_meant(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(FIRST_RELEASE)
    loaded = load_config([f"config={path}"])
    config = loaded.config
    assert check_config(config, here=False, extra_checks=[]).errors == []
    assert (config.algorithm.use_kl_loss, config.algorithm.kl_coef) == (True, 1e-3)
    assert config.algorithm.kl_penalty == "low_var_kl"
    assert config.worker.actor.offload.offload_optimizer
    assert config.worker.ref.offload.offload_params
    assert config.worker.reward.reward_function == "math"
    assert (config.trainer.total_epochs, config.trainer.val_freq) == (15, 5)
    assert len(loaded.notes) == 9


def test_keys_of_old_sections_are_read_as_they_are_called_now() -> None:
    loaded = load_config(
        [
            "worker.actor.optim.warmup_style=cosine",
            "worker.actor.optim.lr_warmup_steps_ratio=0.1",
            "worker.critic.offload.param_offload=true",
            "worker.critic.loss_avg_mode=seq",
            "worker.rollout.max_num_seqs=1024",
            "worker.rollout.free_cache_engine=false",
            "worker.actor.fsdp.mp_param_dtype=bfloat16",
            "worker.ref.fsdp.torch_dtype=float16",
        ]
    )
    worker = loaded.config.worker
    assert (worker.actor.optim.lr_scheduler_type, worker.actor.optim.lr_warmup_ratio) == ("cosine", 0.1)
    assert worker.critic.offload.offload_params
    assert (worker.actor.fsdp.mp_param_dtype, worker.ref.fsdp.torch_dtype) == ("bf16", "fp16")
    assert len(loaded.notes) == 5
