"""From whatever a data set holds for a picture to an RGB image of the right size, in bounded memory.

A picture may be bytes, `{bytes, path}`, a path (relative ones start from `image_dir`), a data URL, base64
text or a PIL image. What cannot be used raises BadRow with the reason.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from PIL import Image, ImageOps, UnidentifiedImageError

from seerl.data.bad_rows import BadRow

MAX_IMAGE_PIXELS = 100_000_000
"""Larger pictures are refused: reading one of these already takes up to about 550 MB."""
MAX_ASPECT_RATIO = 200
"""The limit of the Qwen-VL processors; no vision encoder makes sense of longer strips."""
BAND_PIXELS = 4_000_000
"""Large pictures are converted to RGB and shrunk in bands of about this many pixels."""

Image.MAX_IMAGE_PIXELS = MAX_IMAGE_PIXELS  # PIL itself refuses twice as much, before it allocates anything

_ORIENTATION = 0x0112  # the EXIF tag; values 5 to 8 swap width and height
_TURNED = (5, 6, 7, 8)
_SOURCE_KEYS = ("bytes", "path", "image", "url", "image_url", "base64")


def scaled_size(width: int, height: int, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """The size that keeps the aspect ratio and lies between `min_pixels` and `max_pixels` (None: no bound).

    Rounded up when enlarged and down when reduced, so that rounding does not leave the bounds; no side is
    under 1.
    """
    if max_pixels is not None and width * height > max_pixels:
        factor = math.sqrt(max_pixels / (width * height))
        # the cap matters for strips, whose short side cannot shrink below one pixel
        width, height = max(1, int(width * factor)), max(1, int(height * factor))
        return (
            (min(width, max_pixels // height), height)
            if width > height
            else (width, min(height, max_pixels // width))
        )
    if min_pixels is not None and width * height < min_pixels:
        factor = math.sqrt(min_pixels / (width * height))
        larger = math.ceil(width * factor), math.ceil(height * factor)
        if max_pixels is not None and larger[0] * larger[1] > max_pixels:
            return int(width * factor), int(height * factor)
        return larger
    return width, height


def image_size(
    source: Any, image_dir: str | None, min_pixels: int | None, max_pixels: int | None
) -> tuple[int, int]:
    """(width, height) that `load_image` would give, read from the file's header alone."""
    image = _open(source, image_dir)
    try:
        width, height = image.size
        if _orientation(image) in _TURNED:
            width, height = height, width
    finally:
        _close(image, source)
    return scaled_size(width, height, min_pixels, max_pixels)


def load_image(
    source: Any, image_dir: str | None, min_pixels: int | None, max_pixels: int | None
) -> Image.Image:
    """The picture as RGB, upright, of `min_pixels` to `max_pixels` pixels. First frame if animated."""
    image = _open(source, image_dir)
    rgb = None
    try:
        orientation = _orientation(image)
        target = scaled_size(*image.size, min_pixels, max_pixels)
        # JPEG can be decoded at 1/2, 1/4 or 1/8; twice the target keeps what the final filter needs
        if image.width > 2 * target[0]:
            image.draft(None, (2 * target[0], 2 * target[1]))
        rgb = _shrunk_rgb(image, target)
    except Exception as error:
        # on broken data PIL's readers raise almost any type: OSError, SyntaxError, struct.error, IndexError
        raise BadRow(f"{_describe(source)} cannot be decoded ({type(error).__name__}: {error})") from error
    finally:
        if rgb is not image:
            _close(image, source)
    if rgb.size != target:
        rgb = rgb.resize(target, Image.Resampling.BICUBIC)
    if orientation != 1:
        rgb.getexif()[_ORIENTATION] = orientation
        rgb = ImageOps.exif_transpose(rgb)
    return rgb


