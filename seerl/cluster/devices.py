"""Which devices this machine has, and which one a run in this process uses."""

from __future__ import annotations

from typing import Literal

import torch

from seerl.errors import UserError


def gpu_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def local_device(n_gpus_per_node: int | Literal["auto"]) -> torch.device:
    """The device of a run in one process: a GPU where one is asked for or found, else the CPU.

    Raises:
        UserError: when more devices are asked for than there are, or than one process uses.
    """
    found = gpu_count()
    wanted = min(found, 1) if n_gpus_per_node == "auto" else n_gpus_per_node
    if wanted > found:
        raise UserError(
            f"trainer.n_gpus_per_node={wanted}, but this machine has {found} GPU{'s' if found != 1 else ''}; "
            "set it to auto (what the machine has) or to 0 (the CPU)"
        )
    if wanted > 1:
        raise UserError(
            f"trainer.n_gpus_per_node={wanted}: this version trains on one device; "
            "set it to 1, or to 0 for the CPU"
        )
    return torch.device("cuda", 0) if wanted else torch.device("cpu")
