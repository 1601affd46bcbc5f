"""A whole training step beside TRL's GRPOTrainer: same model, prompts, samples and lengths, alternating in
one run.

    pip install trl==1.16.0
    python -m benchmarks.step_beside_trl [--rounds 3] [--steps 6] [--prompts 16] [--n 8] [--tokens 16]

Both sample with transformers from a Qwen2.5-VL of two million parameters on pictures of 84x84 (fp32, CPU),
every answer exactly TOKENS long, score answers with a trivial function, take one on-policy optimizer step
without KL. A step's time is from one step's end to the next; the first step of each round is left out. Prints
a table, writes JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from examples.quickstart.make_base import response
from examples.quickstart.tiny_model import make_model, make_tokenizer, save
from examples.quickstart.warm_up import read_rows
from seerl.config import load_config
from seerl.data.synthetic import write_data

RESULTS = Path(__file__).parent / "results"
REWARD = """
def main(reward_inputs):
    return [
        {"overall": float(item["response_length"] % 3 == 0) + item["response"].count("e")}
        for item in reward_inputs
    ]
"""


def seerl_round(folder: Path, model: Path, options: argparse.Namespace) -> list[float]:
    """Seconds of each step but the first."""
    from seerl.run import build_run
    from seerl.trainer import Trainer

    (folder / "reward.py").write_text(REWARD)
    samples = options.prompts * options.n
    loaded = load_config(
        [
            f"data.train_files={folder.parent / 'data' / 'train.parquet'}",
            "data.prompt_key=problem",
            "data.max_prompt_length=128",
            f"data.max_response_length={options.tokens}",
            f"data.rollout_batch_size={options.prompts}",
            "data.min_pixels=null",
            "data.max_pixels=null",
            "algorithm.disable_kl=true",
            f"worker.actor.global_batch_size={options.prompts}",
            f"worker.actor.micro_batch_size_per_device_for_update={samples}",
            "worker.actor.max_tokens_per_device=2500",
            f"worker.actor.model.model_path={model}",
            "worker.actor.model.enable_gradient_checkpointing=false",
            "worker.actor.fsdp.mp_param_dtype=fp32",
            "worker.rollout.name=transformers",
            "worker.rollout.dtype=fp32",
            "worker.rollout.ignore_eos=true",
            f"worker.rollout.n={options.n}",
            f"worker.reward.reward_function={folder / 'reward.py'}",
            "worker.reward.num_workers=1",
            f"trainer.max_steps={options.steps + 1}",
            "trainer.logger=['file']",
            "trainer.n_gpus_per_node=0",
            f"trainer.save_checkpoint_path={folder / 'run'}",
        ]
    )
    run, _ = build_run(loaded.config)
    ends: list[float] = []
    log = run.trackers.log

    def noting(metrics: Any, step: int) -> None:
        ends.append(time.perf_counter())
        log(metrics, step)

    run.trackers.log = noting  # type: ignore[method-assign]
    asyncio.run(Trainer(run).train())
    run.close(0)
    return [b - a for a, b in pairwise(ends)]


def trl_round(folder: Path, model: Path, options: argparse.Namespace) -> list[float]:
    """Seconds of each step but the first."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = datasets.load_dataset(
        "parquet", data_files=str(folder.parent / "data" / "train.parquet"), split="train"
    )

    def conversation(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": row["problem"].replace("<image>", "")}],
            "image": row["images"][0],
        }

    rows = rows.select(range(options.prompts * (options.steps + 2))).map(
        conversation, remove_columns=rows.column_names
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            float(len(ids) % 3 == 0) + str(c[0]["content"] if isinstance(c, list) else c).count("e")
            for c, ids in zip(completions, completion_ids, strict=True)
        ]

    samples = options.prompts * options.n
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_generations=options.n,
        max_completion_length=options.tokens,
        generation_kwargs={"min_new_tokens": options.tokens},
        max_steps=options.steps + 1,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(model), reward_funcs=reward, args=config, train_dataset=rows, callbacks=[Clock()]
    )
    trainer.train()
    return [b - a for a, b in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rounds", 3), ("steps", 6), ("prompts", 16), ("n", 8), ("tokens", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"seerl": [], "trl": []}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        write_data(base / "data", train_rows=options.prompts * (options.steps + 4), validation_rows=4)
        rows = read_rows(base / "data" / "train.parquet")
        tokenizer = make_tokenizer(
            [text for row in rows for text in (row["problem"], response(row["problem"], row["answer"]))]
        )
        model = save(base / "model", make_model(tokenizer), tokenizer)
        for number in range(options.rounds):
            for name, measure in (("trl", trl_round), ("seerl", seerl_round)):
                folder = base / f"{name}{number}"
                folder.mkdir()
                seconds[name] += measure(folder, model, options)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "command": f"python -m benchmarks.step_beside_trl --rounds {options.rounds} --steps {options.steps} "
        f"--prompts {options.prompts} --n {options.n} --tokens {options.tokens}",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "samples": options.prompts * options.n,
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": medians["seerl"] / medians["trl"],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "step_beside_trl.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'':8} {'median':>8} {'min':>8} {'max':>8}  s/step")
    for name, values in seconds.items():
        print(f"{name:8} {medians[name]:8.3f} {min(values):8.3f} {max(values):8.3f}")
    print(f"ratio    {result['ratio']:8.2f}")


if __name__ == "__main__":
    main()