def _open(source: Any, image_dir: str | None) -> Image.Image:
    """The picture with its header read and nothing decoded; raises BadRow."""
    if isinstance(source, Image.Image):
        image = source
    else:
        content = _locate(source, image_dir)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", Image.DecompressionBombWarning
                )  # checked below, with the size
                image = Image.open(content)
        except FileNotFoundError as error:
            raise BadRow(f"image file {content} does not exist") from error
        except UnidentifiedImageError as error:
            raise BadRow(f"{_describe(source)} is in no format that can be read, or damaged") from error
        except Exception as error:  # as in load_image
            raise BadRow(
                f"{_describe(source)} is not a readable image ({type(error).__name__}: {error})"
            ) from error
    width, height = image.size
    if width * height == 0:
        raise BadRow(f"{_describe(source)} is empty ({width} x {height} pixels)")
    if width * height > MAX_IMAGE_PIXELS:
        _close(image, source)
        raise BadRow(
            f"{_describe(source)} has {width} x {height} = {width * height:,} pixels; at most "
            f"{MAX_IMAGE_PIXELS:,} are read"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        _close(image, source)
        raise BadRow(
            f"{_describe(source)} is {width} x {height}: one side is more than {MAX_ASPECT_RATIO} times "
            "the other"
        )
    return image


def _close(image: Image.Image, source: Any) -> None:
    if image is not source:  # a PIL image of the caller's stays usable
        image.close()


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # broken EXIF data says nothing about the pixels, which may be fine
        return 1
    return value if value in range(2, 9) else 1


def _locate(source: Any, image_dir: str | None) -> io.BytesIO | Path:
    """The bytes or the file that a data set's entry stands for; raises BadRow."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if isinstance(source, dict):
        for key in _SOURCE_KEYS:
            if source.get(key):  # {bytes: None, path: ...} is how data sets refer to files
                return _locate(source[key], image_dir)
        raise BadRow(
            f"image entry with the keys {sorted(map(str, source))} holds none of {', '.join(_SOURCE_KEYS)}"
        )
    if isinstance(source, Path):
        source = str(source)
    if isinstance(source, str):
        return _locate_text(source, image_dir)
    raise BadRow(f"an image cannot be a {type(source).__name__}")


def _locate_text(text: str, image_dir: str | None) -> io.BytesIO | Path:
    if text.startswith("data:"):
        _, _, payload = text.partition(",")
        return io.BytesIO(_from_base64(payload) or b"")
    if text.startswith(("http://", "https://")):
        raise BadRow(f"image {text[:200]} is a web address; download it and give its path")
    if text.startswith("file://"):
        text = unquote(urlparse(text).path)
    path = Path(image_dir or ".") / text  # an absolute path replaces image_dir
    # longer than any path can be: not worth asking the file system, which would raise
    if len(text) < 4096 and "\0" not in text and _is_file(path):
        return path
    content = _from_base64(text)
    if content is not None and len(text) >= 64:
        return io.BytesIO(content)
    raise BadRow(f"image file {str(path)[:300]} does not exist; relative paths start from data.image_dir")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long is base64, or nothing
        return False


def _from_base64(text: str) -> bytes | None:
    compact = re.sub(r"\s+", "", unquote(text) if "%" in text else text).replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _describe(source: Any) -> str:
    if isinstance(source, dict):
        source = source.get("path") or next((source[key] for key in _SOURCE_KEYS if source.get(key)), None)
    if isinstance(source, str) and len(source) < 300 and not source.startswith("data:"):
        return f"image {source}"
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"image of {len(source):,} bytes"
    return f"image ({type(source).__name__})"


def _shrunk_rgb(image: Image.Image, target: tuple[int, int]) -> Image.Image:
    """RGB, and reduced by a whole factor while at least twice `target`; a large picture is not held twice."""
    scale = _sample_scale(image)
    factor = max(1, min(image.width // (2 * target[0]), image.height // (2 * target[1])))
    if image.width * image.height <= BAND_PIXELS:
        rgb = _to_rgb(image, scale)
        return rgb.reduce(factor) if factor > 1 else rgb
    width, height = image.size
    result = Image.new("RGB", (-(-width // factor), -(-height // factor)))
    rows = max(1, BAND_PIXELS // width // factor) * factor
    for top in range(0, height, rows):
        band = _to_rgb(image.crop((0, top, width, min(top + rows, height))), scale)
        result.paste(band.reduce(factor) if factor > 1 else band, (0, top // factor))
    return result


def _sample_scale(image: Image.Image) -> tuple[float, float]:
    """(factor, offset) that bring samples deeper than 8 bits to 0..255, over the whole picture alike."""
    if image.mode.startswith("I;16"):
        return 1 / 257, 0.0
    if image.mode not in ("I", "F"):
        return 1.0, 0.0
    low, high = (float(value) for value in image.getextrema())  # type: ignore[arg-type]  # one band
    if image.mode == "F" and low >= 0 and high <= 1:
        return 255.0, 0.0
    if low >= 0 and high <= 255:
        return 1.0, 0.0
    if low >= 0 and high <= 65535 and image.mode == "I":
        return 1 / 257, 0.0
    return 255 / max(high - low, 1e-12), -255 * low / max(high - low, 1e-12)


def _to_rgb(image: Image.Image, scale: tuple[float, float]) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith(("I", "F")):
        # by way of floats: PIL's own conversion cuts values over 255 instead of scaling them
        factor, offset = scale
        return image.convert("F").point(lambda value: value * factor + offset).convert("L").convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")
