"""Numbers between bounds, digit by digit. Called by `kinds`."""

from __future__ import annotations

from decimal import Decimal

# Digits that a number may have: more would be lost where it is read.
_DIGITS = 16
_MORE = 6


def integers(low: int | None, high: int | None) -> list[str]:
    """The choices for a whole number from `low` to `high`; none if there is none."""
    found: list[str] = []
    if low is None or low < 0:
        largest = None if low is None else -low
        least = 1 if high is None or high >= 0 else -high
        found += [f'"-" {choice}' for choice in _naturals(least, largest)]
    if high is None or high >= 0:
        found += _naturals(max(low or 0, 0), high)
    return found


def _naturals(low: int, high: int | None) -> list[str]:
    if high is None:
        high = 10 ** max(_DIGITS, len(str(low)) + 1) - 1
        if low <= 1:
            zero = ['"0"'] if low == 0 else []
            return [*zero, f"[1-9] [0-9]{{0,{_DIGITS - 1}}}"]
    found: list[str] = []
    while low <= high:
        length = len(str(low))
        end = min(high, 10**length - 1)
        found += _same_length(str(low), str(end))
        low = end + 1
    return found


def _same_length(low: str, high: str) -> list[str]:
    """The choices for the digits from `low` to `high`."""
    if low == high:
        return [f'"{low}"'] if low else [""]
    if set(low) == {"0"} and set(high) == {"9"}:
        return [_any(len(low))]
    if low[0] == high[0]:
        return [_join(f'"{low[0]}"', rest) for rest in _same_length(low[1:], high[1:])]
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    found: list[str] = []
    if low[1:].strip("0"):
        found += [_join(f'"{first}"', more) for more in _same_length(low[1:], "9" * rest)]
        first += 1
    tail: list[str] = []
    if high[1:].strip("9"):
        tail = [_join(f'"{last}"', more) for more in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        found.append(_join(_digit(first, last), _any(rest)))
    return found + tail


def _digit(low: int, high: int) -> str:
    return f"[{low}-{high}]" if low < high else f'"{low}"'


def _any(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def after_rest(rest: int, names: list[str], first: bool = False) -> list[str]:
    """The choices for the digits behind a number that leaves `rest` when divided by the number of
    `names`; these are the rules behind one that leaves so much. Together they leave nothing."""
    by_name: dict[str, list[int]] = {}
    for digit in range(10):
        by_name.setdefault(names[(10 * rest + digit) % len(names)], []).append(digit)
    found = ['"0"'] if first else ['""'] if rest == 0 else []
    for name, digits in by_name.items():
        kept = [digit for digit in digits if digit or not first]
        if kept:
            found.append(f"[{''.join(map(str, kept))}] {name}")
    return found


def decimals(
    low: Decimal | None, high: Decimal | None, without_low: bool, without_high: bool
) -> list[str]:
    """The choices for any number between bounds, which belong to it or not."""
    found: list[str] = []
    if low is None or low < 0:
        # -0 is 0
        below = high is not None and high <= 0
        least = -high if high is not None and below else Decimal(0)
        largest = None if low is None else -low
        without = (without_high and below, without_low)
        found += [f'"-" {choice}' for choice in _magnitudes(least, largest, *without)]
    if high is None or high >= 0:
        above = low is not None and low >= 0
        least = low if low is not None and above else Decimal(0)
        found += _magnitudes(least, high, without_low and above, without_high)
    return found


def _magnitudes(
    low: Decimal, high: Decimal | None, without_low: bool, without_high: bool
) -> list[str]:
    """The choices for a number from 0 up."""
    if high is not None and (low > high or (low == high and (without_low or without_high))):
        return []
    whole, rest = _parts(low)
    top, top_rest = _parts(high) if high is not None else (None, "")
    if whole == top:
        between = _between(rest, top_rest, without_low, without_high)
        return [_join(f'"{whole}"', more) for more in between]
    found = [_join(f'"{whole}"', more) for more in _from(rest, without_low)]
    inner = _naturals(whole + 1, None if top is None else top - 1)
    found += [f"{choice} {_FRACTION}" for choice in inner]
    if top is not None:
        found += [_join(f'"{top}"', more) for more in _upto(top_rest, without_high)]
    return found


_FRACTION = f'("." [0-9]{{1,{_DIGITS - 1}}})?'


def _parts(value: Decimal) -> tuple[int, str]:
    """The whole number, and the digits behind the point."""
    whole = int(value)
    digits = format(value - whole, "f").partition(".")[2].rstrip("0")
    return whole, digits


def _from(digits: str, without: bool) -> list[str]:
    """The choices for a fraction that is these digits or more."""
    if not digits:
        return [_FRACTION] if not without else ['"." "0"{0,6} [1-9] [0-9]{0,8}']
    return [f'"." {choice}' for choice in _digits_from(digits, without)]


def _digits_from(digits: str, without: bool) -> list[str]:
    if not digits:
        more = f"[0-9]{{0,{_MORE}}}"
        return [more if not without else f'"0"{{0,{_MORE}}} [1-9] {more}']
    first = int(digits[0])
    found = [_join(f'"{first}"', more) for more in _digits_from(digits[1:], without)]
    if first < 9:
        found.append(f"{_digit(first + 1, 9)} [0-9]{{0,{_DIGITS - 2}}}")
    return found


def _upto(digits: str, without: bool) -> list[str]:
    """The choices for a fraction that is these digits or less, or none."""
    if not digits:
        return [] if without else ['("." "0"{1,6})?']
    return ["", *(f'"." {choice}' for choice in _digits_upto(digits, without))]


def _digits_upto(digits: str, without: bool) -> list[str]:
    """The digits are not all 0."""
    if not digits:
        return [] if without else [f'"0"{{0,{_MORE}}}']
    first = int(digits[0])
    found = [_join(f'"{first}"', more) for more in _digits_upto(digits[1:], without)]
    if digits[1:]:
        found.append(f'"{first}"')
    if first > 0:
        found.append(f"{_digit(0, first - 1)} [0-9]{{0,{_DIGITS - 2}}}")
    return found


def _between(low: str, high: str, without_low: bool, without_high: bool) -> list[str]:
    """The choices for a fraction from `low` to `high`, which are not the same or both belong."""
    width = max(len(low), len(high)) + 1
    first, last = int(low.ljust(width, "0")), int(high.ljust(width, "0"))
    found = [] if without_low or low else [""]
    first += without_low
    last -= without_high
    if first > last:
        return found
    digits = (str(edge).zfill(width) for edge in (first, last))
    return found + [f'"." {choice}' for choice in _digits_between(*digits)]


def _digits_between(low: str, high: str) -> list[str]:
    """The choices for a fraction between two, which belong to it and have as many digits."""
    if not low:
        return [f'"0"{{0,{_MORE}}}']
    first, last = int(low[0]), int(high[0])
    low, high = low[1:], high[1:]
    if first == last:
        bare = [f'"{first}"'] if low and not low.strip("0") else []
        return bare + [_join(f'"{first}"', more) for more in _digits_between(low, high)]
    found = [_join(f'"{first}"', more) for more in _digits_from(low.rstrip("0"), False)]
    if first + 1 < last:
        found.append(f"{_digit(first + 1, last - 1)} [0-9]{{0,{_DIGITS - 2}}}")
    high = high.rstrip("0")
    bare = [f'"{last}"'] if high else []
    return found + bare + [_join(f'"{last}"', more) for more in _digits_upto(high, False)]
