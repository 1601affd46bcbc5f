"""A checkpoint as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import AutoConfig

from seerl.checkpoint.store import HUGGINGFACE, load_tensors, newest_checkpoint, read_trainer_state
from seerl.errors import UserError
from seerl.models.families import DTYPES, auto_model


def export(checkpoint: Path, out: Path, *, dtype: str | None = None, trust_remote_code: bool = False) -> Path:
    """Writes the weights of `checkpoint` with configuration, tokenizer and processor to `out`.

    Args:
        checkpoint: `global_step_N`, or a run's checkpoint folder, whose last one is taken.
        dtype: `bf16`, `fp16` or `fp32`; None keeps the type the model was loaded from.

    Raises:
        UserError: for a folder without checkpoints, or an `out` that already holds something.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: allowed is {', '.join(DTYPES)}")
    checkpoint = newest_checkpoint(checkpoint) or checkpoint
    read_trainer_state(checkpoint)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder that is empty or not there yet")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give another folder or remove it first")
    source = checkpoint / HUGGINGFACE
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = auto_model(config).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    tensors = {"model": get_model_state_dict(model)}
    load_tensors(tensors, checkpoint)
    set_model_state_dict(model, tensors["model"])
    model.to(DTYPES[dtype] if dtype else config.dtype or torch.float32)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        model.save_pretrained(partial)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{out} could not be written: {error.strerror or error}") from error
    return out
