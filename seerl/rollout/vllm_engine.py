"""Sampling with vLLM in this process. The only file that knows vLLM; written for 0.26 to 0.33.

The engine loads the model as any vLLM would, for buffers that no weight update touches; the trainer's weights
are put in place before it is first asked. It shares the device with the policy and gives its memory back
while that trains (`sleep`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from seerl.config import Config
from seerl.config.frozen import thawed
from seerl.errors import UserError
from seerl.models.families import DTYPES
from seerl.rollout.engine import Sampled, Sampling
from seerl.types import Completion, Prompt

log = logging.getLogger(__name__)

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings speak of choices made here on purpose
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, on machines without a GPU
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads stay the trainer's
    "VLLM_NO_USAGE_STATS": "1",  # a training run reports to nobody unless asked
}
"""What vLLM reads from the environment, where the user has not set it."""


class VllmEngine:
    """A `RolloutEngine` around vLLM's LLMEngine.

    Args:
        config: `worker.rollout` and the lengths of `data` are used.
        device: where the policy is; vLLM takes the same.
        end_token_ids: every token that ends an answer.
        banned_token_ids: tokens never sampled.
        max_images: most images of a prompt, 0 for text alone.

    Raises:
        UserError: when vLLM cannot start as configured; its own reason is given.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device,
        end_token_ids: Sequence[int],
        banned_token_ids: Sequence[int],
        max_images: int,
    ) -> None:
        self._ends = list(end_token_ids)
        self._version = -1
        self._requests = 0
        self._can_sleep = device.type == "cuda"
        self._group_is_ours = not torch.distributed.is_initialized()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Not the user's to choose: weights move without pickling because the engine lives in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with _threads_kept():
            from vllm import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            self._engine: Any  # vLLM's types differ from release to release
            arguments = engine_arguments(config, max_images=max_images, can_sleep=self._can_sleep)
            try:
                self._engine = LLMEngine.from_engine_args(
                    EngineArgs(**arguments, logits_processors=[_banning(banned_token_ids)])
                )
            except (ValueError, RuntimeError) as error:
                reason = str(error).strip() or type(error).__name__
                raise UserError(
                    f"vLLM could not start: {reason}. The keys of worker.rollout (gpu_memory_utilization, "
                    "max_model_len, max_num_batched_tokens, dtype) set what it asks for, on the CPU also the "
                    "environment variable VLLM_CPU_KVCACHE_SPACE (GiB); worker.rollout.name=transformers "
                    "does without vLLM"
                ) from error

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Sampled]:
        """See `RolloutEngine.generate`. A prompt's n answers come together, its images are read once for
        all.

        Raises:
            RuntimeError: when vLLM makes other tokens of a prompt and its images than the trainer has, or
                before an earlier generation has ended or been closed.
        """
        if self._engine.has_unfinished_requests():
            raise RuntimeError("vLLM is still answering an earlier call: close that generator first")
        waiting: dict[str, Prompt] = {}
        try:
            for prompt in prompts:
                self._requests += 1
                request = self._engine.add_request(
                    f"{self._requests}", _vllm_prompt(prompt), self._parameters(prompt, sampling)
                )
                waiting[request or f"{self._requests}"] = prompt
            by_request = {_request_key(name): prompt for name, prompt in waiting.items()}
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        prompt = by_request.pop(_request_key(output.request_id))
                        _check_same_tokens(prompt, output.prompt_token_ids)
                        for answer in output.outputs:
                            yield Sampled(prompt, answer.index, self._completion(answer, sampling))
                await asyncio.sleep(0)
        finally:
            if self._engine.has_unfinished_requests():  # interrupted: nothing may be left for the next call
                self._engine.abort_request(list(waiting))
                while self._engine.has_unfinished_requests():
                    self._engine.step()

    def _parameters(self, prompt: Prompt, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=None if sampling.temperature == 0 else _seed(sampling.seed, prompt.uid),
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=None if sampling.ignore_eos else self._ends,
            logprobs=None if _truncates(sampling) else 0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, answer: Any, sampling: Sampling) -> Completion:
        ids = np.array(answer.token_ids, dtype=np.int64)
        logprobs = None
        if answer.logprobs is not None and not _truncates(sampling):
            values = [
                step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
            ]
            logprobs = np.array(values, dtype=np.float32)
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason="stop" if answer.finish_reason == "stop" else "length",
            weight_version=self._version,
        )

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutEngine.update_weights`.

        Raises:
            RuntimeError: when a parameter of the engine got no value: it would go on with an old one.
        """
        with _threads_kept():
            missing = self._engine.collective_rpc(_replace_weights, args=(weights,))[0]
        if missing:
            names = ", ".join(sorted(missing)[:3])
            raise RuntimeError(f"{len(missing)} of the engine's parameters got no weights, e.g. {names}")
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM is still answering: its cache of the old weights cannot be reset")
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()
        self._version = version

    async def sleep(self) -> None:
        """Gives the device's memory back; the weights are dropped."""
        if self._can_sleep:
            self._engine.reset_prefix_cache()
            self._engine.sleep(level=2)

    async def wake(self) -> None:
        """Takes the memory back; `update_weights` must follow."""
        if self._can_sleep and self._engine.is_sleeping():
            self._engine.wake_up()

    def close(self) -> None:
        """Ends the engine; a process group that was there before it stays."""
        with nullcontext() if self._group_is_ours else _process_group_kept():
            self._engine.engine_core.shutdown()


def engine_arguments(config: Config, *, max_images: int, can_sleep: bool) -> dict[str, Any]:
    """vLLM's engine arguments for a configuration."""
    rollout, data, model = config.worker.rollout, config.data, config.worker.actor.model
    length = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    if rollout.tensor_parallel_size > 1:
        log.info(
            "worker.rollout.tensor_parallel_size=%d: one device, so 1 is used", rollout.tensor_parallel_size
        )
    arguments: dict[str, Any] = {
        "model": model.model_path,
        "tokenizer": model.tokenizer_path or model.model_path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": _overrides(thawed(model.override_config), untie=not can_sleep),
        "dtype": DTYPES.get(rollout.dtype, rollout.dtype),
        "max_model_len": length,
        # A prompt is never cut between steps without chunked prefill, so one must fit.
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, length),
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        # Graph capture costs a minute on a CPU machine and gains nothing there.
        "enforce_eager": rollout.enforce_eager or not can_sleep,
        "enable_prefix_caching": True,
        "enable_sleep_mode": can_sleep,
        "disable_log_stats": rollout.disable_log_stats,
        "use_tqdm_on_load": False,
        "logprobs_mode": "processed_logprobs",
        "seed": rollout.seed,
    }
    if 0 < rollout.limit_images < max_images:
        raise UserError(
            f"worker.rollout.limit_images={rollout.limit_images}, but a prompt of the data has {max_images} "
            "images; set it to that or to 0 (what the data needs)"
        )
    arguments["limit_mm_per_prompt"] = {"image": rollout.limit_images or max_images, "video": 0}
    return arguments


def _overrides(override_config: dict[str, Any], *, untie: bool) -> Callable[[Any], Any]:
    """The user's changes to the model's configuration.

    On the CPU vLLM keeps a repacked copy of the output layer, which a weight update reaches only where the
    layer is not tied to the embedding.
    """

    def apply(config: Any) -> Any:
        config.update(override_config)
        if untie:
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
        return config

    return apply


def _vllm_prompt(prompt: Prompt) -> dict[str, Any]:
    if prompt.media is None:
        return {"prompt_token_ids": prompt.token_ids.tolist()}
    return {
        "prompt_token_ids": prompt.media.unexpanded_token_ids.tolist(),
        "multi_modal_data": {"image": list(prompt.media.images)},
    }


def _request_key(name: str) -> str:
    """The number this engine gave a request; vLLM may append its own suffix."""
    return name.split("-")[0]


def _truncates(sampling: Sampling) -> bool:
    """Whether vLLM's log-probabilities would be those of a truncated distribution."""
    return sampling.top_p < 1 or sampling.top_k > 0


def _seed(seed: int, uid: str) -> int:
    """A 62-bit seed of one prompt; vLLM adds the answer's number to it."""
    digest = hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _check_same_tokens(prompt: Prompt, seen: Sequence[int] | None) -> None:
    """The trainer learns from `prompt.token_ids`; an engine that saw others answered another question."""
    if seen is not None and not np.array_equal(prompt.token_ids, seen):
        raise RuntimeError(
            f"vLLM made {len(seen)} tokens of prompt {prompt.uid} ({prompt.row_id}), the trainer "
            f"{prompt.token_ids.size}, or others: its processor treats the images differently"
        )


def _replace_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Runs in vLLM's worker: loads the weights, returns the parameters that got none."""
    model = worker.model_runner.get_model()
    loaded: set[str] = set()
    load = model.load_weights

    def recording(stream: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded.update(load(stream))
        return loaded

    expected = {name for name, _ in model.named_parameters()}
    model.load_weights = recording
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    finally:
        del model.load_weights
    return expected - loaded


def _banning(banned: Sequence[int]) -> type:
    """A batch-wide logits processor that takes these tokens' probability away before anything is
    normalised."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    ids = list(banned)

    class BannedTokens(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._ids = torch.tensor(ids, dtype=torch.long, device=device)

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Nothing depends on which requests are in the batch."""

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill_(-1, self._ids, float("-inf")) if ids else logits

    return BannedTokens


@contextmanager
def _threads_kept() -> Iterator[None]:
    """vLLM's CPU worker sets torch's thread count and then disables the setter; the trainer's come back."""
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def _process_group_kept() -> Iterator[None]:
    """vLLM destroys the default process group when it ends, whoever made it."""
    destroy = torch.distributed.destroy_process_group

    def only_named(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    torch.distributed.destroy_process_group = only_named
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy
