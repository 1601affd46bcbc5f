"""A checkpoint as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import AutoConfig, PretrainedConfig

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
    config = _model_config(source, trust_remote_code)
    model = auto_model(config).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    tensors = {"model": get_model_state_dict(model)}
    load_tensors(tensors, checkpoint)
    set_model_state_dict(model, tensors["model"])
    model.to(DTYPES[dtype] if dtype else config.dtype or torch.float32)
    try:
        _write(model, source, out.resolve())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} could not be written: {getattr(error, 'strerror', None) or error}") from error
    return out


def _model_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    try:
        if not (folder / "config.json").is_file():
            raise OSError("there is no config.json")
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{folder} is damaged, or of a newer transformers: {reason}") from error
    return config


def _write(model: torch.nn.Module, source: Path, out: Path) -> None:
    """Whole or not at all, also where `out` is there and empty (a mount, the current folder)."""
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)  # type: ignore[operator]
        shutil.copytree(source, partial, dirs_exist_ok=True)  # its generation settings are the model's own
        if not out.exists():
            partial.rename(out)
            return
        for file in partial.iterdir():
            file.rename(out / file.name)
        partial.rmdir()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
