"""The plots of the dashboard in a real browser: what is drawn where."""

import pytest

from tests.serving import browser
from tests.serving.dashboard_server import DashboardServer

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
def test_the_label_of_the_target_covers_no_curve(tmp_path, width):
    if browser.find() is None:
        pytest.skip("there is no Chromium on this machine")
    page = browser.Page(tmp_path)
    try:
        with DashboardServer() as server:
            page.look(width, 900)
            page.open(server.url)
            page.until("document.querySelector('#model').textContent === 'scripted'")
            page.value(RECORD)
            page.point("#run", click=True)
            page.until("document.querySelector('#said').textContent.includes('ended')")
            drawn = page.until("drawn.labels.length && drawn.heights.length && drawn")
        assert max(drawn["labels"]) + 4 < min(drawn["heights"])
    finally:
        page.close()
