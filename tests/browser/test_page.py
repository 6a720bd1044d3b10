"""Tests of the endpoint's web page in a real browser."""

import os
import re
from pathlib import Path

import pytest

from peagle.economics.shared_budgets import BUDGETS_NAME, SharedBudget, edit_budgets
from pipelines.online.gateway.keys import LOCAL_NAME, KeyRecord, new_key
from tests.browser.fake_endpoint import HTML, MODEL_WITH_DRAFTER, MODEL_WITHOUT_DRAFTER

IMAGES = Path(__file__).parents[2] / "docs/images"
WRITES_IMAGES = pytest.mark.skipif(not os.environ.get("WRITE_DOCS"), reason="set WRITE_DOCS=1 to write the pictures")
NBSP, UNKNOWN = "\u00a0", "\u2013"  # the page shows a dash for an unknown value
MESSAGES = (  # JavaScript: the texts of the conversation
    "[...document.querySelectorAll('.turn')]"
    ".map((turn) => (turn.querySelector('.text:not(.thought)') ?? turn).textContent)"
)
IS_IDLE = "['playground-send', 'compare-send'].every((id) => document.getElementById(id).textContent !== 'Stop')"


def open_page(page, url):
    page.open(url)
    page.wait_for_text("live-state", "as of")
    return page


def send(page, prompt):
    page.run("document.getElementById('playground-message').focus()")
    page.type(prompt)
    page.press("Control", "Enter")


def compare(page, prompt):
    page.run("document.getElementById('compare-message').focus(); document.getElementById('compare-message').select()")
    page.type(prompt)
    page.press("Control", "Enter")


def test_no_external_requests_console_output_or_layout_shift(page, serve):
    server = serve(num_requests=20)
    page.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="window.layoutShift = 0; new PerformanceObserver((list) => { for (const entry of list.getEntries()) "
        "if (!entry.hadRecentInput) window.layoutShift += entry.value })"
        ".observe({type: 'layout-shift', buffered: true})",
    )
    open_page(page, server.url)
    send(page, "hello")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IS_IDLE}")
    compare(page, "hello")
    page.wait_for_text("compare-verdict", "identical")
    assert page.urls
    assert all(url.startswith(server.url) for url in page.urls)
    assert page.console == []
    assert page.run("window.layoutShift") < 0.02  # web.dev calls 0.1 good


def test_csp_blocks_other_hosts_and_inner_html(page, serve):
    open_page(page, serve().url)
    report_violation_by = (
        "new Promise((done) => { addEventListener('securitypolicyviolation',"
        " (event) => done(`${event.disposition} ${event.effectiveDirective}`)); %s })"
    )
    image = "document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))"
    assert page.run(report_violation_by % "fetch('https://example.org/').catch(() => {})") == "enforce connect-src"
    assert page.run(report_violation_by % image) == "enforce img-src"
    assert page.run("try { document.body.innerHTML = 'x' } catch (error) { error.name }") == "TypeError"


def test_page_shows_the_metrics_of_the_endpoint(page, serve):
    open_page(page, serve(num_requests=20).url)
    live = page.run("fetch('v1/live?window_s=300').then((answer) => answer.json())")
    page.click("#window input[value='300']")
    page.wait_for_text("speed-sub", f"5{NBSP}min")
    total = live["total"]
    assert page.text("acceptance") == f"{total['acceptance_length']:.2f}"
    assert page.text("speed") == f"{total['output_tokens_per_s']:.{1 if total['output_tokens_per_s'] >= 10 else 2}f}"
    assert page.text("engines") == "2 of 4"
    p50_s = total["ttft_p50_s"]
    assert page.text("ttft") == (f"{1000 * p50_s:.0f}{NBSP}ms" if p50_s < 0.1 else f"{p50_s:.2f}{NBSP}s")
    acceptance_rates = page.run(
        "[...document.querySelectorAll('.columns li span:first-child')].map((element) => element.textContent)"
    )
    assert acceptance_rates == [f"{100 * rate:.0f}{NBSP}%" for rate in total["acceptance_rates"]]
    assert page.run("document.querySelectorAll('#speed-chart rect').length") == len(
        live["series"]["output_tokens_per_s"]
    )
    assert page.run("document.querySelectorAll('#models-rows tr').length") == 2
    assert "busy" in page.text("money-legend")
    assert page.text("price") == "Costs are based on $0.103 an hour for 2 vCPU (custom, stated)."


def test_page_without_requests(page, serve):
    open_page(page, serve(models=(MODEL_WITH_DRAFTER,)).url)
    assert page.text("speed-sub") == f"no request finished in the last 1{NBSP}min"
    assert page.text("acceptance") == page.text("ttft") == page.text("money") == UNKNOWN
    assert page.run("getComputedStyle(document.getElementById('compare-form')).display") == "none"
    assert "drafter: none" in page.text("compare-empty")


def test_answer_shows_metrics_and_is_not_rendered_as_html(page, serve):
    open_page(page, serve().url)
    send(page, "html please")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IS_IDLE}")
    assert page.run(MESSAGES) == ["html please", HTML]
    assert page.run("document.querySelectorAll('#playground-log img, #playground-log script').length") == 0
    names = page.run("[...document.querySelectorAll('#playground-log dt')].map((element) => element.textContent)")
    values = page.run("[...document.querySelectorAll('#playground-log dd')].map((element) => element.textContent)")
    metrics = dict(zip(names, values, strict=True))
    assert set(metrics) == {"tokens/s", "first token", "latency", "tokens", "acceptance", "cost"}
    assert metrics["tokens"] == str(len(HTML.split(" ")))
    assert metrics["cost"].startswith("$0.00")
    assert UNKNOWN not in values
    page.click("#playground-new")
    assert page.run(MESSAGES) == []


def test_differences_between_two_answers_are_marked(page, serve):
    open_page(page, serve().url)
    assert page.run("document.getElementById('compare-left').value") == MODEL_WITH_DRAFTER
    assert page.run("document.getElementById('compare-right').value") == MODEL_WITHOUT_DRAFTER
    compare(page, "the same")
    page.wait_for_text("compare-verdict", "The texts are identical")
    assert "tokens/s as" in page.text("compare-verdict")
    assert page.run("document.querySelectorAll('mark').length") == 0
    page.click("#compare-order input[value='in turn']")
    compare(page, "differ")
    page.wait_for_text("compare-verdict", "3 words on the left and 3 on the right are marked")
    sides = [
        page.run(f"[...document.querySelectorAll('#compare-{name}-side mark')].map((element) => element.textContent)")
        for name in ("left", "right")
    ]
    assert sides == [["neighbours", "no more"], ["numbers", "hardly any"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_scheme_follows_the_system_until_changed(page, serve, scheme):
    page.set_screen(scheme=scheme)
    open_page(page, serve().url)
    brightness = (  # the sum of the red, green and blue channels, at most 765
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((sum, channel) => sum + +channel, 0)"
    )
    assert (page.run(brightness) > 380) == (scheme == "light")
    page.click("#theme-button")
    assert (page.run(brightness) > 380) == (scheme == "dark")
    page.call("Page.reload")
    page.wait("document.getElementById('live-state')?.textContent.includes('as of')")
    assert (page.run(brightness) > 380) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_sufficient_contrast(page, serve, scheme):
    page.set_screen(scheme=scheme)
    open_page(page, serve(num_requests=5).url)
    send(page, "hello")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IS_IDLE}")
    contrasts = page.run(Path(__file__).with_name("contrast.js").read_text(encoding="utf-8"))
    assert len(contrasts) > 50
    assert [contrast for contrast in contrasts if contrast["contrast"] < 4.5] == []  # WCAG 2.2, AA


def test_page_fits_a_phone_without_horizontal_scrolling(page, serve):
    page.set_screen(width=360, height=740)
    open_page(page, serve(num_requests=10).url)
    send(page, "hello")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IS_IDLE}")
    compare(page, "differ")
    page.wait_for_text("compare-verdict", "differ")
    assert page.run("document.documentElement.scrollWidth") == 360
    overflowing_elements = (
        "[...document.querySelectorAll('main *')].filter((element) => !element.closest('.scroll, .unseen, .segments')"
        " && element.getBoundingClientRect().right > 360).map((element) => element.outerHTML.slice(0, 80))"
    )
    assert page.run(overflowing_elements) == []
    heights = "[...document.querySelectorAll('main button, main select')].map((element) => element.offsetHeight)"
    assert min(page.run(heights)) >= 40


def test_page_can_be_used_with_the_keyboard(page, serve):
    open_page(page, serve().url)
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    page.press("Enter")
    assert page.run("document.activeElement.id") == "playground-message"
    page.type("slow")
    page.press("Control", "Enter")
    page.wait_for_text("playground-send", "Stop")
    page.wait(f"document.querySelector('dd') && document.querySelector('dd').textContent !== '{UNKNOWN}'")
    page.press("Escape")
    page.wait_for_text("playground-send", "Send")
    assert "stopped" in page.text("playground-log")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "playground-send"
    unlabelled = (
        "[...document.querySelectorAll('input, select, textarea, button')].filter((element) =>"
        " !element.labels?.length && !element.getAttribute('aria-label') && !element.textContent.trim())"
        ".map((element) => element.id)"
    )
    assert page.run(unlabelled) == []
    active = "document.activeElement"
    outlined = f"{active}.matches('.segments input') ? {active}.nextElementSibling : {active}"
    for _ in range(40):
        page.press("Tab")
        if page.run("document.activeElement === document.body"):
            break
        outline = page.run(f"getComputedStyle({outlined}).outlineStyle")
        assert outline != "none", page.run("document.activeElement.outerHTML.slice(0, 120)")
    else:
        raise AssertionError("the focus did not leave the page after 40 tabs")


def test_key_is_requested_and_stored_only_for_the_tab(page, serve):
    key, record = new_key("alice")
    server = serve(requires_key=True, fixed_keys=(record,), num_requests=3)
    page.open(server.url)
    page.wait("document.getElementById('key-dialog').open")
    assert page.console == []  # no request was sent without a key
    page.type("pk-wrong")
    page.press("Enter")
    page.wait_for_text("key-notice", "is not valid")
    page.type(key)
    page.press("Enter")
    page.wait_for_text("live-state", "only this key's requests")
    assert page.text("engines") == UNKNOWN
    assert page.run("Object.values(sessionStorage)") == [key]
    assert not page.run("Object.values(localStorage).concat(document.cookie).join('')")
    send(page, "hello")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IS_IDLE}")
    page.click("#key-button")
    page.click("#key-forget")
    page.wait_for_text("live-state", "waiting for an API key")
    assert page.run("sessionStorage.length") == 0


def test_errors_are_shown_where_they_occur(page, serve):
    key, record = new_key("bob", requests_per_min=3)  # one for the list of models, and two chats
    server = serve(requires_key=True, fixed_keys=(record,))
    page.open(server.url)
    page.wait("document.getElementById('key-dialog').open")
    page.type(key)
    page.press("Enter")
    page.wait_for_text("live-state", "as of")
    send(page, "busy")
    page.wait_for_text("playground-notice", "All engines are busy")
    page.wait_for_text("playground-notice", "Try again in 5 s")
    assert page.run("document.getElementById('playground-message').value") == "busy"  # the user need not retype it
    page.run("document.getElementById('playground-message').value = ''")
    send(page, "break")
    page.wait_for_text("playground-log", "interrupted")
    page.wait_for_text("playground-notice", "The request failed")
    send(page, "one too many")
    page.wait_for_text("playground-notice", "Limit reached: this key may make 3 requests a minute.")
    assert "Try again in" in page.text("playground-notice")
    assert page.run("document.querySelector('#playground-notice').getAttribute('role')") == "alert"


