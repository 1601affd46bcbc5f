"""Prompts whose users wrote the spelling of a control token: the spelling stays text.

A mark of private-use characters stands in for each such spelling while the chat template is rendered and the
processor expands the images. Then the text between the marks is tokenized as ever, and each spelling as
plain text. Without such spellings nothing is marked and the ordinary path gives the ordinary ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import BatchEncoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_PRIVATE_USE = range(0xE000, 0xF900)


def control_tokens(processor: ProcessorMixin | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Spellings that only the template may use, longest first: special tokens and the media's placeholders.

    Added tokens that are not special (`<think>` in some families) are vocabulary that users may write.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    for modality in ("image", "video", "audio"):
        token = getattr(processor, f"{modality}_token", None)
        if isinstance(token, str):
            special.add(token)
    return sorted((token for token in special if token), key=len, reverse=True)


class Marks:
    """The marks of one prompt, in a character that none of `texts` contains."""

    def __init__(self, texts: Sequence[str]) -> None:
        together = "".join(texts)
        self._character = next(chr(code) for code in _PRIVATE_USE if chr(code) not in together)
        self._pattern = re.compile(f"{self._character}(\\d+){self._character}")
        self.spellings: list[str] = []

    def hide(self, control: re.Pattern[str], text: str) -> str:
        """The text with a mark in place of each match of `control`."""

        def mark(match: re.Match[str]) -> str:
            self.spellings.append(match[0])
            return f"{self._character}{len(self.spellings) - 1}{self._character}"

        return control.sub(mark, text)

    def restore(self, text: str) -> str:
        """The text as the user wrote it."""
        return self._pattern.sub(lambda match: self.spellings[int(match[1])], text)

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of the text, marks as the plain tokens of their spellings."""
        if not self.spellings:
            return tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return [token for piece in self.pieces(tokenizer, text, add_special_tokens) for token in piece.ids]

    def pieces(self, tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[_Piece]:
        """The text cut at its marks, each piece tokenized by itself."""
        pieces: list[_Piece] = []
        position = 0
        for match in self._pattern.finditer(text):
            pieces.append(_text_piece(tokenizer, text[position : match.start()], add_special_tokens))
            pieces.append(_Piece(match[0], _as_plain_text(tokenizer, self.spellings[int(match[1])]), None))
            add_special_tokens, position = False, match.end()
        pieces.append(_text_piece(tokenizer, text[position:], add_special_tokens))
        return pieces


class MarkAwareTokenizer:
    """Takes a tokenizer's place in a processor: the tokenizer itself, except that marks are resolved."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: Marks) -> None:
        self._tokenizer = tokenizer
        self._marks = marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self,
        text: str | list[str],
        add_special_tokens: bool = True,
        return_tensors: str | None = None,
        **_other: Any,  # padding, truncation and the like mean nothing for one prompt that is never cut
    ) -> BatchEncoding:
        (prompt,) = [text] if isinstance(text, str) else text
        return _PiecewiseEncoding(
            self._marks.pieces(self._tokenizer, prompt, add_special_tokens), return_tensors
        )


class _Piece:
    def __init__(self, text: str, ids: list[int], encoding: BatchEncoding | None) -> None:
        self.text = text
        self.ids = ids
        self.encoding = encoding


class _PiecewiseEncoding(BatchEncoding):
    """What a processor needs of a tokenizer's answer, put together from pieces."""

    def __init__(self, pieces: Sequence[_Piece], return_tensors: str | None) -> None:
        ids = [token for piece in pieces for token in piece.ids]
        super().__init__({"input_ids": [ids], "attention_mask": [[1] * len(ids)]}, tensor_type=return_tensors)
        self._pieces = pieces

    def char_to_token(
        self, batch_or_char_index: int, char_index: int | None = None, _sequence_index: int = 0
    ) -> int:
        """The token that holds a character of the text, marks counted as they are written there."""
        char = batch_or_char_index if char_index is None else char_index
        token = 0
        for piece in self._pieces:
            if char < len(piece.text):
                inner = 0 if piece.encoding is None else piece.encoding.char_to_token(char)
                return token + (inner or 0)
            char -= len(piece.text)
            token += len(piece.ids)
        raise IndexError(f"no character {char} in the prompt")


def _text_piece(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> _Piece:
    encoding = tokenizer(text, add_special_tokens=add_special_tokens)
    return _Piece(text, encoding["input_ids"], encoding)


def _as_plain_text(tokenizer: PreTrainedTokenizerBase, spelling: str) -> list[int]:
    ids = tokenizer(spelling, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if len(ids) > 1 or len(spelling) == 1:
        return ids
    # a placeholder that is not declared special is matched all the same: keep its spelling apart
    pieces = (spelling[:1], spelling[1:])
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
