"""One row of a data set, made uniform: messages with places for images, the images, the answer, the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from seerl.config.schema import DataConfig
from seerl.data.bad_rows import BadRow
from seerl.errors import UserError

PLACEHOLDER = "<image>"
"""Where an image goes in a prompt's text."""

Message = dict[str, Any]
"""{"role": str, "content": [{"type": "text", "text": str} | {"type": "image"}, ...]},
no two texts adjacent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that agrees with itself: as many places as images."""

    row_id: str
    messages: list[Message]
    images: list[Any]
    """What stands for each image (see images.py), in the order of their places."""
    answer: Any
    columns: dict[str, Any]


class RowReader:
    """Turns a row's columns into a Row as the configuration names them.

    Images and places must be equal in number, text-only rows included (a stray `<image>` is a fault of the
    row). In a chat-style prompt whose parts already are images, `<image>` in its texts is text. An image
    part that holds its picture supplies it; the others take theirs from the image column, in order.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._format = None if config.format_prompt is None else _read_template(config.format_prompt)

    def read(self, row: Mapping[str, Any], row_id: str) -> Row:
        """Raises BadRow where the row cannot be used."""
        config = self._config
        if not _is_missing(row.get(config.video_key)):
            raise BadRow(
                f"column {config.video_key!r} holds a video; videos are not supported in this version"
            )
        messages = _messages(row.get(config.prompt_key), config.prompt_key)
        if self._format is not None:
            _apply_format(messages, self._format, row)
        if config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        images = image_list(row.get(config.image_key))
        has_image_parts = any(
            _is_image_part(part) for message in messages for part in _parts(message["content"])
        )
        places: list[Any] = []
        uniform = [_uniform(message, places, split=not has_image_parts) for message in messages]
        used = (config.prompt_key, config.answer_key, config.image_key, config.video_key)
        return Row(
            row_id=row_id,
            messages=uniform,
            images=_fill(places, images),
            answer=_nan_to_none(row.get(config.answer_key)),
            columns={name: _nan_to_none(value) for name, value in row.items() if name not in used},
        )


def image_list(value: Any) -> list[Any]:
    """The images of a row's image column, whatever its form: none, one or several."""
    if _is_missing(value):
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list in a csv cell
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return [value]
    if isinstance(value, dict) and any(isinstance(inner, list) for inner in value.values()):
        # {"bytes": [...], "path": [...]}: how older versions of datasets store a list of pictures
        columns = {name: inner for name, inner in value.items() if isinstance(inner, list)}
        value = [dict(zip(columns, entry, strict=True)) for entry in zip(*columns.values(), strict=True)]
    if isinstance(value, (list, tuple)):
        return [image for image in value if not _is_missing(image)]
    return [value]


def _fill(places: list[Any], images: list[Any]) -> list[Any]:
    """The picture of each place: its own, or the next of the image column."""
    open_places = sum(place is None for place in places)
    if open_places != len(images):
        raise BadRow(
            f"the prompt has {open_places} places for images ({PLACEHOLDER}), but the row has "
            f"{len(images)} images"
        )
    remaining = iter(images)
    return [next(remaining) if place is None else place for place in places]


def _messages(prompt: Any, key: str) -> list[Message]:
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, dict) and "role" in prompt:
        prompt = [prompt]
    if _is_missing(prompt) or isinstance(prompt, str):
        raise BadRow(f"column {key!r} is empty")
    if not isinstance(prompt, list) or not all(
        isinstance(m, dict) and "role" in m and "content" in m for m in prompt
    ):
        raise BadRow(
            f"column {key!r} must be a text or a list of {{role, content}} messages, not "
            f"{type(prompt).__name__}"
        )
    messages = [{"role": str(message["role"]), "content": message["content"]} for message in prompt]
    if not any(_parts(message["content"]) for message in messages):
        raise BadRow(f"column {key!r} has no text")
    return messages


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if isinstance(content, dict):
        return [content]
    if content is None:
        return []
    if not isinstance(content, list):
        raise BadRow(f"a message's content must be a text or a list of parts, not {type(content).__name__}")
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]


def _is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _uniform(message: Message, places: list[Any], split: bool) -> Message:
    """The message in parts; appends to `places` each image part's own picture or None."""
    parts: list[dict[str, Any]] = []
    for part in _parts(message["content"]):
        if _is_image_part(part):
            places.append(_own_picture(part))
            parts.append({"type": "image"})
        elif (
            isinstance(part, dict)
            and part.get("type", "text") == "text"
            and isinstance(part.get("text"), str)
        ):
            for number, text in enumerate(part["text"].split(PLACEHOLDER) if split else [part["text"]]):
                if number:
                    places.append(None)
                    parts.append({"type": "image"})
                _append_text(parts, text)
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRow(f"a message holds a part of type {kind!r}; text and image are supported")
    return {"role": message["role"], "content": parts}


def _append_text(parts: list[dict[str, Any]], text: str) -> None:
    if text and parts and parts[-1]["type"] == "text":
        parts[-1]["text"] += text
    elif text:
        parts.append({"type": "text", "text": text})


def _own_picture(part: dict[str, Any]) -> Any:
    for key in ("image", "image_url", "url", "path", "bytes", "base64"):
        value = part.get(key)
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        if not _is_missing(value):
            return value
    return None


def _read_template(path: str) -> jinja2.Template:
    try:
        return jinja2.Template(Path(path).read_text(encoding="utf-8").strip())
    except OSError as error:
        raise UserError(f"data.format_prompt: {path} cannot be read: {error.strerror}.") from error
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"data.format_prompt: {path}, line {error.lineno}: {error.message}.") from error


def _apply_format(messages: list[Message], template: jinja2.Template, row: Mapping[str, Any]) -> None:
    """Renders the last user message (its last text) through the template."""
    users = [message for message in messages if message["role"] == "user"]
    if not users:
        return
    parts = _parts(users[-1]["content"])
    texts = [
        n for n, part in enumerate(parts) if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    if not texts:
        return
    part = parts[texts[-1]]
    try:
        text = template.render({**row, "content": part["text"]})
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise BadRow(f"data.format_prompt cannot be rendered with this row: {error}") from error
    users[-1]["content"] = [*parts[: texts[-1]], {**part, "text": text}, *parts[texts[-1] + 1 :]]


def _is_missing(value: Any) -> bool:
    """None, NaN, and what is empty: "", b"", [], {} and structs whose every field is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, dict):
        return all(_is_missing(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_missing(inner) for inner in value)
    return isinstance(value, (str, bytes)) and not value


def _nan_to_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