def test_lost_connection_is_shown_and_recovers(page, serve):
    open_page(page, serve().url)
    page.go_offline(True)
    page.wait_for_text("live-state", "no connection; retrying in 4 s")
    assert page.run("document.getElementById('tiles').classList.contains('stale')")
    send(page, "hello")
    page.wait_for_text("playground-notice", "No connection")
    page.go_offline(False)
    page.wait_for_text("live-state", "as of")
    assert not page.run("document.getElementById('tiles').classList.contains('stale')")


@WRITES_IMAGES
@pytest.mark.parametrize(
    ("name", "width", "scheme", "selector"),
    [
        ("page-live", 1120, "light", "#live"),
        ("page-playground", 1120, "dark", "#playground"),
        ("page-compare", 1120, "light", "#compare"),
        ("page-spend", 1120, "light", "#spend"),
        ("page-phone", 360, "dark", "#live"),
    ],
)
def test_write_pictures(page, serve, name, width, scheme, selector):
    page.set_screen(width=width, height=820, scheme=scheme, scale=1.5 if width < 640 else 1)
    open_page(page, serve(num_requests=25).url)
    send(page, "Write a Fibonacci function.")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IS_IDLE}")
    compare(page, "differ, and write a Fibonacci function")
    page.wait_for_text("compare-verdict", "marked")
    page.run(f"document.querySelector('{selector}').scrollIntoView()")
    if selector == "#spend":
        page.wait_for_text("spend-state", "as of")
    page.save_picture(IMAGES / f"{name}.png")


def test_monthly_spending_is_shown_by_day_and_key(page, serve):
    open_page(page, serve(num_requests=20).url)
    assert page.text("spend-total") == UNKNOWN, "the spending was requested before its section was visible"
    page.run("document.getElementById('spend').scrollIntoView()")
    page.wait_for_text("spend-state", "UTC days")
    row_names = "[...document.querySelectorAll('#spend-rows th')].map((name) => name.textContent)"
    assert sorted(page.run(row_names)) == ["local", "no key"]
    sums = [float(page.text(f"spend-{kind}").lstrip("$")) for kind in ("attributed", "overhead", "lost", "total")]
    assert sum(sums[:3]) == pytest.approx(sums[3], rel=0.01)
    assert "overhead (loading, idle) $" in page.run(
        "document.querySelector('#spend-chart svg').getAttribute('aria-label')"
    )
    page.click("#spend-form input[value='model']")
    models = f"['{MODEL_WITHOUT_DRAFTER}', '{MODEL_WITH_DRAFTER}']"
    page.wait(f"JSON.stringify({row_names}.sort()) === JSON.stringify({models})")


def test_budgets_show_spent_remaining_and_renewal_date(page, serve):
    rows = (
        "[...document.querySelectorAll('#budget-rows tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    open_page(page, serve(num_requests=3).url)
    page.run("document.getElementById('spend').scrollIntoView()")
    page.wait_for_text("spend-state", "UTC days")
    assert page.run("document.getElementById('budgets').hidden"), "budgets are shown although none are set"

    key = KeyRecord(name=LOCAL_NAME, sha256="0" * 64, budget_usd=5.0)
    endpoint = serve(num_requests=3, budgets=(key,))
    with edit_budgets(endpoint.ledger / BUDGETS_NAME) as budgets:
        budgets["team=search"] = SharedBudget(name="team=search", budget_usd=20.0, budget_every="month")
    open_page(page, endpoint.url)
    page.run("document.getElementById('spend').scrollIntoView()")
    page.wait("!document.getElementById('budgets').hidden")
    tag, local = page.run(rows)
    assert tag[:5] == ["tag team=search", "$20.00", "$0", "$20.00", "0\u00a0%"]
    assert re.fullmatch(r"\d{4}-\d{2}-01", tag[5])
    assert (local[0], local[1], local[5]) == ("key local", "$5.00", "never")
    assert local[2] not in ("$0", UNKNOWN), "requests made before the page was opened are not counted"


def test_fake_engine_is_stated_next_to_every_cost(page, serve):
    open_page(page, serve().url)
    caveats = page.run("[...document.querySelectorAll('.caveat')].map((element) => element.textContent)")
    assert caveats == ["FAKE ENGINE: speed and dollars are not real"] * 3
