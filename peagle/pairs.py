"""KEY=VALUE pairs, as flags, headers and variables give them."""

from collections.abc import Callable, Iterable


def parse_pairs(
    pairs: Iterable[object], *, form: str = "KEY=VALUE", spelling: Callable[[str], str] = str
) -> dict[str, str]:
    """Values by key. Blanks around a key are no part of it; a value stays as it is.

    Args:
        form: the pair as a message names it.
        spelling: brings a key that may be written in several ways to one of them.

    Raises:
        ValueError: a pair has no "=" or no key, or a key is given twice.

    >>> parse_pairs(["team=search", "filter=a=b"])
    {'team': 'search', 'filter': 'a=b'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = str(pair).partition("=")
        name = spelling(key.strip())
        if not sign or not name:
            raise ValueError(f"{pair!r} is not {form}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return found
