"""KEY=VALUE pairs of flags, headers and variables."""

from collections.abc import Callable, Iterable


def parse_pairs(
    pairs: Iterable[object], *, form: str = "KEY=VALUE", spelling: Callable[[str], str] = str
) -> dict[str, str]:
    """Return values by key. Blanks around a key are removed, values stay unchanged. Invalid pairs raise ValueError.

    `form` is how messages describe a pair; `spelling` normalises a key.

    >>> parse_pairs(["team=search", "filter=a=b"])
    {'team': 'search', 'filter': 'a=b'}
    """
    values: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = str(pair).partition("=")
        name = spelling(key.strip())
        if not sign or not name:
            raise ValueError(f"{pair!r} is not {form}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = value
    return values
