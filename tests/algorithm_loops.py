"""The algorithms a second time: plain Python over lists of responses, written from the formulas alone.

A response is a list of token values; a group is a list of response numbers. Slow and obvious on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Values = list[list[float]]  # per response, per token


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1)


def std(values: Sequence[float]) -> float:
    return math.sqrt(variance(values)) if len(values) > 1 else 0.0


def all_equal(values: Sequence[float]) -> bool:
    return all(v == values[0] for v in values)


def whitened(rows: Values) -> Values:
    flat = [v for row in rows for v in row]
    if len(flat) < 2 or all_equal(flat):
        return [[0.0] * len(row) for row in rows]
    middle, scale = mean(flat), math.sqrt(variance(flat) + 1e-8)
    return [[(v - middle) / scale for v in row] for row in rows]


def advantage(
    name: str,
    token_rewards: Values,
    groups: list[list[int]],
    *,
    gamma: float = 1.0,
    components: dict[str, list[float]] | None = None,
    weights: dict[str, float] | None = None,
) -> Values:
    rewards = [math.fsum(row) for row in token_rewards]
    lengths = [len(row) for row in token_rewards]
    if name == "reinforce_plus_plus":
        return whitened([_discounted(row, gamma) for row in token_rewards])
    result = [0.0] * len(rewards)
    for group in groups:
        own = [rewards[i] for i in group]
        for i in group:
            result[i] = _one_advantage(name, i, group, rewards, lengths, components, weights)
        if name != "gdpo" and all_equal(own):
            for i in group:
                result[i] = 0.0
    rows = [[value] * length for value, length in zip(result, lengths, strict=True)]
    if name not in ("reinforce_plus_plus_baseline", "gdpo"):
        return rows
    rows = whitened(rows)
    for group in groups:
        looked_at = list((components or {}).values()) if name == "gdpo" else []
        if all(all_equal([values[i] for i in group]) for values in looked_at or [rewards]):
            for i in group:
                rows[i] = [0.0] * lengths[i]
    return rows


def _discounted(row: list[float], gamma: float) -> list[float]:
    return [math.fsum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]


def _normal(i: int, group: list[int], values: list[float]) -> float:
    own = [values[j] for j in group]
    return 0.0 if all_equal(own) else (values[i] - mean(own)) / (std(own) + 1e-6)


def _one_advantage(
    name: str,
    i: int,
    group: list[int],
    rewards: list[float],
    lengths: list[int],
    components: dict[str, list[float]] | None,
    weights: dict[str, float] | None,
) -> float:
    own = [rewards[j] for j in group]
    others = [rewards[j] for j in group if j != i]
    if name == "grpo":
        return _normal(i, group, rewards)
    if name in ("dr_grpo", "reinforce_plus_plus_baseline"):
        return rewards[i] - mean(own)
    if name == "grpo_passk":
        return max(0.0, rewards[i] - max(others)) / (std(own) + 1e-6) if others else 0.0
    if name == "rloo":
        return rewards[i] - mean(others) if others else 0.0
    if name == "opo":
        weighted = math.fsum(lengths[j] * rewards[j] for j in group)
        return rewards[i] - weighted / sum(lengths[j] for j in group)
    assert name == "gdpo"
    parts = components or {"": rewards}
    return math.fsum((weights or {}).get(n, 1.0) * _normal(i, group, v) for n, v in parts.items())


def clipped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def loss(
    name: str,
    p: Values,
    q: Values,
    advantages: Values,
    *,
    low: float,
    high: float,
    dual: float,
    tau_positive: float,
    tau_negative: float,
) -> Values:
    """Token losses of every response; all tokens count."""
    rows = []
    for p_i, q_i, a_i in zip(p, q, advantages, strict=True):
        difference = [x - y for x, y in zip(p_i, q_i, strict=True)]
        sequence = math.exp(clipped(mean(difference), -20, 20))
        row = []
        for t, a in enumerate(a_i):
            rho = math.exp(clipped(difference[t], -20, 20))
            if name == "default":
                value = _ppo(rho, a, low, high, dual)
            elif name in ("gspo", "gspo_token"):
                value = _ppo(sequence, a, low, high, dual)
            elif name == "cispo":
                value = -a * p_i[t] * clipped(rho, 1 - low, 1 + high)
            elif name == "sapo":
                tau = tau_positive if a >= 0 else tau_negative
                value = -a * (4 / tau) / (1 + math.exp(-tau * (rho - 1)))
            elif name == "gmpo":
                held = [
                    min(d, math.log(1 + high)) if b >= 0 else max(d, math.log(1 - low))
                    for d, b in zip(difference, a_i, strict=True)
                ]
                geometric = math.exp(clipped(mean(held), -20, 20))
                value = min(-a * geometric, -a * dual) if a < 0 else -a * geometric
            else:
                assert name == "gpg"
                value = -a * p_i[t]
            row.append(value)
        rows.append(row)
    return rows


def _ppo(rho: float, a: float, low: float, high: float, dual: float) -> float:
    value = max(-a * rho, -a * clipped(rho, 1 - low, 1 + high))
    return min(value, -a * dual) if a < 0 else value


def average(mode: str, losses: Values, masks: list[list[bool]], max_response_length: int) -> float:
    """The average over the whole step, a response counting even if none of its tokens does."""
    kept = [[v for v, m in zip(row, mask, strict=True) if m] for row, mask in zip(losses, masks, strict=True)]
    total = math.fsum(v for row in kept for v in row)
    if mode == "token":
        return total / sum(len(row) for row in kept)
    if mode == "seq":
        return math.fsum(mean(row) for row in kept if row) / len(kept)
    if mode == "seq_sum":
        return total / len(kept)
    assert mode == "seq_sum_norm"
    return total / (len(kept) * max_response_length)


def kl(name: str, p: float, f: float) -> float:
    if name == "kl":
        return p - f
    if name == "abs":
        return abs(p - f)
    if name == "mse":
        return (p - f) ** 2 / 2
    assert name == "low_var_kl"
    d = clipped(f - p, -20, 20)
    return clipped(math.exp(d) - d - 1, -10, 10)
