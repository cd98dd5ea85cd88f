"""`Plan`, and the options it is made of. Made by `planner`; told, listed and drawn by others."""

from __future__ import annotations

from dataclasses import dataclass

from caravan.llm.needs import DeviceNeeds
from caravan.plan.pipeline import Setting


@dataclass(frozen=True, slots=True)
class Speed:
    """Of an option, with requests of one kind.

    Attributes:
        prompt: tokens of each request's prompt.
        concurrency: requests at a time.
        pp: tokens a second of all prompts together, which come at the same time.
        tg: tokens a second that all together write, in the middle of what they write.
        ttft: seconds until each request has its first token.
        speedup_pp, speedup_tg: against the best single device; nan if none fits.
    """

    prompt: int
    concurrency: int
    pp: float
    tg: float
    ttft: float
    speedup_pp: float
    speedup_tg: float


@dataclass(frozen=True, slots=True)
class Option:
    """Some devices in an order, with the best split.

    Attributes:
        devices: numbers in the cluster, in the order of the layers; each has some.
        counts: layers of each, the output layer counted with the last.
        needs: what each needs of its memory.
        fits: whether all have that. If not, there are no speeds.
        speeds: for each prompt and concurrency. Of the best options they are the simulator's; of
            others, where there are many, they are estimates.
        break_even: tokens of a prompt from which on a request alone has its first token sooner than
            on the best single device; 0: always, or there is none; None: never, as long as the
            context is, or, of options that are not among the best, up to 4096 tokens.
    """

    devices: tuple[int, ...]
    counts: tuple[int, ...]
    needs: tuple[DeviceNeeds, ...]
    fits: bool
    speeds: tuple[Speed, ...]
    break_even: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be done with a cluster.

    Attributes:
        names: of all devices of the cluster.
        single: the best single device that fits.
        options: the best first, those that do not fit last. Of these there are the single devices,
            and, where nothing fits, all devices as full as each other.
        best: the first, if it fits.
        curve: (tokens of a prompt, how many times as soon its first token is there with the best
            option of several devices as on the best single device); empty if there are not both.
        advice: a sentence for people.
    """

    setting: Setting
    names: tuple[str, ...]
    single: Option | None
    options: tuple[Option, ...]
    best: Option | None
    curve: tuple[tuple[int, float], ...]
    advice: str

    @property
    def several(self) -> Option | None:
        """The best option of several devices that fits."""
        return next((o for o in self.options if o.fits and len(o.devices) > 1), None)
