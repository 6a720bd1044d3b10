from dataclasses import replace
from pathlib import Path

from peagle.drafter.metrics import METRICS, Metrics, TrainingProgress

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


def test_steps_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    steps = [STEP, replace(STEP, step=2, accuracy=(0.5, 0.125))]
    for step in steps:
        metrics.append(step)
    assert metrics.read() == (steps, metrics.num_bytes)


def test_a_reader_is_told_each_whole_line_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    assert metrics.read() == ([], 0)
    metrics.append(STEP)
    _, seen = metrics.read()
    line = (tmp_path / METRICS).read_bytes()
    with (tmp_path / METRICS).open("ab") as stream:
        stream.write(line[:20])
    assert metrics.read(seen) == ([], seen)
    with (tmp_path / METRICS).open("ab") as stream:
        stream.write(line[20:])
    assert metrics.read(seen) == ([STEP], 2 * seen)


def test_a_reader_goes_on_where_the_file_was_cut(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for number in (1, 2, 3):
        metrics.append(replace(STEP, step=number))
    _, seen = metrics.read()
    metrics.cut(seen // 3)
    assert metrics.read(seen) == ([], seen // 3)
    again = replace(STEP, step=2)
    metrics.append(again)
    assert metrics.read(seen // 3)[0] == [again]


def test_cut_to_nothing_makes_an_empty_file(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.cut(0)
    assert (tmp_path / METRICS).read_bytes() == b""


def test_a_place_within_a_line_is_read_from_the_next_line_on(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for number in (1, 2):
        metrics.append(replace(STEP, step=number))
    assert [step.step for step in metrics.read(metrics.num_bytes // 2 - 5)[0]] == [2]


def test_a_file_that_was_lost_begins_anew(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.cut(100)
    metrics.append(STEP)
    assert metrics.read()[0] == [STEP]
