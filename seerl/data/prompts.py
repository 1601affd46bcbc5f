"""From a row's messages and images to token ids and the processor's features, for any family of transformers.

What a user wrote stays text. Where a user's text holds the spelling of a control token (`<|im_end|>`,
`<|image_pad|>`, ...), a mark of private-use characters stands in for it while the chat template is rendered
and the processor expands the images; the marks are then tokenized as plain text between the pieces around
them. Prompts without such spellings take the processor's ordinary path and get its ordinary ids.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch
from PIL import Image

from seerl.config.schema import DataConfig, ModelConfig
from seerl.data.bad_rows import BadRow, OverlongRow
from seerl.data.rows import Message, Row
from seerl.errors import UserError
from seerl.types import Media, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_PRIVATE_USE = range(0xE000, 0xF900)


def load_processor(config: ModelConfig) -> tuple[ProcessorMixin | None, PreTrainedTokenizerBase]:
    """The processor (None for a text-only model) and the tokenizer of `tokenizer_path`, else `model_path`.

    Raises UserError if there is no tokenizer, or a vision model without its processor.
    """
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

    path = config.tokenizer_path or config.model_path
    if path is None:
        raise UserError("worker.actor.model.model_path is not set: give a folder or a hub id.")
    trust = {"trust_remote_code": config.trust_remote_code}
    try:
        processor = AutoProcessor.from_pretrained(path, **trust)
    except (OSError, ValueError, KeyError) as error:
        if _reads_images(path, config.trust_remote_code):
            raise UserError(
                f"{path} is a vision model, but its processor cannot be loaded: {_first_line(error)}"
            ) from error
        processor = None
    if getattr(processor, "image_processor", None) is not None:
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
        self._template = _chat_template(config, processor, tokenizer)
        self._control = re.compile("|".join(map(re.escape, _control_tokens(processor, tokenizer))) or r"(?!)")
        self._image_cost = ImageCost(self)

    def build(self, row: Row, images: Sequence[Image.Image], uid: str) -> Prompt:
        """Raises BadRow if the prompt is longer than max_prompt_length: it is never cut."""
        text = self._render(row.messages)
        unexpanded = np.asarray(text.encode(self._tokenizer), dtype=np.int64)
        media = None
        token_ids = unexpanded
        if images:
            token_ids, features = self._expand(text, images)
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
            text=text.restored(),
            ground_truth=row.answer,
            columns=row.columns,
            media=media,
        )

    def count_tokens(self, row: Row, sizes: Sequence[tuple[int, int]]) -> int:
        """The prompt's length with images of these (width, height), none of them decoded."""
        length = len(self._render(row.messages).encode(self._tokenizer))
        return length + sum(self._image_cost(size) for size in sizes)

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
        text = self._render([{"role": "user", "content": [{"type": "image"} for _ in images]}])
        return len(text.encode(self._tokenizer)), self._expand(text, images)[0].size

    def image_tokens_by_size(self, size: tuple[int, int]) -> int | None:
        """What the processor says an image of (width, height) takes; None where it does not say."""
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return None
        return int(count(image_sizes=[(size[1], size[0])])["num_image_tokens"][0])

    def _render(self, messages: list[Message]) -> MarkedText:
        mark = _unused_character(messages)
        spellings: list[str] = []

        def hide(match: re.Match[str]) -> str:
            spellings.append(match[0])
            return f"{mark}{len(spellings) - 1}{mark}"

        hidden: list[Message] = []
        for message in messages:
            parts = [
                {**part, "text": self._control.sub(hide, part["text"])} if part["type"] == "text" else part
                for part in message["content"]
            ]
            if self._processor is None:
                content: Any = "".join(part["text"] for part in parts)
            else:
                content = parts
            hidden.append({"role": message["role"], "content": content})
        renderer: Any = self._processor or self._tokenizer
        try:
            text = renderer.apply_chat_template(
                hidden, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:  # templates refuse what they do not know: roles, their order
            raise BadRow(f"the chat template refuses this prompt: {error}") from error
        return MarkedText(text, mark, spellings, add_special_tokens=self._adds_special_tokens(text))

    def _adds_special_tokens(self, text: str) -> bool:
        """As transformers: a tokenizer's template is complete; a processor's may leave out the BOS token."""
        bos = self._tokenizer.bos_token
        return self._processor is not None and not (bos is not None and text.startswith(bos))

    def _expand(
        self, text: MarkedText, images: Sequence[Image.Image]
    ) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """The ids with each image's placeholder expanded, and the features for the model's forward."""
        processor: Any = copy.copy(self._processor)
        if text.spellings:
            processor.tokenizer = _MarkAwareTokenizer(self._tokenizer, text)
        try:
            outputs = processor(
                text=[text.text],
                images=[list(images)],
                add_special_tokens=text.add_special_tokens,
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


class MarkedText:
    """A rendered prompt in which marks stand for the control-token spellings that a user wrote."""

    def __init__(self, text: str, mark: str, spellings: Sequence[str], add_special_tokens: bool) -> None:
        self.text = text
        self.spellings = spellings
        self.add_special_tokens = add_special_tokens
        self._pattern = re.compile(f"{mark}(\\d+){mark}")

    def restored(self) -> str:
        """The text as the user wrote it."""
        return self._pattern.sub(lambda match: self.spellings[int(match[1])], self.text)

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str | None = None) -> list[int]:
        """Token ids of `text` (default: the prompt itself); marks become their spellings' plain tokens."""
        text = self.text if text is None else text
        if not self.spellings:
            return tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"]
        ids: list[int] = []
        for number, piece in enumerate(self._pattern.split(text)):  # text, mark, text, mark, ..., text
            if number % 2:
                ids += _as_plain_text(tokenizer, self.spellings[int(piece)])
            elif piece or number == 0:
                special = self.add_special_tokens and number == 0
                ids += tokenizer(piece, add_special_tokens=special)["input_ids"]
        return ids


class _MarkAwareTokenizer:
    """Stands in a processor's tokenizer's place: the tokenizer itself, except that marks are resolved."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: MarkedText) -> None:
        self._tokenizer = tokenizer
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        from transformers import BatchEncoding

        (prompt,) = [text] if isinstance(text, str) else text
        ids = self._text.encode(self._tokenizer, prompt)
        return BatchEncoding(
            {"input_ids": [ids], "attention_mask": [[1] * len(ids)]},
            tensor_type=options.get("return_tensors"),
        )


class ImageCost:
    """Tokens that an image of a size adds to a prompt beyond its one placeholder.

    The processor's own arithmetic is used where it agrees with what the processor does (tried on two sizes,
    since some leave out the tokens around an image); otherwise a blank image is processed, once a size.
    """

    PROBES = ((224, 224), (480, 320))

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._known: dict[tuple[int, int], int] = {}
        self._surplus: int | None = None
        self._probed = False

    def __call__(self, size: tuple[int, int]) -> int:
        if not self._probed:
            self._probe()
        if self._surplus is not None:
            try:
                return (self._builder.image_tokens_by_size(size) or 0) + self._surplus
            except ValueError as error:
                raise BadRow(
                    f"the model's processor refuses an image of {size[0]} x {size[1]}: {error}"
                ) from error
        if size not in self._known:
            self._known[size] = self._measure(size)
        return self._known[size]

    def _probe(self) -> None:
        said = [self._builder.image_tokens_by_size(size) for size in self.PROBES]
        if None not in said:
            surplus = {self._measure(size) - (n or 0) for size, n in zip(self.PROBES, said, strict=True)}
            self._surplus = surplus.pop() if len(surplus) == 1 else None
        self._probed = True

    def _measure(self, size: tuple[int, int]) -> int:
        before, after = self._builder.expanded_length([Image.new("RGB", size)])
        return after - before


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


def _control_tokens(processor: ProcessorMixin | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Spellings that only the template may use, longest first: special tokens, and the media's placeholders.

    Added tokens that are not special (`<think>` in some families) are ordinary vocabulary that users may
    write.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    for modality in ("image", "video", "audio"):
        token = getattr(processor, f"{modality}_token", None)
        if isinstance(token, str):
            special.add(token)
    return sorted((token for token in special if token), key=len, reverse=True)


def _as_plain_text(tokenizer: PreTrainedTokenizerBase, spelling: str) -> list[int]:
    ids = tokenizer(spelling, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if len(ids) > 1 or len(spelling) == 1:
        return ids
    # a placeholder that is not declared special is matched all the same: keep its spelling apart
    pieces = (spelling[:1], spelling[1:])
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def _unused_character(messages: Sequence[Message]) -> str:
    texts = "".join(part.get("text", "") for message in messages for part in message["content"])
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in texts)
