"""How the models of transformers are told apart and named, for whoever builds one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The names that configuration keys and options have for torch's types."""


def auto_model(config: PretrainedConfig) -> Any:
    """The class of transformers that builds this model: with images where the family reads them."""
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
