from dataclasses import replace
from xml.etree import ElementTree

from peagle.drafter.metrics import METRICS, Metrics, TrainingProgress, training_plot

STEP = TrainingProgress(
    step=1,
    num_steps=3,
    loss=2.5,
    accuracy=(0.25, None),
    accepted=(0.25, None),
    divergence=(2.5, None),
    learning_rate=1e-3,
    gradient_norm=1.0,
    num_tokens=40,
    tokens_per_s=10.0,
    train_s=4.0,
)


def test_only_complete_lines_are_read(tmp_path):
    metrics = Metrics(tmp_path)
    assert metrics.read() == ([], 0)
    metrics.append(STEP)
    _, offset = metrics.read()
    line = (tmp_path / METRICS).read_bytes()
    with (tmp_path / METRICS).open("ab") as stream:
        stream.write(line[:20])
    assert metrics.read(offset) == ([], offset)
    with (tmp_path / METRICS).open("ab") as stream:
        stream.write(line[20:])
    assert metrics.read(offset) == ([STEP], 2 * offset)


def test_metrics_reader_continues_after_a_truncation(tmp_path):
    metrics = Metrics(tmp_path)
    for number in (1, 2, 3):
        metrics.append(replace(STEP, step=number))
    _, offset = metrics.read()
    metrics.truncate(offset // 3)  # keeps the first of three lines
    assert metrics.read(offset) == ([], offset // 3)
    repeated = replace(STEP, step=2)
    metrics.append(repeated)
    assert metrics.read(offset // 3)[0] == [repeated]


def test_metrics_reader_skips_a_partial_line(tmp_path):
    metrics = Metrics(tmp_path)
    for number in (1, 2):
        metrics.append(replace(STEP, step=number))
    offset_in_first_line = metrics.num_bytes // 2 - 5
    assert [step.step for step in metrics.read(offset_in_first_line)[0]] == [2]


SVG = "{http://www.w3.org/2000/svg}"
FIRST_STEP = replace(STEP, num_steps=2000, accuracy=(0.5, 0.2, None), num_tokens=100)


def _steps(losses):
    return [replace(FIRST_STEP, step=index + 1, loss=loss) for index, loss in enumerate(losses)]


def _panels(plot):
    return list(ElementTree.fromstring(plot).iter(f"{SVG}g"))


def _points(panel):
    lines = (line.attrib["points"].split() for line in panel.iter(f"{SVG}polyline"))
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def _texts(panel):
    return [node.text or "" for node in panel.iter(f"{SVG}text")]


def test_training_plot_has_three_panels():
    loss, accuracy, rate = _panels(training_plot(_steps([4.0, 3.0, 2.0])))
    assert [len(_points(panel)) for panel in (loss, accuracy, rate)] == [1, 2, 1]  # the third depth has no values
    (line,) = _points(loss)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)  # the loss falls, and y grows downwards
    assert _texts(accuracy)[-2:] == ["0", "1"]


def test_training_plot_averages_many_steps():
    alternating = [3.0 + (-1) ** index for index in range(1000)]
    loss, _, _ = _panels(training_plot(_steps(alternating)))
    (line,) = _points(loss)
    assert len(line) == 100
    assert len({y for _, y in line}) == 1
    assert _texts(loss)[0] == "loss (KL divergence, nats), mean of 10 steps"


def test_training_plot_of_one_step_has_circles():
    plot = training_plot([FIRST_STEP])
    loss, accuracy, rate = _panels(plot)
    assert [len(list(panel.iter(f"{SVG}circle"))) for panel in (loss, accuracy, rate)] == [1, 2, 1]
    assert "<polyline" not in plot
    assert "Training, 1 of 2,000 steps, 100 tokens" in plot
