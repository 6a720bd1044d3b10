"""What the driver tells of a training on several workers, whose first worker writes the metrics file."""

import json
from dataclasses import asdict

from peagle.drafter.pipeline import Listener
from peagle.drafter.training import Progress
from pipelines.training.distributed import _Follower


def line(step, train_s):
    progress = Progress(
        step=step, num_steps=9, loss=1.0, accuracy=(), divergence=(), learning_rate=0.1, gradient_norm=1.0,
        num_tokens=1, tokens_per_s=1.0, train_s=train_s,
    )  # fmt: skip
    return json.dumps(asdict(progress)) + "\n"


def test_whole_lines_are_told_also_when_a_resume_has_cut_the_file_back_and_written_beyond(tmp_path):
    metrics, steps = tmp_path / "metrics.jsonl", []
    metrics.write_text(line(1, 0.5))
    with _Follower(metrics, Listener(step=lambda progress: steps.append(progress.step))):
        metrics.write_text(line(1, 0.5) + line(2, 0.5) + line(3, 0.5)[:20])
    assert steps == [2]

    follower = _Follower(metrics, Listener(step=lambda progress: steps.append(progress.step)))
    metrics.write_text(line(1, 0.5) + line(2, 0.5))
    with follower:
        metrics.write_text(line(1, 0.5) + line(2, 0.123456789) + line(3, 0.5) + line(4, 0.5))
    assert steps == [2, 3, 4]
