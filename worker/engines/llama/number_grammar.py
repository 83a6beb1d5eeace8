"""GBNF of the whole and decimal numbers in a range: digit by digit, as grammars can't compare.

A range takes its numbers of up to fifteen digits; an exponent is only written where there is no range. Bounds have
at most fifteen digits before the point and twelve after it. Pure; any thread.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

ANY_INTEGER = '"-"? ("0" | [1-9] [0-9]{0,15})'
ANY_NUMBER = f'{ANY_INTEGER} ("." [0-9]{{1,16}})? ([eE] [-+]? [0-9]{{1,2}})?'
_DIGITS = 15


def integer_between(low: int | None, high: int | None) -> str:
    """Return GBNF of the whole numbers from `low` to `high`, both included; None is without that bound."""
    if low is None and high is None:
        return ANY_INTEGER
    low, high = _bounded(low, high)
    options: list[str] = []
    if low < 0:
        options.append(f'"-" {_digits(max(1, -high), -low)}')
    if high >= 0:
        options.append(_digits(max(0, low), high))
    return _any_of(options)


def number_between(low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool) -> str:
    """Return GBNF of the decimal numbers in a range; open: without that bound itself."""
    if low is None and high is None:
        return ANY_NUMBER
    if low is None or high is None:
        whole = _bounded(
            None if low is None else int(low.to_integral_value(ROUND_FLOOR)),
            None if high is None else int(high.to_integral_value(ROUND_CEILING)),
        )
        low = Decimal(whole[0]) if low is None else low
        high = Decimal(whole[1]) if high is None else high
    options: list[str] = []
    if low < 0:
        # Mirrored: the nearest to zero is the lowest without a sign. Zero itself has none.
        nearest, nearest_open = (high.copy_negate(), high_open) if high < 0 else (Decimal(0), True)
        options += [
            f'"-" {option}' for option in _positive(nearest, low.copy_negate(), nearest_open, low_open)
        ]
    if high >= 0:
        options += _positive(max(low, Decimal(0)), high, low_open and low >= 0, high_open)
    return _any_of(options)


def _bounded(low: int | None, high: int | None) -> tuple[int, int]:
    # Without a bound: as many digits as other numbers may have.
    largest = 10 ** (_DIGITS + 1) - 1
    if low is None:
        low = min(-largest, 10 * (high or 0))
    if high is None:
        high = max(largest, 10 * low)
    return low, high


def _positive(low: Decimal, high: Decimal, low_open: bool, high_open: bool) -> list[str]:
    places = max(1, _places(low), _places(high))
    first, first_open = _scaled(low, 0, ROUND_CEILING, low_open)
    last, last_open = _scaled(high, 0, ROUND_FLOOR, high_open)
    options: list[str] = []
    if first + first_open <= last - last_open:
        options.append(_digits(first + first_open, last - last_open))
    start, start_open = _scaled(low, places, ROUND_CEILING, low_open)
    end, end_open = _scaled(high, places, ROUND_FLOOR, high_open)
    # A number is `start` … `end` in units of the last place, and what may follow it.
    more = max(1, _DIGITS - len(str(end)))
    if start_open and start < end:
        # What follows an excluded bound isn't all zeros.
        zeros = f'"0"{{0,{more // 2}}} ' if more > 1 else ""
        rest = f" [0-9]{{0,{more - 1 - more // 2}}}" if more > 2 else ""
        options.append(f"{_digits(start, start, places)} {zeros}[1-9]{rest}")
        start += 1
    if start <= end - 1:
        options.append(f"{_digits(start, end - 1, places)} [0-9]{{0,{more}}}")
    if start <= end and not end_open:
        options.append(f'{_digits(end, end, places)} "0"{{0,{more}}}')
    return options


def _places(number: Decimal) -> int:
    exponent = number.normalize().as_tuple().exponent
    return -exponent if isinstance(exponent, int) and exponent < 0 else 0


def _scaled(number: Decimal, places: int, rounding: str, opened: bool) -> tuple[int, bool]:
    # A bound that lies between two steps is passed by rounding; then nothing is left to exclude.
    exact = number.scaleb(places)
    whole = exact.to_integral_value(rounding)
    return int(whole), opened and whole == exact


def _digits(low: int, high: int, places: int = 0) -> str:
    """Return GBNF of the digits of low … high, not negative, with a point before the last `places`."""
    options: list[str] = []
    while low <= high:
        text = str(low).zfill(places + 1)
        longest = min(high, 10 ** len(text) - 1)
        options.append(_same_length(_pointed(text, places), _pointed(str(longest).zfill(len(text)), places)))
        low = longest + 1
    return _any_of(options)


def _pointed(text: str, places: int) -> str:
    return f"{text[:-places]}.{text[-places:]}" if places else text


def _same_length(low: str, high: str) -> str:
    shared = next((at for at, pair in enumerate(zip(low, high, strict=True)) if pair[0] != pair[1]), len(low))
    if shared:
        rest = _same_length(low[shared:], high[shared:]) if shared < len(low) else ""
        return f'"{low[:shared]}" {rest}'.rstrip()
    lowest, highest = int(low[0]), int(high[0])
    nines, zeros = re.sub(r"\d", "9", low[1:]), re.sub(r"\d", "0", low[1:])
    options: list[str] = []
    if low[1:] != zeros:
        options.append(f'"{lowest}" {_same_length(low[1:], nines)}')
        lowest += 1
    last = ""
    if high[1:] != nines:
        last = f'"{highest}" {_same_length(zeros, high[1:])}'
        highest -= 1
    if lowest <= highest:
        options.append(f"[{lowest}-{highest}] {_any_digits(low[1:])}".rstrip())
    return _any_of([*options, *([last] if last else [])])


def _any_digits(shape: str) -> str:
    before, point, after = shape.partition(".")
    counted = [f"[0-9]{{{len(run)}}}" if run else "" for run in (before, after)]
    return " ".join(part for part in (counted[0], '"."' if point else "", counted[1]) if part)


def _any_of(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
