"""A run put together from its configuration: the one place that knows which parts there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from seerl.algorithms.kl import FixedController, kl_controller
from seerl.checkpoint.store import CheckpointStore, newest_checkpoint, read_trainer_state
from seerl.cluster.devices import local_device, peak_flops
from seerl.config import Config, changed_keys, dump_config
from seerl.data.loader import PromptLoader, ValidationSet
from seerl.data.prompts import load_processor
from seerl.errors import UserError
from seerl.models.families import DTYPES
from seerl.policy.loss import loss_settings
from seerl.policy.policy import Policy
from seerl.policy.reference import Reference
from seerl.reward.scorer import Scorer
from seerl.rollout.build import chosen_engine, make_engine
from seerl.rollout.engine import RolloutEngine, Sampling
from seerl.tracking import Trackers, make_trackers

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts that the trainer moves data between."""

    config: Config
    device: torch.device
    peak_flops: float
    """Operations per second that the device can do at most in the type that the policy computes in."""
    loader: PromptLoader | None
    """None where nothing is trained (`trainer.val_only`)."""
    validation_set: ValidationSet | None
    policy: Policy
    reference: Reference | None
    engine: RolloutEngine
    scorer: Scorer
    kl: FixedController
    checkpoints: CheckpointStore
    trackers: Trackers
    decode: Callable[[Sequence[int], bool], str]
    total_steps: int
    opened: ExitStack = field(default_factory=ExitStack)
    """Ends what runs beside this process's own work: engines and workers."""

    @property
    def off_policy(self) -> bool:
        """Whether a step's later optimizer steps train on answers of earlier weights."""
        actor = self.config.worker.actor
        return actor.ppo_epochs > 1 or actor.global_batch_size < self.config.data.rollout_batch_size

    def sampling(self, step: int) -> Sampling:
        """How the answers of one training step are drawn; every step has its own seed."""
        rollout = self.config.worker.rollout
        return Sampling(
            n=rollout.n,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=self.config.data.max_response_length,
            seed=rollout.seed * 1_000_003 + step,
            ignore_eos=rollout.ignore_eos,
        )

    @property
    def validation_sampling(self) -> Sampling:
        """How validation answers are drawn: as in training but once, with `val_override_config` on top."""
        rollout = self.config.worker.rollout
        settings = {
            "n": 1,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": self.config.data.max_response_length,
            "seed": rollout.seed,
            "ignore_eos": rollout.ignore_eos,
            **rollout.val_override_config,
        }
        return Sampling(**settings)

    def close(self, exit_code: int) -> None:
        """Ends engines, workers and trackers; what one of them raises keeps none of the others open."""
        with ExitStack() as ending:
            ending.callback(self.trackers.finish, exit_code)
            ending.push(self.opened)


def build_run(config: Config) -> tuple[Run, Path | None]:
    """Builds every part, slow ones after the checks that can fail fast; also the checkpoint to resume from.

    Data workers are forked before the model takes memory and threads, at the place in the data where the run
    goes on.

    Raises:
        UserError: whatever of the configuration does not fit this machine, the model or the data.
    """
    with ExitStack() as opened:
        run, checkpoint = _build(config, opened)
        run.opened = opened.pop_all()
    return run, checkpoint


