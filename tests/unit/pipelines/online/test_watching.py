"""The endpoint's watch over its profiles: it asks the ledger, speaks once, and ends with the endpoint."""

from peagle.errors import PeagleError
from pipelines.online.watching import watch_profiles


class Stop:
    """Says no so many times."""

    def __init__(self, num_looks):
        self.left = num_looks

    def wait(self, timeout):
        self.left -= 1
        return self.left < 0


class Ledger:
    def __init__(self, *reports):
        self._reports = list(reports)

    def report(self, *, window_s):
        found = self._reports.pop(0)
        if isinstance(found, Exception):
            raise found
        return {"by_model": found}


class Watch:
    def __init__(self):
        self.given = []

    def new(self, **figures):
        self.given.append(figures)
        return [f"look {len(self.given)}"]


FIGURES = {"num_drafts": 900, "acceptance_length": 1.2, "requests_at_once": 7.5}


def test_each_look_hands_the_figures_of_its_model_on():
    watch, said = Watch(), []
    ledger = Ledger({"m": FIGURES, "other": FIGURES}, {})
    watch_profiles({"m": watch}, ledger, Stop(2), said.append)
    assert watch.given == [{"num_drafts": 900, "acceptance_length": 1.2, "concurrency": 7.5}]
    assert said == ["m: look 1"]


def test_a_ledger_that_cannot_be_read_does_not_end_the_endpoint():
    watch, said = Watch(), []
    watch_profiles({"m": watch}, Ledger(PeagleError("torn"), {"m": FIGURES}), Stop(2), said.append)
    assert "torn" in said[0]
    assert said[1] == "m: look 1"
