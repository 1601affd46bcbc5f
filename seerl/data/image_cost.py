"""How many tokens an image takes, from its size alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image

from seerl.data.bad_rows import BadRow

if TYPE_CHECKING:
    from seerl.data.prompts import PromptBuilder


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
