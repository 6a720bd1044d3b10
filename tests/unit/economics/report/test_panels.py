from peagle.economics.report.html import headline, of_rows, over_time

STEPS = [{"concurrency": 1, "step_s": 0.05, "plain_step_s": 0.04, "error": 0.05}]


def drafted(make_report, steps):
    """1,000 steps of 50 ms: half of the busy time. They break even at 1.25, and 1.6 tokens come of each."""
    return make_report(
        tokens=6000,
        drafter="peagle",
        num_drafts=1000,
        accepted=(480, 100, 20),
        concurrency=1,
        baseline={"source": "bench.json", "steps": steps},
    )


def test_the_headline_compares_with_the_same_run_without_its_drafter(make_report):
    panel = headline([drafted(make_report, STEPS)], ["smollm2-135m with peagle"])
    ((_, plot),) = panel.plots
    # $0.0072222 with. Half of the $0.0055556 of busy time is generation; 1.6 / 1.25 times that is $0.0035556, within
    # 5 %: $0.0007778 more without the drafter.
    assert "smollm2-135m with peagle 830,769; the same without the drafter 750,000 (733,696 to 767,045)" in plot
    assert 'class="whisker"' in plot
    assert "(bench.json)" in panel.lead


def test_a_measurement_without_error_has_no_range(make_report):
    ((_, plot),) = headline([drafted(make_report, [{**STEPS[0], "error": None}])], ["run"]).plots
    assert "750,000, of unknown error" in plot
    assert "whisker" not in plot


def test_what_the_same_run_costs_without_its_drafter_is_unknown_where_no_steps_were_measured(with_drafter):
    panel = headline([with_drafter], ["run"])
    assert "Without the drafter: unknown" in panel.lead
    assert "the same without" not in panel.plots[0][1]


def test_a_run_without_output_has_a_headline(make_report):
    assert "no output yet" in headline([make_report(tokens=0)], ["run"]).plots[0][1]


def test_a_report_from_before_these_figures_has_no_panel_of_them(with_drafter):
    assert over_time(with_drafter) == of_rows(with_drafter) == []


def test_engines_that_are_not_drawn_are_counted(detailed):
    detailed["timeline"]["num_engines"] = 40
    assert "Showing the first 1 of 40 engines." in over_time(detailed)[0].lead


def test_dollars_over_time_are_money_and_speed_is_none(detailed):
    assert [panel.heading for panel in over_time(detailed) if panel.is_money] == ["Dollars spent"]
