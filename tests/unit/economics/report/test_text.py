from peagle.economics.report.text import short_summary, text_comparison, text_summary


def test_summary_shows_the_figures(drafter_report, make_report):
    text = text_summary(drafter_report)
    for part in (
        "40 of 40 committed, 0 failed",
        "60.0 output tokens/s of a busy engine, 46.2 with",
        "1.60 tokens per step, over 1,000 steps with drafts",
        "load 15% · compile 8% · busy 77% · idle 0% · lost 0%",
        "830,769 output tokens per dollar, $1.20 per million",
    ):
        assert part in text
    report = make_report(tokens=0)
    assert "no output yet" in text_summary(report)
    assert "unknown" not in short_summary(report)


def test_short_summary_has_at_most_three_notes(drafter_report):
    notes = [f"Note {number}." for number in range(5)]
    assert short_summary(drafter_report | {"notes": notes}).splitlines() == [
        "rows    40 of 40, 0 failed",
        "tokens  6,000 generated, 8,000 in prompts",
        "speed   60.0 output tokens/s, 46.2 with loading and idle time; acceptance length 1.60",
        "cost    $0.00722: 830,769 output tokens per dollar",
        "  ! Note 0.",
        "  ! Note 1.",
        "  ! Note 2.",
        f"  2 more notes: peagle report {drafter_report['run']['path']}",
    ]


def test_comparison_shows_ratios_to_the_baseline(drafter_report, plain_report):
    lines = text_comparison([plain_report, drafter_report]).splitlines()
    assert lines[:2] == ["[1] no drafter (baseline)", "[2] peagle K=3"]
    speed = next(line for line in lines if "of a busy engine" in line)
    assert speed.split()[-3:] == ["40.0", "60.0", "x1.50"]
    length = next(line for line in lines if "acceptance length" in line)
    assert length.split()[-2:] == ["-", "1.60"]
    assert speed.index("60.0") == length.index("1.60")