def _build(config: Config, opened: ExitStack) -> tuple[Run, Path | None]:
    device = local_device(config.trainer.n_gpus_per_node)
    folder = _run_folder(config)
    checkpoint = _checkpoint_to_resume(config, folder)
    state = read_trainer_state(checkpoint) if checkpoint else {}
    processor, tokenizer = load_processor(config.worker.actor.model)
    engine_name = chosen_engine(config.worker.rollout)
    loader = validation_set = None
    if not config.trainer.val_only:
        loader = PromptLoader(config.data, processor=processor, tokenizer=tokenizer, run_folder=folder)
        if state and not state["model_only"]:
            loader.load_state_dict(state["data"])
    if config.data.val_files:
        validation_set = ValidationSet(
            config.data,
            processor=processor,
            tokenizer=tokenizer,
            with_features=engine_name == "transformers",
            run_folder=folder,
        )
    for rows in (loader, validation_set):
        if rows is not None:
            opened.callback(rows.close)
            rows.start()

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    scorer = Scorer(config.worker.reward, decode)
    opened.callback(scorer.close)
    total_steps = planned_steps(config, loader.steps_per_epoch if loader else 0)
    policy, reference = _build_models(config, device, len(tokenizer), total_steps)
    engine = make_engine(
        config,
        engine_name,
        module=policy.module,
        device=device,
        max_images=max((rows.max_images for rows in (loader, validation_set) if rows is not None), default=0),
        end_token_ids=end_token_ids(config, policy.module, tokenizer),
        banned_token_ids=policy.banned,
    )
    opened.callback(engine.close)

    def write_model_files(target: Path) -> None:
        policy.module.config.save_pretrained(target)  # type: ignore[union-attr, operator]
        if policy.module.can_generate():  # type: ignore[operator]
            # Written as it is: save_pretrained refuses what models may come with (top_p without sampling).
            generation: GenerationConfig = policy.module.generation_config  # type: ignore[assignment]
            (target / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
        (processor or tokenizer).save_pretrained(target)

    run = Run(
        config=config,
        device=device,
        peak_flops=peak_flops(device, DTYPES[config.worker.actor.fsdp.mp_param_dtype]),
        loader=loader,
        validation_set=validation_set,
        policy=policy,
        reference=reference,
        engine=engine,
        scorer=scorer,
        kl=kl_controller(
            config.algorithm.kl_type,
            coef=config.algorithm.kl_coef,
            target=config.algorithm.kl_target,
            horizon=config.algorithm.kl_horizon,
        ),
        checkpoints=CheckpointStore(
            folder,
            limit=config.trainer.save_limit,
            write_model_files=write_model_files,
            config_yaml=dump_config(config),
        ),
        trackers=_start_trackers(config, folder, total_steps, checkpoint, state),
        decode=decode,
        total_steps=total_steps,
    )
    return run, checkpoint


def _start_trackers(
    config: Config, folder: Path, total_steps: int, checkpoint: Path | None, state: dict[str, Any]
) -> Trackers:
    # A checkpoint of another run's folder is where this one starts from; its tracked runs stay its own.
    own = checkpoint is not None and checkpoint.parent.resolve() == folder.resolve()
    # What is only evaluated has figures of its own: those of the training are not continued by it.
    alone = "val_only" if config.trainer.val_only else ""
    return make_trackers(
        list(config.trainer.logger),
        project=config.trainer.project_name,
        experiment="-".join(filter(None, (config.trainer.experiment_name, alone))),
        run_dir=folder / alone,
        config=config.model_dump(mode="json"),
        total_steps=total_steps,
        start_step=0 if alone else int(state.get("step", 0)),
        run_ids=state.get("trackers") if own and not alone else None,
    )


def planned_steps(config: Config, steps_per_epoch: int) -> int:
    """Training steps of the whole run: `max_steps` if set, else `total_epochs` passes over the data."""
    return config.trainer.max_steps or config.trainer.total_epochs * steps_per_epoch


def _build_models(
    config: Config, device: torch.device, vocabulary: int, total_steps: int
) -> tuple[Policy, Reference | None]:
    actor, data, temperature = config.worker.actor, config.data, config.worker.rollout.temperature
    batches = -(-data.rollout_batch_size // actor.global_batch_size)
    policy = Policy(
        actor,
        loss_settings(actor, config.algorithm, data.max_response_length),
        device=device,
        vocabulary=vocabulary,
        temperature=temperature,
        total_optimizer_steps=total_steps * batches * actor.ppo_epochs,
        sequence_length=data.max_prompt_length + data.max_response_length,
    )
    if config.algorithm.disable_kl or config.algorithm.kl_coef == 0 or config.trainer.val_only:
        return policy, None
    reference = Reference(
        actor,
        config.worker.ref,
        device=device,
        banned=policy.banned,
        temperature=temperature,
        limit=policy.experience_limit,
    )
    return policy, reference


def end_token_ids(config: Config, module: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends an answer: those of the generation configuration and the tokenizer's own."""
    generation: GenerationConfig | None = getattr(module, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    ends = {ids} if isinstance(ids, int) else set(ids or [])
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    if not ends and not config.worker.rollout.ignore_eos:
        raise UserError(
            "neither the model's generation_config.json nor its tokenizer names an end-of-sequence token, so "
            "no answer would ever end; add eos_token_id there, or set worker.rollout.ignore_eos=true"
        )
    return sorted(ends)


def _run_folder(config: Config) -> Path:
    folder = Path(config.trainer.save_checkpoint_path or "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"trainer.save_checkpoint_path={folder} cannot be made: {error.strerror}; give another folder"
        ) from error
    return folder


def _checkpoint_to_resume(config: Config, folder: Path) -> Path | None:
    """The checkpoint the configuration names, else the run's own last one if it is to be found."""
    if config.trainer.load_checkpoint_path:
        path = Path(config.trainer.load_checkpoint_path)
    else:
        newest = newest_checkpoint(folder) if config.trainer.find_last_checkpoint else None
        if newest is None:
            return None
        path = newest
    read_trainer_state(path)
    _say_what_changed(config, path)
    return path


def _say_what_changed(config: Config, checkpoint: Path) -> None:
    try:
        changed = changed_keys(config, (checkpoint / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError):  # it is there for people, and nothing depends on it
        return
    if changed:
        log.info("%s was saved with another configuration:\n  %s", checkpoint, "\n  ".join(changed))
