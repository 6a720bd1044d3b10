from peagle.economics.report.text import short_summary, text_comparison, text_summary


def test_the_summary_of_a_run_with_a_drafter(with_drafter):
    assert text_summary(with_drafter).splitlines() == [
        "smollm2-135m with peagle K=3 · bf16 · concurrency 1",
        "  rows          40 of 40 committed, 0 failed",
        "  output        6,000 tokens, for 8,000 prompt tokens, 1,000 of them cached",
        "  speed         60.0 output tokens/s of a busy engine, 46.2 with loading and idle time",
        "  acceptance    1.60 tokens per step, over 1,000 steps",
        "  by position   48% 10% 2% of the drafts",
        "  engines up    2 min 10 s, 1 engine start",
        "  price         $0.2 per hour for 2 vCPUs (custom, fixed; stated)",
        "  price source  stated by the user, undated",
        "  cost          $0.00722",
        "  spent on      load 15% · compile 8% · busy 77% · idle 0% · lost 0%",
        "  value         830,769 output tokens per dollar, $1.20 per million",
        "  drafter       unknown: its step times were not measured, or its drafts were not counted",
        "  prompts       unknown: no step times were measured",
    ]


def test_summary_shows_measured_savings(make_report):
    step = {"concurrency": 1, "step_s": 0.08, "plain_step_s": 0.07, "error": 0.1}
    report = make_report(
        drafter="peagle", concurrency=1, num_drafts=1000, accepted=(480, 100, 20), tokens=1640,
        baseline={"source": "bench", "steps": [step]},
    )  # fmt: skip
    # 80 of 100 busy seconds are generation; without the drafter they would be 80 x 1.6 x 0.07 / 0.08 = 112.
    assert text_summary(report).splitlines()[-2:] == [
        "  drafter       $0.00178 ± $0.000622 saved: generation cost $0.00444, without a drafter $0.00622; "
        "acceptance length 1.60, break-even 1.14",
        "  prompts       $0.00111, and generation $0.00444",
    ]


def test_summary_without_output(make_report):
    report = make_report(tokens=0)
    assert "no output yet" in text_summary(report)
    assert "unknown" not in short_summary(report)


def test_short_summary_has_at_most_three_notes(with_drafter):
    notes = [f"Note {number}." for number in range(5)]
    assert short_summary(with_drafter | {"notes": notes}).splitlines() == [
        "rows    40 of 40, 0 failed",
        "tokens  6,000 generated, 8,000 in prompts",
        "speed   60.0 output tokens/s, 46.2 with loading and idle time; acceptance length 1.60",
        "cost    $0.00722: 830,769 output tokens per dollar",
        "  ! Note 0.",
        "  ! Note 1.",
        "  ! Note 2.",
        f"  2 more notes: peagle report {with_drafter['run']['path']}",
    ]


def test_comparison_shows_ratios_to_the_baseline(with_drafter, without_drafter):
    lines = text_comparison([without_drafter, with_drafter]).splitlines()
    assert lines[:2] == ["[1] no drafter (baseline)", "[2] peagle K=3"]
    speed = next(line for line in lines if "of a busy engine" in line)
    assert speed.split()[-3:] == ["40.0", "60.0", "x1.50"]
    length = next(line for line in lines if "acceptance length" in line)
    assert length.split()[-2:] == ["-", "1.60"]
    assert speed.index("60.0") == length.index("1.60")
