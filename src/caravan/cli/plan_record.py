"""A plan as JSON: all that is known of the devices, the model's work, and all choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from caravan.backend import RemoteDevice
    from caravan.llm import ContextParams
    from caravan.plan.options import Plan
    from caravan.plan.verify import Check
    from caravan.plan.work import ModelWork


def record(
    path: Path,
    context: ContextParams,
    plan: Plan,
    work: ModelWork,
    devices: Sequence[RemoteDevice],
    rows: Sequence[Check] | None,
) -> dict[str, Any]:
    """One object; what is infinite or not known is null.

    Args:
        context: of one request.
        devices: those that are there; none for a described cluster.
        rows: what was verified; None: nothing was.
    """
    setting = plan.setting
    cluster = setting.cluster
    places = {device.name: (device.endpoint, device.description) for device in devices}
    found = {
        "model": str(path),
        "context": context,
        "advice": plan.advice,
        "devices": [
            {
                **asdict(profile),
                "endpoint": places.get(profile.name, (None, None))[0],
                "description": places.get(profile.name, (None, None))[1],
                "to_head": cluster.to_head[number],
                "times": setting.times[number],
            }
            for number, profile in enumerate(cluster.devices)
        ],
        "links": [
            {"source": cluster.devices[a].name, "target": cluster.devices[b].name, **asdict(link)}
            for (a, b), link in cluster.between.items()
        ],
        "n_layer": setting.n_layer,
        "traffic": setting.traffic,
        "head": setting.head,
        "work": {
            "prompt": _work(work, setting.n_ubatch, setting.n_ctx, "prompt"),
            "decode": _work(work, 1, setting.n_ctx, "decode"),
        },
        "single": plan.single and _option(plan, plan.single),
        "best": plan.best and _option(plan, plan.best),
        "options": [_option(plan, option) for option in plan.options],
        "curve": [{"prompt": n, "speedup": speedup} for n, speedup in plan.curve],
    }
    if rows is not None:
        found["verified"] = [{**asdict(check), "error": check.error} for check in rows]
    plain: dict[str, Any] = _plain(found)
    return plain


def _work(work: ModelWork, n_tokens: int, n_kv: int, kind: str) -> dict[str, Any]:
    """Of one micro-batch, layer by layer, the output layer last."""
    return {"n_tokens": n_tokens, "n_kv": n_kv, "layers": work.layer_work(n_tokens, n_kv, kind)}


def _option(plan: Plan, option: Any) -> dict[str, Any]:
    return {**asdict(option), "devices": [plan.names[number] for number in option.devices]}


def _plain(value: Any) -> Any:
    """What JSON has words for."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
