import pytest

from pipelines.batch import settled


class Run:
    """A run directory of which a test says how it stands at each look."""

    def __init__(self, *looks):
        self._looks = list(looks)
        self.num_retries = 0

    def plan(self):
        return self._looks[0][0]

    def committed(self):
        return self._looks.pop(0)[1]


class Plan:
    def __init__(self, num_units, num_retries=0):
        self.units = [type("Unit", (), {"unit": number}) for number in range(num_units)]
        self.num_retries = num_retries


@pytest.mark.parametrize(
    ("looks", "times"),
    [
        ([(Plan(1), {0}), (Plan(1), {0})], 1),
        ([(Plan(2), {0}), (Plan(2), {0})], 1),  # whoever finishes it makes it
        ([(Plan(1), {0}), (Plan(2, 1), {0})], 1),  # a retry was added
        ([(Plan(1), {0}), (Plan(2, 1), {0, 1}), (Plan(2, 1), {0, 1}), (Plan(2, 1), {0, 1})], 2),  # and was done
        ([(Plan(2), {0}), (Plan(2), {0, 1}), (Plan(2), {0, 1}), (Plan(2), {0, 1})], 2),
    ],
)
def test_what_is_made_of_a_finished_run_is_made_again_where_the_run_has_changed(looks, times):
    made = []
    settled.until_settled(Run(*looks), lambda: made.append(1))
    assert len(made) == times
