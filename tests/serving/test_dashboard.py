"""The dashboard in a real browser, against a scripted server; skipped where there is no Chromium."""

import json
import re
import time

import pytest

from tests.serving import browser
from tests.serving.dashboard_server import FOLDER, TOKENS, DashboardServer, entropy

SMALL, PHONE, DESKTOP = (320, 640), (390, 844), (1280, 900)
ENDED = "document.querySelector('#said').textContent.includes('ended')"
LIMITS = (0.25, 0.75, 1.5, 2.5, 4)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.find() is None:
        pytest.skip("there is no Chromium on this machine")
    page = browser.Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.fixture
def server():
    with DashboardServer() as running:
        yield running


@pytest.fixture
def page(chromium, server):
    chromium.look(*DESKTOP)
    chromium.open(server.url)
    chromium.until("document.querySelector('#model').textContent === 'scripted'")
    return chromium


def text(page, selector):
    return page.value(f"document.querySelector({json.dumps(selector)}).innerText")


def test_nothing_comes_from_elsewhere():
    files = [path for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css")]
    assert {path.suffix for path in files} == {".html", ".js", ".css"}
    for path in files:
        source = path.read_text("utf-8")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", source), path
        assert not re.search(r"<script(?![^>]*src=)|\sstyle=|\son[a-z]+=|innerHTML|eval\(", source), path


def test_a_run_streams_the_text_in_the_colours_of_its_entropy(page, server):
    page.value("document.querySelector('#max-tokens').value = 40; document.querySelector('#seed').value = 7")
    page.point("#run", click=True)
    page.until(ENDED)
    (body,) = server.requests
    assert body["stream"] and body["seed"] == 7 and body["max_tokens"] == 40 and body["model"] == "scripted"
    assert body["entropic"] == {"preset": "full", "trace": True}
    assert body["prompt"].startswith("class Settings")
    shown = page.value("[...document.querySelectorAll('.t')].map(t => [t.textContent, t.innerHTML])")
    assert [name for name, _ in shown] == TOKENS[:40]
    for i, (_, inside) in enumerate(shown):
        colour = sum(entropy(i) >= limit for limit in LIMITS)
        assert re.findall(r"e(\d)\b", inside)[:1] == ([str(colour)] if colour else []), i
    assert "after 40 tokens" in text(page, "#said")
    assert page.errors == []


def test_pointing_at_a_token_shows_what_was_measured(page):
    page.point("#run", click=True)
    page.until(ENDED)
    page.point(".t[data-index='12']")
    page.until("!document.querySelector('#token-card').hidden")
    card = text(page, "#token-card")
    assert f"{entropy(12):.2f} nats" in card
    assert f"{100 * (0.35 + 0.1 * entropy(12)):.0f} %" in card
    assert page.value("document.querySelectorAll('#token-card li').length") == 5
    assert page.value("document.querySelector('.chosen code').textContent") == TOKENS[12].replace(" ", "·")
    page.point("h1")
    page.until("document.querySelector('#token-card').hidden")


def test_keys_alone_are_enough(page, server):
    server.gap = 0.02
    page.press("Tab")
    page.press("Enter")  # the link that skips to the prompt
    assert page.value("document.activeElement.id") == "prompt"
    page.press("Enter", modifiers=2)
    page.until("document.querySelectorAll('.t').length > 3")
    page.press("Escape")
    page.until("document.querySelector('#said').textContent === 'Stopped.'")
    assert page.value("document.querySelector('#stop').hidden")
    count = page.value("document.querySelectorAll('.t').length")
    page.value("document.querySelector('.t[tabindex=\"0\"]').focus()")
    page.press("ArrowRight")
    assert page.value("document.activeElement.dataset.index") == "1"
    assert f"{entropy(1):.2f} nats" in text(page, "#token-card")
    page.press("End")
    assert page.value("document.activeElement.dataset.index") == str(count - 1)
    deadline = time.monotonic() + 10
    while not server.broken_off:  # the server has seen that nobody listens any more
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_side_by_side_asks_for_the_same_text_twice(page, server):
    page.point("#compare", click=True)
    page.until(ENDED)
    full, off = sorted(server.requests, key=lambda body: body["entropic"]["preset"])
    assert (full["entropic"]["preset"], off["entropic"]["preset"]) == ("full", "off")
    assert {**full, "entropic": 0, "cache_salt": 0} == {**off, "entropic": 0, "cache_salt": 0}
    assert full["cache_salt"] != off["cache_salt"]  # neither finds the prompt of the other in the cache
    assert page.value(
        "[...document.querySelectorAll('.pane h3')].map(h => h.firstChild.nextSibling.data)"
    ) == [
        "off",
        "full",
    ]
    kept = page.value("document.querySelectorAll('canvas')[2].getAttribute('aria-label')")
    assert "off: 160 tokens, mean 100.00" in kept and "full: 160 tokens" in kept


@pytest.mark.parametrize("differs_at", [None, 7])
def test_a_comparison_ends_with_a_verdict(page, server, differs_at):
    server.differs_at = differs_at
    page.point("#compare", click=True)
    page.until(ENDED)
    verdict = text(page, "#verdict")
    equal = "The tokens are equal, all 160." if differs_at is None else "The tokens differ from token 8 on."
    assert verdict.startswith(f"{equal} In this one run, off first, full took ")
    rows = page.value(
        "[...document.querySelectorAll('#verdict tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows[0] == ["preset", "tokens", "seconds", "passes", "cost C, s"]
    assert [(r[0], r[1], r[3], r[4]) for r in rows[1:]] == [
        ("off", "160", "160", "0.3200"),
        ("full", "160", "107", "0.3200"),
    ]
    page.point("#compare", click=True)
    page.until("document.querySelector('#verdict').innerText.includes('one run, full first, full took')")
    presets = [body["entropic"]["preset"] for body in server.requests]
    assert presets == ["off", "full", "full", "off"], "the order alternates"
    assert page.value(
        "[...document.querySelectorAll('#verdict td:first-child')].map(t => t.textContent)"
    ) == [
        "off",
        "full",
    ]
    page.point("#run", click=True)
    page.until("document.querySelector('#verdict').hidden")


def test_accepted_drafts_are_underlined(page):
    page.point("#run", click=True)
    page.until(ENDED)
    underlined = (
        "[...document.querySelectorAll('.t')].flatMap((t, i) =>"
        " getComputedStyle(t).textDecorationLine === 'underline' ? [i] : [])"
    )
    assert page.value(underlined) == list(range(1, 160, 3))
    assert "53 from drafts" in text(page, ".pane h3")


def test_the_servers_preset_is_chosen_until_the_user_chooses(page, server):
    chosen = "document.querySelector('input[name=preset]:checked').value"
    assert page.value(chosen) == "full"
    page.value("document.querySelector('input[value=micro]').click()")
    time.sleep(1.2)  # the page has asked for the state again
    assert page.value(chosen) == "micro"


def test_a_conversation(page, server):
    page.value("document.querySelector('input[value=chat]').click()")
    page.value("document.querySelector('#max-tokens').value = 3")
    assert page.value("document.querySelector('#compare').hidden")
    for said in ("first", "second"):
        page.value(f"document.querySelector('#prompt').value = {said!r}")
        page.point("#run", click=True)
        page.until(ENDED + " && document.querySelector('#prompt').value === ''")
        page.until("!document.querySelector('#clear').hidden")
    answer = {"role": "assistant", "content": "".join(TOKENS[:3])}
    first, second = server.requests
    assert first["messages"] == [{"role": "user", "content": "first"}] and "prompt" not in first
    assert second["messages"] == [*first["messages"], answer, {"role": "user", "content": "second"}]
    assert second["logprobs"] is True and second["top_logprobs"] == 5
    server.refuse = 400, {}, "messages must be shorter"
    page.value("document.querySelector('#prompt').value = 'third'")
    page.point("#run", click=True)
    page.until("document.querySelector('#prompt').value === 'third'")  # nothing answered it
    assert page.value("document.querySelectorAll('#conversation li').length") == 4
    page.point("#clear", click=True)
    assert page.value("document.querySelectorAll('#conversation li').length") == 0
    page.value("document.querySelector('input[value=text]').click()")
    assert page.value("document.querySelector('#prompt').value").startswith("class Settings")


@pytest.mark.parametrize("size", [SMALL, PHONE], ids=["small", "phone"])
def test_the_stop_button_is_in_reach_on_a_phone(page, server, size):
    page.look(*size)
    server.gap = 0.02
    page.point("#run", click=True)
    page.until("document.querySelectorAll('.t').length > 3")
    shown = (
        "(() => { const r = document.querySelector('#stop').getBoundingClientRect(); const e = "
        "document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2); return e?.id === 'stop'; })()"
    )
    assert page.value(shown)
    page.value("scrollTo(0, document.body.scrollHeight)")
    assert page.value(shown)
    page.value("document.querySelector('#stop').click()")
    page.until("document.querySelector('#said').textContent === 'Stopped.'")


def test_links_to_metrics_and_the_interface(page):
    links = page.value(
        "[...document.querySelectorAll('nav a')].map(a => [a.textContent, a.getAttribute('href')])"
    )
    assert links == [["Metrics", "metrics"], ["API", "openapi.json"], ["Grafana", "dashboard/grafana.json"]]


def test_plots_are_drawn_and_speak(page):
    painted = (
        "[...document.querySelectorAll('canvas')].map(c => { const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })"
    )
    page.until(f"{painted}.every(n => n > 0)")
    before = page.value(painted)
    page.point("#run", click=True)
    page.until(ENDED)
    page.until(f"{painted}.every((n, i) => n > {before}[i] + 50)")
    labels = page.value("[...document.querySelectorAll('canvas')].map(c => c.getAttribute('aria-label'))")
    assert labels[0].startswith("Sampled entropy H_T, target 1.35. full: 160 tokens, mean ")
    assert [label.split(".")[0] for label in labels[1:]] == ["Temperature T", "Pages kept", "Entropic time τ"]


def test_sequences_in_flight_by_priority(page):
    page.until("document.querySelectorAll('#in-flight tr').length === 4")
    assert page.value(
        "[...document.querySelectorAll('#in-flight tr td:nth-child(2)')].map(t => t.textContent)"
    ) == [
        "0.82",
        "0.63",
        "0.41",
        "0.20",
    ]
    assert text(page, "#in-flight-figures") == "3 running · 1 waiting · 37 % of the cache"
    assert text(page, "#health-text") == "ready"


def test_a_busy_server(page, server):
    server.refuse = 429, {"Retry_After": "2"}, "the queue is full"
    page.point("#run", click=True)
    page.until("!document.querySelector('#alert').hidden")
    assert "the queue is full" in text(page, "#alert")
    assert text(page, "#alert button") in ("Try again in 2 s", "Try again in 1 s")
    assert not page.value("document.querySelector('#run').disabled")
    server.refuse = None
    page.point("#alert button", click=True)
    page.until(ENDED)
    assert page.value("document.querySelector('#alert').hidden")


def test_a_refused_request(page, server):
    server.refuse = 400, {}, "temperature must be at most 2; got 9"
    page.point("#run", click=True)
    page.until("!document.querySelector('#alert').hidden")
    assert text(page, "#alert") == "temperature must be at most 2; got 9"


def test_a_server_that_wants_a_key(page, server):
    server.key = "sesame"
    page.until("!document.querySelector('#key-row').hidden")
    page.point("#run", click=True)
    page.until("document.querySelector('#alert').innerText.includes('API key')")
    page.value("document.querySelector('#key').focus()")
    page("Input.insertText", text="sesame")
    page.press("Enter")
    page.until(ENDED)
    page.until("document.querySelector('#health-text').textContent === 'ready'")
    page.value("sessionStorage.clear()")


def test_a_stream_that_breaks_off(page, server):
    server.cut_off = True
    page.point("#run", click=True)
    page.until("document.querySelector('#alert').innerText.includes('broke off')")
    assert page.value("document.querySelectorAll('.t').length") == 160


def test_a_server_that_is_gone(page, server):
    server.shutdown()
    server.server_close()
    page.until("document.querySelector('#health-text').textContent === 'no answer'")
    page.point("#run", click=True)
    page.until("document.querySelector('#alert').innerText.includes('does not answer')")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [SMALL, PHONE, DESKTOP], ids=["small", "phone", "desktop"])
def test_it_fits_and_can_be_read(page, size, scheme, tmp_path):
    page.look(*size, scheme)
    page.point("#compare", click=True)
    page.until(ENDED)
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    inks = page.value(
        "[...document.querySelectorAll('.legend span, .hint, #said, .primary, .text .prompt')].map(e => {"
        "let b = e; const back = () => getComputedStyle(b).backgroundColor;"
        "while (back() === 'rgba(0, 0, 0, 0)') b = b.parentElement;"
        "return [e.matches('.legend *'), getComputedStyle(e).color, back()]; })"
    )
    for _, ink, ground in inks:
        assert browser.contrast(ink, ground) >= 4.5, (ink, ground)
    ramp = [browser.luminance(ground) for in_legend, _, ground in inks if in_legend]
    assert len(ramp) == 6
    assert ramp == sorted(ramp, reverse=scheme == "light"), "lightness alone tells the classes apart"
    page.picture(tmp_path / "page.png")


def test_everything_that_can_be_focused_has_a_name(page):
    page.point("#run", click=True)
    page.until(ENDED)
    page("Accessibility.enable")
    nodes = page("Accessibility.getFullAXTree")["nodes"]
    page("Accessibility.disable")
    focusable = [
        node
        for node in nodes
        if not node.get("ignored")
        and any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", ()))
        and node["role"]["value"] not in ("RootWebArea", "generic")
    ]
    assert len(focusable) > 12
    assert [node["role"]["value"] for node in focusable if not node.get("name", {}).get("value")] == []
    assert page.value("document.documentElement.lang") == "en"


def test_no_motion_for_who_wants_none(page, server):
    server.gap = 0.05
    page.look(*DESKTOP, motion="reduce")
    page.point("#run", click=True)
    page.until("document.querySelector('.text.busy') !== null")
    assert page.value("getComputedStyle(document.querySelector('.text'), '::after').animationName") == "none"
    page.press("Escape")


def test_the_real_server_speaks_the_same_language(chromium, live):
    """The page, policy and protocol of the real server."""
    chromium.look(*DESKTOP)
    live.engine.pace = 0.005
    chromium.open(live.url + "/")
    chromium.until("document.querySelector('#health-text').textContent === 'ready'")
    assert text(chromium, "#model") == "embedded"
    chromium.until("document.querySelector('#target').placeholder.startsWith('auto: 1.7')")
    chromium.value(
        "document.querySelector('input[value=micro]').click();"
        "document.querySelector('#max-tokens').value = 12; document.querySelector('#seed').value = 0"
    )
    chromium.point("#compare", click=True)
    chromium.until(ENDED + " || document.querySelector('#alert').innerText")
    assert text(chromium, "#alert") == ""
    engine_request = live.engine.engine_requests[-1]
    assert {j.control.preset for j in live.engine.engine_requests[-2:]} == {"off", "micro"}
    assert (engine_request.request.seed, engine_request.request.max_tokens, engine_request.logprobs) == (
        0,
        12,
        5,
    )
    said = live.model.tokenizer.decode(live.engine.script(0)[:12])
    assert (
        chromium.value(
            "[...document.querySelectorAll('.pane:last-child .t')].map(t => t.textContent).join('')"
        )
        == said
    )
    chromium.point(".t[data-index='4']")
    chromium.until("!document.querySelector('#token-card').hidden")
    assert "2.00 nats" in text(chromium, "#token-card") and "0.75" in text(chromium, "#token-card")
    assert chromium.value("document.querySelectorAll('#token-card li').length") == 5
    live.engine.room = 0
    chromium.point("#run", click=True)
    chromium.until("document.querySelector('#alert').innerText.includes('queue of requests is full')")
    assert "Try again in" in text(chromium, "#alert button")
    busy = [e for e in chromium.errors if "429" not in e]
    assert busy == []
