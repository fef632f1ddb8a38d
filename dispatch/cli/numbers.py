"""Reading a list of numbers that the user gave."""

from __future__ import annotations

from dispatch.errors import ConfigError


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """ "8,1,8" as (1, 8): ascending, each once. Raises ConfigError that names the flag."""
    try:
        numbers = sorted({int(item) for item in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ConfigError(f"{flag} {text!r}: must be whole numbers above 0, separated by commas")
    return tuple(numbers)
