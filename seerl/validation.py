"""Validation: the held-out rows answered with their own sampling, scored, and summed up row by row."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from seerl.experience import sample_and_score
from seerl.run import Run
from seerl.timing import StageTimer
from seerl.types import Generation, ScoredGroup

log = logging.getLogger(__name__)


async def validate(run: Run) -> tuple[dict[str, float], list[Generation]]:
    """Answers every validation row; returns the figures and the answers to log."""
    assert run.validation_set is not None
    timer = StageTimer()
    groups: list[ScoredGroup] = []
    generations: list[Generation] = []
    wanted = run.config.trainer.val_generations_to_log
    with timer.stage("val"):
        for prompts in run.validation_set:
            scored = await sample_and_score(run.engine, run.scorer, prompts, run.validation_sampling, timer)
            for group in scored:
                if len(generations) < wanted:
                    generations.append(_generation(run, group))
                groups.append(_without_media(group))
    if not groups:
        log.warning("no answer of the validation could be scored: it has no figures, see the errors above")
    return {**validation_metrics(groups), "timing_s/val": timer.take()["val"]}, generations


def _without_media(group: ScoredGroup) -> ScoredGroup:
    """The figures need no pictures: a large set's are let go batch by batch."""
    return replace(group, prompt=replace(group.prompt, media=None))


def validation_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """How many rows were scored, and means over them: each score, and with several answers a row mean@n and
    best@n."""
    if not groups:
        return {"val/rows": 0.0}
    lengths = [c.token_ids.size for g in groups for c in g.completions]
    answers = max(len(g.completions) for g in groups)
    metrics = {
        "val/reward_score": _row_mean([[s.overall for s in g.scores] for g in groups]),
        "val_response_length/mean": float(np.mean(lengths)),
        "val_response_length/clip_ratio": float(
            np.mean([c.finish_reason == "length" for g in groups for c in g.completions])
        ),
        "val/rows": float(len(groups)),
    }
    names = sorted({name for g in groups for s in g.scores for name in s.parts})
    for name in ["overall", *names]:
        rows = [
            [s.overall if name == "overall" else s.parts.get(name, 0.0) for s in g.scores] for g in groups
        ]
        if name != "overall":
            metrics[f"val/{name}_reward"] = _row_mean(rows)
        if answers > 1:
            metrics[f"val/{name}/mean@{answers}"] = _row_mean(rows)
            metrics[f"val/{name}/best@{answers}"] = float(np.mean([max(row) for row in rows]))
    return metrics


def _row_mean(rows: Sequence[Sequence[float]]) -> float:
    """The mean over rows of each row's mean: a row with answers left unscored counts as much as any other."""
    return float(np.mean([np.mean(row) for row in rows]))


def _generation(run: Run, group: ScoredGroup) -> Generation:
    completion, score = group.completions[0], group.scores[0]
    truth = group.prompt.ground_truth
    return Generation(
        row_id=group.prompt.row_id,
        prompt=group.prompt.text,
        response=run.decode(completion.token_ids.tolist(), False),
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str),
        score=score.overall,
        parts=score.parts,
        images=group.prompt.media.images if group.prompt.media else (),
    )
