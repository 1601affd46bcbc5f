"""Every form and mode of a picture becomes an upright RGB image of the right size, or one bad row."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from seerl.data.bad_rows import BadRow
from seerl.data.images import MAX_ASPECT_RATIO, image_size, load_image, scaled_size
from tests.data_helpers import png

RED = (200, 30, 30)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def load(source: Any, image_dir: str | None = None) -> Image.Image:
    return load_image(source, image_dir, None, None)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Any]:
    content = png()
    (tmp_path / "a b.png").write_bytes(content)
    text = base64.b64encode(content).decode()
    return {
        "bytes": content,
        "struct of bytes": {"bytes": content, "path": "gone.png"},
        "struct of path": {"bytes": None, "path": "a b.png"},
        "struct of absolute path": {"path": str(tmp_path / "a b.png")},
        "relative path": "a b.png",
        "absolute path": str(tmp_path / "a b.png"),
        "Path": tmp_path / "a b.png",
        "file address": f"file://{tmp_path}/a%20b.png",
        "data url": f"data:image/png;base64,{text}",
        "base64": text,
        "base64 in lines": "\n".join(text[i : i + 60] for i in range(0, len(text), 60)),
        "base64 without padding": text.rstrip("="),
        "image_url": {"image_url": {"url": f"data:image/png;base64,{text}"}},
        "PIL": Image.new("RGB", (64, 48), RED),
    }


def test_every_form_gives_the_same_picture(sources: dict[str, Any], tmp_path: Path) -> None:
    for form, source in sources.items():
        image = load(source, str(tmp_path))
        assert (image.mode, image.size, image.getpixel((5, 5))) == ("RGB", (64, 48), RED), form
        assert image_size(source, str(tmp_path), None, None) == (64, 48), form


def test_a_pil_image_given_by_the_caller_stays_usable() -> None:
    image = Image.new("RGBA", (10, 10), (0, 0, 0, 0))
    load(image)
    image_size(image, None, None, None)
    assert image.getpixel((0, 0)) == (0, 0, 0, 0)


def sixteen_bit(kind: str) -> Image.Image:
    return Image.fromarray(np.full((4, 6), 0x8080, dtype=np.uint16)).convert(kind)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (6, 4), 1), (255, 255, 255)),
        (Image.new("L", (6, 4), 90), (90, 90, 90)),
        (Image.new("LA", (6, 4), (0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (6, 4), (10, 20, 30, 255)), (10, 20, 30)),
        (Image.new("RGBA", (6, 4), (10, 20, 30, 0)), (255, 255, 255)),
        (Image.new("RGBA", (6, 4), (0, 0, 0, 128)), (127, 127, 127)),
        (Image.new("RGB", (6, 4), (50, 60, 70)).convert("P", palette=Image.Palette.ADAPTIVE), (50, 60, 70)),
        (sixteen_bit("I;16"), (128, 128, 128)),
        (sixteen_bit("I"), (128, 128, 128)),
        (Image.new("F", (6, 4), 0.5), (127, 127, 127)),
        (Image.new("CMYK", (6, 4), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.new("YCbCr", (6, 4), (255, 128, 128)), (255, 255, 255)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else None,
)
def test_every_mode_becomes_rgb_on_white(image: Image.Image, expected: tuple[int, int, int]) -> None:
    rgb = load(image)
    assert rgb.mode == "RGB"
    assert np.abs(np.asarray(rgb).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_a_transparent_colour_of_a_png_is_white(mode: str) -> None:
    content = encoded(Image.new(mode, (6, 4), 0), transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert load(content).getpixel((2, 2)) == (255, 255, 255)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for kind in ("GIF", "WEBP", "PNG"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **lossless)
        assert load(content).getpixel((4, 4)) == (255, 0, 0), kind


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_and_counted_in_the_size(orientation: int) -> None:
    image = Image.new("RGB", (80, 40), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(image, "PNG", exif=exif)
    upright = load(content)
    assert upright.size == image_size(content, None, None, None)
    assert upright.size == ((80, 40) if orientation < 5 else (40, 80))
    corners = [
        (5, 5),
        (upright.width - 5, 5),
        (upright.width - 5, upright.height - 5),
        (5, upright.height - 5),
    ]
    bright = [corner for corner in corners if upright.getpixel(corner) == (255, 255, 255)]
    # the stored top left corner, as the EXIF standard places it
    assert bright == [corners[{1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1, 7: 2, 8: 3}[orientation]]]


@given(
    st.integers(1, 20000),
    st.integers(1, 20000),
    st.one_of(st.none(), st.integers(1, 10**6)),
    st.one_of(st.none(), st.integers(1000, 10**7)),
)
def test_scaled_sizes_lie_within_the_bounds(
    width: int, height: int, least: int | None, most: int | None
) -> None:
    if least is not None and most is not None and least * 2 > most:
        return
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        return
    new = scaled_size(width, height, least, most)
    assert most is None or new[0] * new[1] <= most
    # a short side of a few pixels cannot be rounded finely: what one row or column holds is the slack
    assert least is None or new[0] * new[1] >= min(least, width * height)
    assert abs(new[0] - new[1] * width / height) <= max(1.0, width / height) * 1.01 or min(new) == 1


def test_a_single_pixel_is_enlarged_to_the_least_size() -> None:
    image = load_image(png((1, 1)), None, 262144, 4194304)
    assert image.size == (512, 512) == image_size(png((1, 1)), None, 262144, 4194304)
    assert image.getpixel((100, 100)) == RED


def test_shrinking_keeps_the_picture() -> None:
    x, y = np.meshgrid(np.linspace(0, 255, 3000), np.linspace(0, 255, 2000))
    big = Image.fromarray(np.stack([x, y, 255 - x], axis=-1).astype(np.uint8))
    plain = np.asarray(big.resize((300, 200), Image.Resampling.BICUBIC)).astype(int)
    for content in (
        encoded(big, "JPEG", quality=95),
        encoded(big, "PNG"),
        encoded(big.convert("RGBA"), "PNG"),
    ):
        small = load_image(content, None, None, 60_000)
        assert small.size == (300, 200)
        assert np.abs(np.asarray(small).astype(int) - plain).mean() < 1.5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "image of 0 bytes is in no format"),
        (b"<html>not found</html>", "is in no format that can be read"),
        ({"bytes": None, "path": "gone.png"}, "gone.png does not exist"),
        ("gone/away.jpg", "gone/away.jpg does not exist"),
        ("x" * 5000 + "!", "does not exist"),
        ("a\0b", "does not exist"),
        ("https://example.com/a.png", "web address"),
        ("data:image/png;base64,!!!", "is in no format"),
        ({}, "holds none of"),
        (17, "cannot be a int"),
        (png((1, 300)), "1 x 300"),
    ],
)
def test_what_cannot_be_used_says_why(source: Any, reason: str) -> None:
    for read in (load_image, image_size):
        with pytest.raises(BadRow) as caught:
            read(source, None, None, None)
        assert reason in str(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_cut_off_file_is_one_bad_row(kind: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (90, 90, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(noise), kind)
    path = tmp_path / f"cut.{kind.lower()}"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadRow, match=r"cut\."):
        load(str(path))


@given(st.binary(max_size=300), st.integers(0, 60))
def test_no_bytes_bring_the_reader_down(noise: bytes, keep: int) -> None:
    try:
        assert load(png()[:keep] + noise).mode == "RGB"  # PNG's reader forgives a missing end
    except BadRow as error:
        assert "image of" in str(error)  # noqa: PT017  either outcome is right


def test_a_picture_over_100_megapixels_is_refused_by_its_header() -> None:
    # headers alone: the pixels are never made
    for size in ((10001, 10000), (20000, 20000)):
        header = bytearray(png((1, 1)))
        header[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")
        header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
        with pytest.raises(BadRow, match=r"pixels"):
            image_size(bytes(header), None, None, None)


MEASURE = """
import resource, sys
from seerl.data.images import load_image
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
image = load_image(sys.argv[1], None, 262144, 4194304)
print(image.size[0], image.size[1], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize(
    ("mode", "kind", "megabytes"),
    [("RGB", "JPEG", 120), ("RGBA", "PNG", 520), ("I;16", "PNG", 320), ("P", "PNG", 220)],
)
def test_100_megapixels_are_read_in_bounded_memory(
    mode: str, kind: str, megabytes: int, tmp_path: Path
) -> None:
    path = tmp_path / f"large.{kind.lower()}"
    Image.new(mode, (10000, 10000)).save(path, compress_level=1)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    width, height, peak = map(int, run.stdout.split())
    assert (width, height) == (2048, 2048)
    assert peak < megabytes
