"""The frozen reference model that the policy is held close to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from seerl.config.schema import ActorConfig, RefConfig
from seerl.policy.forward import MicroBatchLimit
from seerl.policy.model import load_model
from seerl.policy.packing import G
from seerl.policy.policy import make_forward
from seerl.types import FloatArray


class Reference:
    """The model as it was before training, for log-probabilities alone.

    With `worker.ref.offload.offload_params` or `fsdp.enable_cpu_offload` it lies in CPU memory between
    passes.
    """

    def __init__(
        self,
        actor: ActorConfig,
        config: RefConfig,
        *,
        device: torch.device,
        banned: Sequence[int],
        temperature: float,
        limit: MicroBatchLimit,
    ) -> None:
        self._device = device
        self._offload = device.type != "cpu" and (
            config.offload.offload_params or config.fsdp.enable_cpu_offload
        )
        home = torch.device("cpu") if self._offload else device
        model = load_model(actor.model, config.fsdp, home, trainable=False)
        self._forward = make_forward(actor, model, banned=banned, temperature=temperature)
        self._limit = limit

    def logprobs(self, groups: Sequence[G]) -> list[tuple[FloatArray, ...]]:
        """Log-probabilities of every response under the reference, per group."""
        if not self._offload:
            return self._forward.logprobs_of(groups, self._limit)
        self._forward.to(self._device)
        try:
            return self._forward.logprobs_of(groups, self._limit)
        finally:
            self._forward.to(torch.device("cpu"))
