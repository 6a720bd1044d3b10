"""Tests of the page of `peagle cost` in a real browser, with the example month in docs/reference/worked-month.md."""

import pytest

from jobs import cli
from tests.browser.test_page import IMAGES, WRITES_IMAGES
from tests.unit.economics.month import write_endpoint, write_nightly


@pytest.fixture
def url(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_endpoint(tmp_path / "runs" / "serve")
    write_nightly(tmp_path / "runs" / "nightly")
    assert cli.run(["cost", "runs/serve", "runs/nightly", "--month", "2026-11", "--by", "key", "--format", "html"]) == 0
    path = tmp_path / "spending.html"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plots_fit_a_phone_without_horizontal_scrolling(page, url, scheme):
    page.set_screen(width=360, height=780, scheme=scheme)
    page.open(url)
    assert page.run("document.documentElement.scrollWidth") <= 360
    widths = page.run("[...document.querySelectorAll('svg')].map((plot) => plot.getBoundingClientRect().right)")
    assert len(widths) == 2
    assert max(widths) <= 360
    assert page.console == []


@WRITES_IMAGES
def test_write_picture_of_the_month(page, url):
    page.set_screen(width=1000, height=860)
    page.open(url)
    page.save_picture(IMAGES / "spending.png")
