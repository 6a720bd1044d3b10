"""The report of a run: as data, on the terminal, and as one HTML page.

data         what a report holds, made from an account; the source of all the rest
comparison   several reports side by side
run_info     what is said about a run besides its account
figures      which figures there are and how they are written
text         for the terminal
page, plots  for the browser
"""

from peagle.economics.report.comparison import compare
from peagle.economics.report.data import check_report, report_dict
from peagle.economics.report.page import render_html
from peagle.economics.report.run_info import RUN_KEYS, RunInfo
from peagle.economics.report.text import text_comparison, text_summary

__all__ = [
    "RUN_KEYS",
    "RunInfo",
    "check_report",
    "compare",
    "render_html",
    "report_dict",
    "text_comparison",
    "text_summary",
]
