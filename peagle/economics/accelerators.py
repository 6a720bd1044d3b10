"""Names of accelerators: whether a price table's and a driver's mean the same one.

Catalogues write "A100-80GB" and "RTXPRO6000", drivers "NVIDIA A100-SXM4-80GB" and "NVIDIA RTX PRO 6000 Blackwell", Ray
"A100-80G". It knows names; it knows no prices.
"""

import re

_FORM = re.compile(r"SXM\d*")  # drivers put the form between the model and its memory
_OTHER_FORMS = {"PCIE", "NVL"}
_MEMORY = re.compile(r"(\d+)GB?")
# A catalogue's name without memory means the card that came first, where there are several.
_PLAIN_MEMORY = {"A100": "40GB"}


def is_accelerator(name: str | None, device_name: str) -> bool:
    """Whether a table's name and a driver's mean the same accelerator.

    A run of the device's words has to spell the name, so "L4" is no "NVIDIA L40S".

    >>> [is_accelerator(name, "NVIDIA A100-SXM4-80GB") for name in ("A100-80GB", "A100", None)]
    [True, False, False]
    """
    if name is None:
        return False
    words = _words(device_name)
    if _FORM.search(name.upper()) and not _OTHER_FORMS.isdisjoint(words):
        return False
    spelled = "".join(_words(name))
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    plain, memory = _PLAIN_MEMORY.get(spelled), [word for word in words if _MEMORY.fullmatch(word)]
    return spelled in runs and (plain is None or not memory or plain in memory)


def _words(name: str) -> list[str]:
    """The words of a name, without its form, and with memory in one spelling."""
    words = [word for word in re.findall(r"[A-Z0-9]+", name.upper()) if not _FORM.fullmatch(word)]
    return [_MEMORY.sub(r"\1GB", word) if _MEMORY.fullmatch(word) else word for word in words]
