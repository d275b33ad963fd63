"""The plots and the table of the dashboard in a real browser: what is drawn where."""

import pytest

from tests.serving.test_dashboard import DESKTOP, PHONE, SMALL, chromium, page, server  # noqa: F401

RECORD = """
window.drawn = {labels: [], heights: []};
const type = CanvasRenderingContext2D.prototype, write = type.fillText, line = type.lineTo;
type.fillText = function (text, x, y) {
  if (text.startsWith("target")) drawn.labels.push(y);
  return write.call(this, text, x, y);
};
type.lineTo = function (x, y) {
  if (this.canvas.ariaLabel?.includes("target")) drawn.heights.push(y);
  return line.call(this, x, y);
};
"""


@pytest.mark.parametrize("width", [320, 1280])
def test_the_label_of_the_target_covers_no_curve(page, width):  # noqa: F811
    page.look(width, 900)
    page.value(RECORD)
    page.point("#run", click=True)
    page.until("document.querySelector('#said').textContent.includes('ended')")
    drawn = page.until("drawn.labels.length && drawn.heights.length && drawn")
    assert max(drawn["labels"]) + 4 < min(drawn["heights"])


def test_labels_of_empty_axes_have_room(page, server):  # noqa: F811
    """After a refusal nothing is drawn: the labels are those of small numbers and begin inside the canvas."""
    server.refuse = 400, {}, "temperature must be at most 2; got 9"
    page.value(
        "const brush = CanvasRenderingContext2D.prototype; brush.fillText = new Proxy(brush.fillText, {"
        "apply(target, own, [words, x, y]) { const w = own.measureText(words).width;"
        "const begin = own.textAlign === 'right' ? x - w : own.textAlign === 'center' ? x - w / 2 : x;"
        "(window.labels ??= []).push([words, begin, begin + w, own.canvas.clientWidth]);"
        "return Reflect.apply(target, own, [words, x, y]); } })"
    )
    page.point("#run", click=True)
    page.until("!document.querySelector('#alert').hidden")
    page.until("window.labels?.length > 12")
    assert [label for label in page.value("labels") if label[1] < 0 or label[2] > label[3]] == []


def test_a_target_is_drawn_only_where_the_law_is_on(page):  # noqa: F811
    label = "document.querySelector('canvas').getAttribute('aria-label')"
    for preset, drawn in (("meso", False), ("off", False), ("micro", True), ("full", True)):
        page.value(f"document.querySelector('input[value={preset}]').click()")
        assert page.value("document.querySelector('#target').disabled") is not drawn
        page.point("#run", click=True)
        page.until(f"document.querySelector('#said').textContent.startsWith('{preset}: ended')")
        assert ("target 1.35" in page.value(label)) == drawn, preset
    page.point("#compare", click=True)
    page.until("!document.querySelector('#verdict').hidden")
    assert "target 1.35" in page.value(label)  # of one of both


@pytest.mark.parametrize("size", [SMALL, PHONE, DESKTOP], ids=["small", "phone", "desktop"])
def test_every_column_of_the_sequences_is_in_view(page, size):  # noqa: F811
    page.look(*size)
    page.until("document.querySelectorAll('#in-flight tr').length === 4")
    outside = (
        "(() => { const box = document.querySelector('.scroll').getBoundingClientRect();"
        "return [...document.querySelectorAll('.in-flight th, .in-flight td')].filter(c => {"
        "const range = document.createRange(); range.selectNodeContents(c);"
        "const r = range.getBoundingClientRect(); return r.left < box.left - 1 || r.right > box.right + 1; })"
        ".map(c => c.textContent); })()"
    )
    assert page.value(outside) == []
