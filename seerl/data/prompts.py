"""From a row's messages and images to token ids and the processor's features, for any family of transformers.

What a user wrote stays text (see marked_text.py); a prompt is never cut.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch
from PIL import Image

from seerl.config.schema import DataConfig, ModelConfig
from seerl.data.bad_rows import BadRow, OverlongRow
from seerl.data.image_cost import ImageCost
from seerl.data.marked_text import MarkAwareTokenizer, Marks, control_tokens
from seerl.data.rows import Message, Row
from seerl.errors import UserError
from seerl.types import Media, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def load_processor(config: ModelConfig) -> tuple[ProcessorMixin | None, PreTrainedTokenizerBase]:
    """The processor (None for a text-only model) and the tokenizer of `tokenizer_path`, else `model_path`.

    Raises UserError if there is no tokenizer, or a vision model without its processor.
    """
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

    path = config.tokenizer_path or config.model_path
    key = f"worker.actor.model.{'tokenizer_path' if config.tokenizer_path else 'model_path'}"
    if path is None:
        raise UserError("worker.actor.model.model_path is not set: give a folder or a hub id.")
    trust = {"trust_remote_code": config.trust_remote_code}
    try:
        processor = AutoProcessor.from_pretrained(path, **trust)
    except (OSError, ValueError, KeyError) as error:
        if _reads_images(path, config.trust_remote_code):
            raise UserError(
                f"{key}={path} is a vision model, but its processor or tokenizer cannot be loaded: "
                f"{_first_line(error)}"
            ) from error
        processor = None
    if getattr(processor, "image_processor", None) is not None:
        if not processor.tokenizer.get_vocab().keys() - processor.tokenizer.get_added_vocab().keys():
            raise UserError(f"{key}={path}: there are no tokenizer files (tokenizer.json or the like)")
        return processor, processor.tokenizer
    if isinstance(processor, PreTrainedTokenizerBase):
        return None, processor
    try:
        return None, AutoTokenizer.from_pretrained(path, **trust)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} has no tokenizer that can be loaded ({_first_line(error)}). Set "
            "worker.actor.model.tokenizer_path to a folder or hub id that has one."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(": .")


def _reads_images(path: str, trust_remote_code: bool) -> bool:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        return False
    return hasattr(config, "vision_config")


class PromptBuilder:
    """Builds Prompts with one processor or tokenizer. `with_features` False leaves `Media.features` empty."""

    def __init__(
        self,
        config: DataConfig,
        processor: ProcessorMixin | None,
        tokenizer: PreTrainedTokenizerBase,
        with_features: bool,
    ) -> None:
        self.max_prompt_length = config.max_prompt_length
        self.reads_images = processor is not None
        self._processor = processor
        self._tokenizer = tokenizer
        self._with_features = with_features
        self._override = config.override_chat_template
        self._template = _chat_template(config, processor, tokenizer)
        self._control = re.compile("|".join(map(re.escape, control_tokens(processor, tokenizer))) or r"(?!)")
        self._image_cost = ImageCost(self)
        self._require_template()

    def build(self, row: Row, images: Sequence[Image.Image], uid: str) -> Prompt:
        """Raises BadRow if the prompt is longer than max_prompt_length: it is never cut."""
        rendered = self._render(row.messages)
        if not rendered.ids:
            raise BadRow("the chat template makes an empty prompt of it")
        placeholder = getattr(self._processor, "image_token", None)
        if images and placeholder and placeholder not in rendered.text:
            raise BadRow("the chat template leaves its images out; see data.override_chat_template")
        token_ids = unexpanded = np.asarray(rendered.ids, dtype=np.int64)
        media = None
        if images:
            token_ids, features = self._expand(rendered, images)
            media = Media(
                images=tuple(images),
                unexpanded_token_ids=unexpanded,
                features=features if self._with_features else {},
            )
        self.check_length(token_ids.size, len(images))
        return Prompt(
            uid=uid,
            row_id=row.row_id,
            token_ids=token_ids,
            text=rendered.marks.restore(rendered.text),
            ground_truth=row.answer,
            columns=row.columns,
            media=media,
        )

    def count_tokens(self, row: Row, sizes: Sequence[tuple[int, int]]) -> int:
        """The prompt's length with images of these (width, height), none of them decoded."""
        return len(self._render(row.messages).ids) + sum(self._image_cost(size) for size in sizes)

    def check_length(self, tokens: int, images: int) -> None:
        """Raises BadRow for a prompt over max_prompt_length."""
        if tokens > self.max_prompt_length:
            with_images = f" (with {images} images)" if images else ""
            raise OverlongRow(
                f"the prompt has {tokens} tokens{with_images}, more than "
                f"data.max_prompt_length={self.max_prompt_length}"
            )

    def expanded_length(self, images: Sequence[Image.Image]) -> tuple[int, int]:
        """(tokens before, tokens after) expanding a prompt of nothing but these images."""
        rendered = self._render([{"role": "user", "content": [{"type": "image"} for _ in images]}])
        return len(rendered.ids), self._expand(rendered, images)[0].size

    def image_tokens_by_size(self, size: tuple[int, int]) -> int | None:
        """What the processor says an image of (width, height) takes; None where it does not say."""
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return None
        return int(count(image_sizes=[(size[1], size[0])])["num_image_tokens"][0])

    def _require_template(self) -> None:
        """A template that is broken is no fault of the rows; one that only refuses this message is fine."""
        try:
            self._render([{"role": "user", "content": [{"type": "text", "text": "?"}]}])
        except BadRow as error:
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                where = f"line {error.__cause__.lineno}: {error.__cause__.message}"
                raise UserError(self._broken_template(where)) from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UserError(self._broken_template(f"{type(error).__name__}: {error}")) from error

    def _broken_template(self, why: str) -> str:
        whose = self._override or f"of {self._tokenizer.name_or_path}"
        remedy = "mend it, or set data.override_chat_template to a file"
        return f"the chat template {whose} is broken ({why}); {remedy}"

    def _render(self, messages: list[Message]) -> _Rendered:
        marks = Marks([part.get("text", "") for message in messages for part in message["content"]])
        hidden: list[Message] = []
        for message in messages:
            parts = [
                {**part, "text": marks.hide(self._control, part["text"])} if part["type"] == "text" else part
                for part in message["content"]
            ]
            # templates of vision models go through parts, those of text models take a text
            content: Any = "".join(part["text"] for part in parts) if self._processor is None else parts
            hidden.append({"role": message["role"], "content": content})
        renderer: Any = self._processor or self._tokenizer
        try:
            text = renderer.apply_chat_template(
                hidden, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:  # templates refuse what they do not know: roles, their order
            raise BadRow(f"the chat template refuses this prompt: {error}") from error
        # as in transformers: a tokenizer's template is complete, a processor's may leave out the BOS token
        bos = self._tokenizer.bos_token
        adds_special_tokens = self._processor is not None and not (bos and text.startswith(bos))
        ids = marks.encode(self._tokenizer, text, adds_special_tokens)
        return _Rendered(text, marks, adds_special_tokens, ids)

    def _expand(
        self, rendered: _Rendered, images: Sequence[Image.Image]
    ) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """The ids with each image's placeholder expanded, and the features for the model's forward."""
        processor: Any = copy.copy(self._processor)
        if rendered.marks.spellings:
            processor.tokenizer = MarkAwareTokenizer(self._tokenizer, rendered.marks)
        try:
            outputs = processor(
                text=[rendered.text],
                images=[list(images)],
                add_special_tokens=rendered.adds_special_tokens,
                return_tensors="pt",
            )
        except ValueError as error:  # what processors refuse: sizes, or places that do not match the images
            raise BadRow(f"the model's processor refuses this prompt: {error}") from error
        ids = outputs["input_ids"]
        features = {
            name: value
            for name, value in outputs.items()
            if isinstance(value, torch.Tensor)
            and name not in ("input_ids", "attention_mask")
            and (value.shape != ids.shape or value.is_floating_point())  # token types and the like
        }
        return ids[0].numpy().astype(np.int64), features


@dataclass(frozen=True, slots=True)
class _Rendered:
    text: str
    """With marks (see marked_text.py)."""
    marks: Marks
    adds_special_tokens: bool
    ids: list[int]
    """Images as one placeholder each."""


def _chat_template(
    config: DataConfig, processor: ProcessorMixin | None, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """The override, the tokenizer's template where the processor has none, or None: their own."""
    if config.override_chat_template is not None:
        try:
            return Path(config.override_chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"data.override_chat_template: {config.override_chat_template} cannot be read: "
                f"{error.strerror}."
            ) from error
    if processor is not None and getattr(processor, "chat_template", None) is not None:
        return None
    if tokenizer.chat_template is None:
        raise UserError(
            f"{tokenizer.name_or_path} has no chat template; set data.override_chat_template to a file."
        )
    return None if processor is None else tokenizer.get_chat_template()
