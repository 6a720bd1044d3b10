"""A fake of `ray.util.metrics`."""

import pytest


@pytest.fixture
def ray_metrics(monkeypatch):
    """Values of Ray metrics by name and labels: sums of counters, last values of gauges, all values of histograms."""
    values = {}

    class Metric:
        def __init__(self, name, description, tag_keys, boundaries=None):
            assert description
            assert isinstance(tag_keys, tuple)
            self.name, self.tag_keys, self.boundaries, self.default = name, tag_keys, boundaries, {}

        def set_default_tags(self, tags):
            assert set(tags) <= set(self.tag_keys)
            self.default = tags
            return self

        def key(self, tags):
            labels = self.default | (tags or {})
            assert set(labels) == set(self.tag_keys)
            assert all(isinstance(label, str) for label in labels.values())
            return self.name, *(labels[key] for key in self.tag_keys)

    class Counter(Metric):
        def inc(self, value, tags=None):
            if value <= 0:
                raise ValueError(f"value must be >0, got {value}")
            values[self.key(tags)] = values.get(self.key(tags), 0) + value

    class Gauge(Metric):
        def set(self, value, tags=None):
            values[self.key(tags)] = value

    class Histogram(Metric):
        def observe(self, value, tags=None):
            assert min(self.boundaries) > 0
            values.setdefault(self.key(tags), []).append(value)

    for metric_class in (Counter, Gauge, Histogram):
        monkeypatch.setattr(f"ray.util.metrics.{metric_class.__name__}", metric_class)
    return values
