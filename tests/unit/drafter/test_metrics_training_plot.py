from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from peagle.drafter.metrics import TrainingProgress, training_plot

SVG = "{http://www.w3.org/2000/svg}"
STEP = TrainingProgress(
    step=1,
    num_steps=2000,
    loss=4.0,
    accuracy=(0.5, 0.2, None),
    accepted=(0.5, 0.1, None),
    divergence=(4.0, 5.0, None),
    learning_rate=1e-3,
    gradient_norm=1.0,
    num_tokens=100,
    tokens_per_s=10.0,
    train_s=10.0,
)


def _steps(losses: Sequence[float]) -> list[TrainingProgress]:
    return [replace(STEP, step=place + 1, loss=loss) for place, loss in enumerate(losses)]


def _panels(plot: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(plot).iter(f"{SVG}g"))


def _points(panel: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = (line.attrib["points"].split() for line in panel.iter(f"{SVG}polyline"))
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def _texts(panel: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in panel.iter(f"{SVG}text")]


def test_a_line_for_the_loss_each_depth_and_the_learning_rate() -> None:
    loss, accuracy, rate = _panels(training_plot(_steps([4.0, 3.0, 2.0])))
    assert [len(_points(panel)) for panel in (loss, accuracy, rate)] == [1, 2, 1]  # the third depth had no rows
    (line,) = _points(loss)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)  # a falling loss: lower is further down
    assert _texts(accuracy)[-2:] == ["0", "1"]


def test_many_steps_are_averaged_and_the_panel_says_over_how_many() -> None:
    jumping = [3.0 + (-1) ** place for place in range(1000)]
    loss, _, _ = _panels(training_plot(_steps(jumping)))
    (line,) = _points(loss)
    assert len(line) == 100
    assert len({y for _, y in line}) == 1
    assert _texts(loss)[0] == "loss (KL divergence, nats), mean of 10 steps"


def test_a_step_without_rows_at_a_depth_is_left_out_of_the_mean() -> None:
    steps = _steps([4.0] * 200)
    gappy = [replace(step, accuracy=(0.5, 0.2 if step.step % 2 else None, None)) for step in steps]
    assert _points(_panels(training_plot(gappy))[1]) == _points(_panels(training_plot(steps))[1])


def test_a_depth_is_broken_where_nothing_is_known() -> None:
    steps = [replace(step, accuracy=(0.5, None if step.step == 3 else 0.2, None)) for step in _steps([4.0] * 5)]
    _, accuracy, _ = _panels(training_plot(steps))
    assert [len(line) for line in _points(accuracy)] == [5, 2, 2]


def test_a_training_of_one_step_is_dots() -> None:
    plot = training_plot([STEP])
    loss, accuracy, rate = _panels(plot)
    assert [len(list(panel.iter(f"{SVG}circle"))) for panel in (loss, accuracy, rate)] == [1, 2, 1]
    assert "<polyline" not in plot
    assert "Training, 1 of 2,000 steps, 100 tokens" in plot


@pytest.mark.parametrize("accuracy", [(None, None), (0.0, 0.0)])
def test_it_stands_where_nothing_is_known_or_all_is_zero(accuracy: tuple[float | None, ...]) -> None:
    plot = training_plot([replace(step, accuracy=accuracy, learning_rate=0.0) for step in _steps([0.0, 0.0])])
    assert "nan" not in plot
    assert len(_panels(plot)) == 3


def test_numbers_of_depths_that_end_alike_do_not_overlap() -> None:
    alike = tuple(0.2 + depth * 0.001 for depth in range(8))
    steps = [replace(step, accuracy=alike) for step in _steps([4.0, 4.0])]
    numbers = [
        float(node.attrib["y"])
        for node in _panels(training_plot(steps))[1].iter(f"{SVG}text")
        if node.attrib["class"] == "label"
    ]
    assert len(numbers) == 8
    assert min(abs(a - b) for a in numbers for b in numbers if a != b) >= 11.9
