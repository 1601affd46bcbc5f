"""Which devices this machine has, and which one a run in this process uses."""

from __future__ import annotations

import re
import time
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


SIXTEEN_BIT_TFLOPS = {
    "B200": 2250.0,
    "H20": 148.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "L4": 121.0,
}
"""Dense bf16 and fp16 matrix products by the makers' data sheets, by a word (or two) of the device's name."""
TIMED_ROWS, TIMED_RUNS = 1024, 3


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the device at most: a known GPU's data sheet for 16-bit types, else the best
    of a few square matrix products of `dtype`."""
    if device.type == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        known = [word for word in SIXTEEN_BIT_TFLOPS if re.search(rf"\b{word}\b", name)]
        if known:
            return 1e12 * SIXTEEN_BIT_TFLOPS[max(known, key=len)]
    return max(_timed_product(device, dtype) for _ in range(TIMED_RUNS))


def _timed_product(device: torch.device, dtype: torch.dtype) -> float:
    rows = TIMED_ROWS if device.type == "cpu" else 8 * TIMED_ROWS
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    matrix @ matrix
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 2 * rows**3 / (time.perf_counter() - start)
