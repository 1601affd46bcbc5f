"""A row's text, images and answer become uniform, or the row says what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seerl.data.bad_rows import BadRow
from seerl.data.rows import Row, RowReader, image_list
from seerl.errors import UserError
from tests.data_helpers import config

NAN = float("nan")


def read(row: dict[str, Any], **changes: Any) -> Row:
    return RowReader(config(**changes)).read(row, "rows.jsonl:0")


def texts(row: Row) -> list[list[str]]:
    return [[part.get("text", "[image]") for part in message["content"]] for message in row.messages]


@pytest.mark.parametrize("nothing", [None, NAN, "", b"", [], [None], [NAN], {"bytes": None, "path": None}])
def test_no_image_has_many_forms(nothing: Any) -> None:
    row = read({"prompt": "How many?", "images": nothing, "answer": "3"})
    assert row.images == []
    assert texts(row) == [["How many?"]]


def test_a_set_without_an_image_column_is_text() -> None:
    assert read({"prompt": "How many?", "answer": "3"}).images == []


@pytest.mark.parametrize(
    "one",
    [
        "a.png",
        ["a.png"],
        {"path": "a.png", "bytes": None},
        [{"path": "a.png"}],
        b"bytes",
        [b"bytes"],
        '["a.png"]',
    ],
)
def test_a_single_image_counts_as_one(one: Any) -> None:
    row = read({"prompt": "<image>How many?", "images": one, "answer": "3"})
    assert len(row.images) == 1
    assert texts(row) == [["[image]", "How many?"]]


def test_images_of_older_data_sets_come_column_wise() -> None:
    assert image_list({"bytes": [b"a", b"b"], "path": [None, "b.png"]}) == [
        {"bytes": b"a", "path": None},
        {"bytes": b"b", "path": "b.png"},
    ]


def test_several_images_keep_their_places() -> None:
    row = read({"prompt": "Is <image> left of <image>?", "images": ["a.png", "b.png"], "answer": "yes"})
    assert row.images == ["a.png", "b.png"]
    assert texts(row) == [["Is ", "[image]", " left of ", "[image]", "?"]]


@pytest.mark.parametrize(
    ("prompt", "images", "numbers"),
    [
        ("<image><image>?", ["a.png"], "2 places for images (<image>), but the row has 1 "),
        ("<image>?", ["a.png", "b.png"], "1 places for images (<image>), but the row has 2 "),
        ("no place", ["a.png"], "0 places for images (<image>), but the row has 1 "),
        ("what does <image> mean?", [], "1 places for images (<image>), but the row has 0 "),
    ],
)
def test_places_and_images_must_agree(prompt: str, images: list[str], numbers: str) -> None:
    with pytest.raises(BadRow) as caught:
        read({"prompt": prompt, "images": images, "answer": ""})
    assert numbers in str(caught.value)


def test_chat_prompts_of_text_and_of_parts() -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "image", "text": None}, {"type": "text", "text": "The <image> tag?"}],
        },
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b.png"}}, "And this?"]},
    ]
    row = read({"prompt": chat, "images": ["a.png"], "answer": ""})
    assert row.images == ["a.png", "b.png"]
    # the messages hold image parts, so `<image>` in their text is text
    assert texts(row) == [["Be brief."], ["[image]", "The <image> tag?"], ["Hm."], ["[image]", "And this?"]]


def test_chat_prompts_of_strings_may_use_the_placeholder() -> None:
    row = read({"prompt": [{"role": "user", "content": "<image>What?"}], "images": ["a.png"], "answer": ""})
    assert texts(row) == [["[image]", "What?"]]


def test_adjacent_texts_are_joined() -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    assert texts(read({"prompt": [{"role": "user", "content": parts}], "answer": ""})) == [["<|im_end|>"]]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, "is empty"),
        (NAN, "is empty"),
        ("  ", "is empty"),
        ([], "is empty"),
        (5, "must be a text or a list"),
        ([{"text": "x"}], "must be a text or a list"),
        ([{"role": "user", "content": None}], "has no text"),
        ([{"role": "user", "content": [{"type": "video"}]}], "'video'"),
        ([{"role": "user", "content": 7}], "must be a text or a list of parts"),
    ],
)
def test_prompts_that_are_none(prompt: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read({"prompt": prompt, "answer": ""})


def test_a_video_is_refused_and_an_absent_one_is_nothing() -> None:
    with pytest.raises(BadRow, match="video"):
        read({"prompt": "p", "answer": "", "videos": ["a.mp4"]})
    assert read({"prompt": "p", "answer": "", "videos": []}).messages


def test_answers_and_columns_are_kept_and_nan_is_none() -> None:
    row = read({"prompt": "p", "answer": {"a": [1, None]}, "images": None, "level": 3, "note": NAN})
    assert row.answer == {"a": [1, None]}
    assert row.columns == {"level": 3, "note": None}
    assert read({"prompt": "p", "answer": NAN}).answer is None


def test_the_format_sees_every_column_and_never_renders_the_users_text(tmp_path: Path) -> None:
    template = tmp_path / "format.jinja"
    template.write_text("{{ content }} ({{ unit }}) Think, then answer.\n")
    row = read(
        {"prompt": "<image>{{ 7 * 7 }}", "images": ["a.png"], "answer": "", "unit": "cm"},
        format_prompt=str(template),
        system_prompt="Be exact.",
    )
    assert texts(row) == [["Be exact."], ["[image]", "{{ 7 * 7 }} (cm) Think, then answer."]]


def test_the_format_applies_to_the_last_user_message_and_a_rows_own_system_message_stays(
    tmp_path: Path,
) -> None:
    template = tmp_path / "format.jinja"
    template.write_text("[{{ content }}]")
    chat = [
        {"role": "system", "content": "own"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [{"type": "text", "text": "last"}]},
    ]
    row = read({"prompt": chat, "answer": ""}, format_prompt=str(template), system_prompt="other")
    assert texts(row) == [["own"], ["first"], ["ok"], ["[last]"]]


def test_a_format_that_is_missing_or_broken_is_the_users_to_mend(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ content")
    for path in (broken, tmp_path / "gone.jinja"):
        with pytest.raises(UserError, match=r"data\.format_prompt"):
            RowReader(config(format_prompt=str(path)))
