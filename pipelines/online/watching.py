"""The endpoint's watch over its profiles: what it delivered lately, against what was tuned for.

It reads the ledger, and says what it finds to whoever started the endpoint.
"""

import threading
from collections.abc import Callable, Mapping

from peagle.errors import PeagleError
from peagle.tuning.watch import TunedWatch
from pipelines.online.cost import CostView

_WINDOW_S = 600.0


def watch_profiles(
    watches: Mapping[str, TunedWatch],
    view: CostView,
    stopped: threading.Event,
    say: Callable[[str], None],
    *,
    every_s: float = 60.0,
) -> None:
    """Until the endpoint stops, look at the last ten minutes now and then.

    Args:
        watches: by the name that clients use.
    """
    while not stopped.wait(every_s):
        try:
            by_model = view.report(window_s=_WINDOW_S)["by_model"]
        except PeagleError as error:
            say(f"the ledger cannot be read, so profiles are not watched now: {error}")
            continue
        for name, found in by_model.items():
            if name not in watches:
                continue
            for note in watches[name].new(
                num_drafts=found["num_drafts"],
                acceptance_length=found["acceptance_length"],
                concurrency=found["requests_at_once"],
            ):
                say(f"{name}: {note}")
