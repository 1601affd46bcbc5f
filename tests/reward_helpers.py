"""Groups of plain text answers, and a scorer that reads token ids as characters."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from seerl.config.schema import RewardConfig
from seerl.reward.scorer import Scorer
from seerl.types import Completion, Group, Media, Prompt, ScoredGroup


def group_of(
    *responses: str,
    truth: Any = "4",
    uid: str = "row-0@0",
    columns: Mapping[str, Any] | None = None,
    image: Image.Image | None = None,
) -> Group:
    """A group whose completions decode to these texts."""
    one = np.array([1], dtype=np.int64)
    prompt = Prompt(
        uid=uid,
        row_id="data.jsonl:0",
        token_ids=one,
        text="What is 2 + 2?",
        ground_truth=truth,
        columns=columns or {},
        media=Media(images=(image,), unexpanded_token_ids=one) if image else None,
    )
    completions = tuple(
        Completion(
            token_ids=np.array([ord(c) for c in response], dtype=np.int64),
            logprobs=None,
            finish_reason="stop",
            weight_version=0,
        )
        for response in responses
    )
    return Group(prompt=prompt, completions=completions)


@contextmanager
def scorer_of(reward: Any, **settings: Any) -> Iterator[Scorer]:
    """A running scorer; `reward` as in `worker.reward.reward_function`."""
    settings = {"num_workers": 1, "timeout_s": 30, **settings}
    scorer = Scorer(RewardConfig(reward_function=reward, **settings), _decode)
    try:
        yield scorer
    finally:
        scorer.close()


def _decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
    assert skip_special_tokens
    return "".join(map(chr, ids))


def write(folder: Path, code: str, name: str = "reward.py") -> str:
    """A reward file with this code; the path."""
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


def score_all(scorer: Scorer, *groups: Group) -> list[ScoredGroup | None]:
    """Scores the groups concurrently."""

    async def together() -> list[ScoredGroup | None]:
        return list(await asyncio.gather(*(scorer.score(g) for g in groups)))

    return asyncio.run(together())


def overalls(scorer: Scorer, group: Group) -> list[float]:
    """The rewards of one group, which must have been scored."""
    [scored] = score_all(scorer, group)
    assert scored is not None
    return [s.overall for s in scored.scores]
